"""Drills `noisy-neighbour` and `long-prompt-bully`: a victim inside its quota, and a neighbour at its quota or at ten times it.

    alone      the victim by itself, ROUNDS times PHASE_S
    quota      the neighbour at its quota, as often
    ten        the neighbour at ten times its quota, as often
    control    both behind one key at ten times: one queue, no cap, no reserve, no fair order

A percentile of a few seconds is decided by one late wake-up of the machine that carries client, platform and engine
together; so the median of the rounds counts. Loads only rise: what a heavier one left behind would make the lighter one, which
it is measured against, look worse than it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rungway.chaos.course import Course, Report, Say, Target, goodput, median, of, ttft_p99_ms
from rungway.chaos.invariants import Verdict
from rungway.chaos.load import Phase, Sample, Stream
from rungway.chaos.stage import Stage

MODEL = "large"
ANSWER_TOKENS = 24
VICTIM_WORDS, VICTIM_PER_S = 60, 2.0
VICTIM_TARGET = Target(ttft_ms=1000.0, tpot_ms=100.0)
ROUNDS, PHASE_S, CONTROL_S = 3, 9.0, 10.0
PATIENCE_S = 12.0  # of the control arm's clients: its queue would otherwise outlast the drill
VS_QUOTA_MAX, VS_ALONE_MAX = 1.25, 1.35
GOODPUT_MIN, CONTROL_RATIO_MIN = 0.99, 10.0


@dataclass(frozen=True)
class Neighbour:
    """What the other tenant sends: `words` a prompt, `per_s` at its quota."""

    words: int
    per_s: float


NOISY = Neighbour(words=60, per_s=2.5)
BULLY = Neighbour(words=4000, per_s=0.4)  # the longest prompts: 4,096 tokens of context, less answer and role


def noisy_neighbour(stage: Stage, say: Say) -> Report:
    """Ten times as many requests. Runs against config/drill-fairness.yaml."""
    return _drill("noisy-neighbour", NOISY, stage, say)


def long_prompt_bully(stage: Stage, say: Say) -> Report:
    """Ten times as many of the longest prompts. Runs against config/drill-fairness.yaml."""
    return _drill("long-prompt-bully", BULLY, stage, say)


def _drill(name: str, neighbour: Neighbour, stage: Stage, say: Say) -> Report:
    with Course(stage, say) as course:
        samples = course.send(
            f"victim {VICTIM_PER_S:g}/s, neighbour 0, {neighbour.per_s:g} and {10 * neighbour.per_s:g}/s of {neighbour.words} "
            f"words: {ROUNDS} times {PHASE_S:.0f} s each",
            streams(neighbour, stage),
        )
        course.at_rest()
        control = course.send(
            f"control arm: both behind one key for {CONTROL_S:.0f} s", control_streams(neighbour, stage)
        )
        return course.report(name, judge(samples), judge_control(samples, control))


def prompt(words: int) -> str:
    return " ".join(["lock"] * words)


def streams(neighbour: Neighbour, stage: Stage) -> list[Stream]:
    """Even gaps: the same number of requests in each phase, and none that waits for its own tenant's."""
    victim: list[Phase] = []
    other: list[Phase] = []
    for step, (phase, times) in enumerate((("alone", 0), ("quota", 1), ("ten", 10))):
        for number in range(ROUNDS):
            start_s = (step * ROUNDS + number) * PHASE_S
            victim.append(Phase(f"{phase}-{number}", start_s, PHASE_S, VICTIM_PER_S))
            if times:
                other.append(Phase(f"{phase}-{number}", start_s, PHASE_S, times * neighbour.per_s))
    return [_victim(stage.key("victim"), victim), _other(stage.key("aggressor"), other, neighbour)]


def control_streams(neighbour: Neighbour, stage: Stage) -> list[Stream]:
    key = stage.key("undivided")
    return [
        _victim(key, [Phase("control", 0.0, CONTROL_S, VICTIM_PER_S)], patience_s=PATIENCE_S),
        _other(key, [Phase("control", 0.0, CONTROL_S, 10 * neighbour.per_s)], neighbour, patience_s=PATIENCE_S),
    ]


def _victim(key: str, phases: list[Phase], patience_s: float = 0.0) -> Stream:
    return Stream(
        name="victim",
        key=key,
        model=MODEL,
        max_tokens=ANSWER_TOKENS,
        phases=tuple(phases),
        prompt=prompt(VICTIM_WORDS),
        patience_s=patience_s,
    )


def _other(key: str, phases: list[Phase], neighbour: Neighbour, patience_s: float = 0.0) -> Stream:
    return Stream(
        name="aggressor",
        key=key,
        model=MODEL,
        max_tokens=ANSWER_TOKENS,
        phases=tuple(phases),
        prompt=prompt(neighbour.words),
        patience_s=patience_s,
    )


def judge(samples: Sequence[Sample]) -> list[Verdict]:
    """The victim's time to the first token in each phase of each round, and what became of all its requests."""

    def victims_p99_ms(phase: str) -> list[float]:
        return [ttft_p99_ms(of(samples, "victim", f"{phase}-{number}")) for number in range(ROUNDS)]

    alone, quota, ten = victims_p99_ms("alone"), victims_p99_ms("quota"), victims_p99_ms("ten")
    loaded = of(samples, "victim", *(f"ten-{number}" for number in range(ROUNDS)))
    good = goodput(loaded, VICTIM_TARGET)
    sent = of(samples, "aggressor", *(f"ten-{number}" for number in range(ROUNDS)))
    answered = sum(sample.done for sample in sent)
    return [
        Verdict(
            "victim goodput, neighbour at 10x",
            f"{good:.1%} of {len(loaded)}",
            f">= {GOODPUT_MIN:.0%}",
            good >= GOODPUT_MIN,
        ),
        _ratio("victim TTFT p99, neighbour at 10x / at its quota", quota, ten, VS_QUOTA_MAX),
        _ratio("victim TTFT p99, neighbour at 10x / alone", alone, ten, VS_ALONE_MAX),
        Verdict(
            "neighbour at 10x: answered / refused",
            f"{answered} / {len(sent) - answered} of {len(sent)}",
            "some of both: it asks for more than its part",
            0 < answered < len(sent),
        ),
    ]


def _ratio(what: str, base: Sequence[float], loaded: Sequence[float], most: float) -> Verdict:
    ratio = median(loaded) / median(base)
    shown = " -> ".join("/".join(f"{value:.0f}" for value in rounds) for rounds in (base, loaded))
    return Verdict(what, f"{ratio:.2f}x of medians ({shown} ms)", f"<= {most}x", ratio <= most)


def judge_control(samples: Sequence[Sample], control: Sequence[Sample]) -> list[Verdict]:
    """Against the neighbour at its quota, which is the milder comparison."""
    quota_ms = median([ttft_p99_ms(of(samples, "victim", f"quota-{number}")) for number in range(ROUNDS)])
    victim = of(control, "victim", "control")
    p99_ms, good = ttft_p99_ms(victim), goodput(victim, VICTIM_TARGET)
    ratio = p99_ms / quota_ms
    return [
        Verdict(
            "victim TTFT p99 without isolation / neighbour at its quota",
            f"{ratio:.0f}x ({p99_ms:,.0f} ms)",
            f"breaks: > {CONTROL_RATIO_MIN:.0f}x, or the drill proves nothing",
            ratio > CONTROL_RATIO_MIN,
        ),
        Verdict(
            "victim goodput without isolation",
            f"{good:.1%} of {len(victim)}",
            f"breaks: < {GOODPUT_MIN:.0%}",
            good < GOODPUT_MIN,
        ),
    ]
