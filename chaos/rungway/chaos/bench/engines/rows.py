"""The rows that are measured on every engine, one after the other, and on ours alone."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import count

from rungway.chaos.bench.engines.prompts import Encoder, text_ids
from rungway.chaos.bench.engines.start import Running
from rungway.chaos.bench.engines.timeline import Job, Rate, decode_rate, prefill_rate, ratio, starvation, tokens_beside

STREAMS = (1, 4, 8, 16)
KINDS = {"greedy": (0.0, 1.0), "sampled": (0.8, 0.95)}  # temperature, top_p
PREFILL_PROMPTS = 2
STARVED_STREAMS = 8
STARVED_AFTER = 24  # tokens of each stream before the long prompt comes
SYSTEM_TOKENS = 1000
QUESTION_TOKENS = 24


@dataclass(frozen=True)
class Plan:
    """`tokens`: of a stream at 1 and 4 streams; fewer at more. `questions`: of a shared system prompt."""

    rounds: int
    tokens: int
    prompt: int = 96
    prefill: int = 750
    questions: int = 3

    def answer(self, streams: int) -> int:
        return max(8, self.tokens if streams <= 4 else self.tokens * 3 // 4)


def decode(engine: Running, encoder: Encoder, plan: Plan, streams: int, kind: str, seed: int) -> Rate:
    temperature, top_p = KINDS[kind]
    prompts = [text_ids(encoder, plan.prompt, 100 * seed + stream) for stream in range(streams)]
    line = engine.run(Job(prompts, plan.answer(streams), temperature, top_p, seed))
    return decode_rate(line, streams)


def prefill(engine: Running, encoder: Encoder, plan: Plan, seed: int) -> Rate:
    prompts = [text_ids(encoder, plan.prefill, 100 * seed + 50 + stream) for stream in range(PREFILL_PROMPTS)]
    line = engine.run(Job(prompts, 1, seed=seed))
    return prefill_rate(line, prompts, engine.cpu_before_s)


def shared_prefix(engine: Running, encoder: Encoder, plan: Plan, seed: int) -> list[Rate]:
    """Time to first token of questions behind one system prompt, by the clock and in processor time; the first question, which
    nobody can have cached, is not among them."""
    system = text_ids(encoder, SYSTEM_TOKENS, 7000 + seed)
    times = []
    for question in range(plan.questions + 1):
        prompt = system + text_ids(encoder, QUESTION_TOKENS, 8000 + 50 * seed + question)
        line = engine.run(Job([prompt], 1, seed=seed))
        cpu_s = line.events[0].cpu_s - engine.cpu_before_s if line.events else math.nan
        times.append(Rate(line.first_s(0), cpu_s))
    return times[1:]


def starved(engine: Running, encoder: Encoder, context: int, seed: int, by: str) -> dict[str, float]:
    """p99 gap between a stream's tokens while a prompt as long as the context allows is read, beside that of the same streams
    without it. They are compared at the same tokens, so at the same contexts: hundreds of tokens later a stream is slower
    without any prompt. `over_before` is against their beginning, when their contexts were short."""
    prompts = [text_ids(encoder, 48, 9000 + 50 * seed + stream) for stream in range(STARVED_STREAMS)]
    long = text_ids(encoder, context - 16, 9900 + seed)
    line = engine.run(Job(prompts, context - 64, seed=seed, late=long, late_after=STARVED_AFTER))
    alone = engine.run(Job(prompts, tokens_beside(line, STARVED_STREAMS), seed=seed))
    found = starvation(line, alone, STARVED_STREAMS, STARVED_AFTER, by)
    first_s = line.first_s(STARVED_STREAMS) - line.late_at_s
    return {
        "prompt_tokens": len(long),
        "before_p99_ms": round(1e3 * found.before, 1),
        "alone_p99_ms": round(1e3 * found.alone, 1),
        "during_p99_ms": round(1e3 * found.during, 1),
        "ratio": ratio(found.during, found.alone),
        "over_before": ratio(found.during, found.before),
        "long_prompt_ttft_s": round(first_s, 2),
    }


SEEDS = count(1)  # texts are never the same twice in a run, so no engine's prefix cache helps it
