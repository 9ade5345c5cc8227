"""Drill `fair-shares`: four tenants of weights 1, 2, 3 and 4 who always have somebody waiting.

together   all four ask for more than their part; service is counted by token from WARM_S on
control    the same four loads behind one key: served by how much they ask, not by weight
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from rungway.chaos.course import Course, Report, Say
from rungway.chaos.invariants import Verdict
from rungway.chaos.load import Phase, Sample, Stream
from rungway.chaos.service import first_s, tokens_between, zero_ns
from rungway.chaos.stage import Stage

MODEL = "large"
WEIGHTS = {"share-1": 1, "share-2": 2, "share-3": 3, "share-4": 4}
ANSWER_TOKENS = 12
# The fixed part before the first token is no part of the service that is shared; less of it makes more answers a second.
PROMPT = "Explain how a lock on a canal works. [[ttft_ms=50]]"
EACH_PER_S = 12.0  # the largest part is 7 a second
WARM_S, MEASURED_S, CONTROL_S = 10.0, 70.0, 12.0
CONTROL_PATIENCE_S = 8.0
WINDOW_S, LOOK_S = 10.0, 0.5
SERVICE_S = 0.5  # from a place to the first token, at most: who has waited longer than this was in the queue
OFF_MAX, JAIN_MIN = 0.02, 0.99
CONTROL_OFF_MIN = 0.10


def fair_shares(stage: Stage, say: Say) -> Report:
    """Runs against config/drill-fairness.yaml."""
    with Course(stage, say) as course:
        samples, start_ns = together(course, MEASURED_S)
        control_streams = [
            _stream(
                name, stage.key("undivided"), Phase("control", 0.0, CONTROL_S, EACH_PER_S), seed, CONTROL_PATIENCE_S
            )
            for seed, name in enumerate(WEIGHTS, 1)
        ]
        control = course.send(f"control arm: the four loads behind one key for {CONTROL_S:.0f} s", control_streams)
        course.at_rest()
        broken = judge_control(control, CONTROL_S / 3, CONTROL_S, zero_ns(control, control_streams))
        return course.report("fair-shares", judge(samples, WARM_S, WARM_S + MEASURED_S, start_ns), [broken])


def together(course: Course, measured_s: float) -> tuple[list[Sample], int]:
    """The four at once, to be measured from WARM_S on: samples, and the start of the load in wall-clock nanoseconds."""
    seconds = WARM_S + measured_s
    streams = [
        _stream(name, course.stage.key(name), Phase("together", 0.0, seconds, EACH_PER_S), seed)
        for seed, name in enumerate(WEIGHTS, 1)
    ]
    weights = ", ".join(map(str, WEIGHTS.values()))
    samples = course.send(f"four tenants of weights {weights}, {EACH_PER_S:g}/s each: {seconds:.0f} s", streams)
    course.at_rest()
    return samples, zero_ns(samples, streams)


def _stream(name: str, key: str, phase: Phase, seed: int, patience_s: float = 0.0) -> Stream:
    return Stream(
        name=name,
        key=key,
        model=MODEL,
        max_tokens=ANSWER_TOKENS,
        phases=(phase,),
        poisson=True,
        prompt=PROMPT,
        seed=seed,
        patience_s=patience_s,
        timeout_s=60.0,
    )


def served(samples: Sequence[Sample], from_s: float, to_s: float, start_ns: int) -> dict[str, float]:
    """Tokens of each tenant. All requests are alike, so cost is in proportion to them."""
    by_name: dict[str, list[Sample]] = {name: [] for name in WEIGHTS}
    for sample in samples:
        by_name[sample.stream].append(sample)
    return {name: tokens_between(own, from_s, to_s, start_ns) for name, own in by_name.items()}


def ratios(service: dict[str, float]) -> dict[str, float]:
    """In units of the whole / 10, the sum of the weights: 1 : 2 : 3 : 4 would be exact."""
    whole = sum(service.values())
    return {name: sum(WEIGHTS.values()) * tokens / whole if whole else 0.0 for name, tokens in service.items()}


def jain(values: Sequence[float]) -> float:
    """1 = all equal, 1 / n = one has everything."""
    squares = sum(value * value for value in values)
    return sum(values) ** 2 / (len(values) * squares) if squares else 0.0


def least_waiting(samples: Sequence[Sample], from_s: float, to_s: float, start_ns: int) -> int:
    """The fewest requests that any tenant had waiting at any look. Refused ones never waited."""
    waits: dict[str, list[tuple[float, float]]] = {name: [] for name in WEIGHTS}
    for sample in samples:
        began_s = first_s(sample, start_ns)
        if began_s is not None:
            waits[sample.stream].append(((sample.planned_wall_ns - start_ns) / 1e9, began_s - SERVICE_S))
    looks = [from_s + LOOK_S * number for number in range(int((to_s - from_s) / LOOK_S))]
    return min(sum(come <= at < gone for come, gone in own) for own in waits.values() for at in looks)


def judge(samples: Sequence[Sample], from_s: float, to_s: float, start_ns: int) -> list[Verdict]:
    found = ratios(served(samples, from_s, to_s, start_ns))
    off = max(abs(found[name] / weight - 1) for name, weight in WEIGHTS.items())
    edges = [from_s + WINDOW_S * number for number in range(int((to_s - from_s) / WINDOW_S) + 1)]
    indices = [
        jain([tokens / WEIGHTS[name] for name, tokens in served(samples, early, late, start_ns).items()])
        for early, late in pairwise(edges)
    ]
    waiting = least_waiting(samples, from_s, to_s, start_ns)
    return [
        Verdict(
            "service by weight 1 : 2 : 3 : 4",
            f"{' : '.join(f'{value:.3f}' for value in found.values())}, off by {off:.1%} at most",
            f"each within {OFF_MAX:.0%}",
            off <= OFF_MAX,
        ),
        Verdict(
            f"Jain's index of service / weight, worst {WINDOW_S:.0f} s",
            f"{min(indices):.4f} of {len(indices)}",
            f">= {JAIN_MIN}",
            min(indices) >= JAIN_MIN,
        ),
        Verdict("fewest waiting of any tenant at any time", str(waiting), "> 0: backlogged", waiting > 0),
    ]


def judge_control(samples: Sequence[Sample], from_s: float, to_s: float, start_ns: int) -> Verdict:
    found = ratios(served(samples, from_s, to_s, start_ns))
    off = max(abs(found[name] / weight - 1) for name, weight in WEIGHTS.items())
    return Verdict(
        "service behind one key",
        f"{' : '.join(f'{value:.2f}' for value in found.values())}, off by {off:.0%}",
        f"breaks: off by > {CONTROL_OFF_MIN:.0%}, or the drill proves nothing",
        off > CONTROL_OFF_MIN,
    )
