"""A long prompt arriving among eight streams that decode: what it does to the time between their tokens.

The real engine with the small model, without threads around it; every step's processor time, by a clock that the engine
itself uses, so that neighbours on the machine do not count. Beside it the same with no bound on the prompt's part.

A stream that has ended is followed by the next one: the streams' own growth would otherwise be counted as the prompt's doing.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from rungway.chaos.bench.http_load import percentile
from rungway.chaos.bench.report import Report, Say, surroundings
from rungway.clock import NS_PER_MS
from rungway.engine.assemble import Sizes, directory_parts, pick_device
from rungway.engine.blocks import BlockPool
from rungway.engine.core import Core
from rungway.engine.loader import fetch_model
from rungway.engine.protocol import Sampling, Work
from rungway.engine.rules import Rules
from rungway.engine.scheduler import Scheduler

STREAMS, STEP_TOKENS, BLOCK_TOKENS = 8, 512, 16
LONG_TOKENS, LONG_TOKENS_QUICK = 8000, 1500
STREAM_TOKENS = 256
STEPS_BEFORE = 2 * STREAM_TOKENS
BAR = 3.0


def bench_starvation(*, source: str, models_dir: Path, quick: bool, say: Say) -> Report:
    """p99 of the streams' step time while the prompt is read / before it came, bounded and not."""
    prompt = LONG_TOKENS_QUICK if quick else LONG_TOKENS
    report = Report("starvation", notes=[surroundings(), f"{source}, a prompt of {prompt} tokens, processor time"])
    path = fetch_model(source, models_dir)
    for name, rules in (("bounded", Rules()), ("unbounded", Rules(long_prefill_tokens=STEP_TOKENS))):
        before, during = _run(path, prompt, rules)
        row: dict[str, Any] = {
            "prefill": name,
            "before_ms_p50": round(percentile(before, 0.5), 1),
            "before_ms_p99": round(percentile(before, 0.99), 1),
            "during_ms_p50": round(percentile(during, 0.5), 1),
            "during_ms_p99": round(percentile(during, 0.99), 1),
            "steps": len(during),
            "prompt_s": round(sum(during) / 1000, 1),
        }
        say(", ".join(f"{key} {value}" for key, value in row.items()))
        report.control.append(row)
    bounded, unbounded = report.control
    ratio = bounded["during_ms_p99"] / bounded["before_ms_p99"]
    report.at_most("p99 between tokens, with a long prompt / before", ratio, BAR)
    report.at_least(
        "the same without a bound on its part", unbounded["during_ms_p99"] / unbounded["before_ms_p99"], BAR
    )
    return report


def _run(path: Path, prompt: int, rules: Rules) -> tuple[list[float], list[float]]:
    context = prompt + 256
    blocks = (context + 2 * STREAMS * (STREAM_TOKENS + 16)) // BLOCK_TOKENS + 64
    wish = Sizes(STREAMS + 1, context, STEP_TOKENS, blocks, BLOCK_TOKENS)
    runner, vocabulary, sizes = directory_parts(path, wish, "auto", pick_device("cpu"))
    scheduler = Scheduler(
        BlockPool(sizes.kv_blocks, sizes.block_tokens),
        max_num_seqs=sizes.max_num_seqs,
        max_num_batched_tokens=sizes.max_num_batched_tokens,
        rules=rules,
    )
    core = Core(runner, vocabulary, scheduler, context=sizes.context, waiting_max=16, clock_ns=time.process_time_ns)
    for at in range(STREAMS):
        core.add(_stream(at, STREAM_TOKENS * (at + 1) // STREAMS))
    before = [_step_ms(core)[0] for _ in range(STEPS_BEFORE)][STREAM_TOKENS:]
    core.add(_work("long", [token % 900 + 5 for token in range(prompt)], 1))
    during, said = [], False
    while not said:
        took_ms, said = _step_ms(core)
        during.append(took_ms)
    return before, during


def _stream(number: int, tokens: int) -> Work:
    return _work(f"stream{number}", [10 + number % 900] * 16, tokens)


def _work(name: str, prompt: list[int], max_tokens: int) -> Work:
    ask = Sampling(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    return Work(request_id=name, attempt=1, prompt_ids=prompt, prompt_text="", sampling=ask)


def _step_ms(core: Core) -> tuple[float, bool]:
    """Of one step: its time, and whether the long prompt's answer came. A stream that ended is followed by another."""
    began_ns = time.process_time_ns()
    deltas = core.step()
    took_ms = (time.process_time_ns() - began_ns) / NS_PER_MS
    for ended in (delta.request_id for delta in deltas if delta.finish is not None):
        if ended != "long":
            core.add(_stream(int(ended.removeprefix("stream")) + STREAMS, STREAM_TOKENS))
    return took_ms, any(delta.request_id == "long" for delta in deltas)
