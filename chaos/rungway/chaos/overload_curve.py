"""Drill `overload-curve`: from one to ten times what the platform can serve; what is still worth something gets through.

capacity   measured: the answers a second that a queue which never empties gets
1x .. 10x  three classes in equal parts, each request with its class's deadline, one step after the other
control    CONTROL_TIMES x, queue only: one line in order of arrival, no deadlines, no classes, no refusals
"""

from __future__ import annotations

from collections.abc import Sequence

from rungway.chaos.course import Course, Report, Say, of
from rungway.chaos.crowd import CLASSES, TARGETS, asking, capacity_per_s, undivided
from rungway.chaos.invariants import Verdict
from rungway.chaos.load import Phase, Sample
from rungway.chaos.service import good_per_s, zero_ns
from rungway.chaos.stage import Stage

ANSWER_TOKENS = 36
TIMES = (1.0, 1.5, 2.0, 5.0, 10.0)
CAPACITY_S, STEP_S, WARM_S = 10.0, 18.0, 4.0
CONTROL_TIMES, CONTROL_S, CONTROL_WARM_S, CONTROL_PATIENCE_S = 5.0, 14.0, 7.0, 10.0
AT_2X_MIN, AT_10X_MIN = 0.95, 0.90
WASTED_MAX = 0.01
CONTROL_MAX = 0.5


def overload_curve(stage: Stage, say: Say) -> Report:
    """Runs against config/drill-fairness.yaml."""
    with Course(stage, say) as course:
        capacity = capacity_per_s(course, ANSWER_TOKENS, CAPACITY_S)
        steps = [Phase(_name(times), i * STEP_S, STEP_S, times * capacity) for i, times in enumerate(TIMES)]
        streams = asking(course, steps, answer_tokens=ANSWER_TOKENS)
        told = ", ".join(f"{times:g}" for times in TIMES)
        samples = course.send(f"{told} times {capacity:.2f}/s, {STEP_S:.0f} s each", streams)
        course.at_rest()
        start_ns = zero_ns(samples, streams)
        curve = {
            phase.name: good_per_s(samples, TARGETS, phase.start_s + WARM_S, phase.start_s + STEP_S, start_ns)
            for phase in steps
        }
        emitted = emitted_by_request(course.attempts())
        control_phase = Phase("control", 0.0, CONTROL_S, CONTROL_TIMES * capacity)
        control_streams = undivided(course, [control_phase], answer_tokens=ANSWER_TOKENS, patience_s=CONTROL_PATIENCE_S)
        control = course.send(f"control arm: {CONTROL_TIMES:g}x for {CONTROL_S:.0f} s, queue only", control_streams)
        course.at_rest()
        left = good_per_s(control, TARGETS, CONTROL_WARM_S, CONTROL_S, zero_ns(control, control_streams))
        verdicts = [*judge_curve(curve, capacity), *judge_shedding(samples), judge_waste(samples, emitted)]
        return course.report("overload-curve", verdicts, [judge_control(left, max(curve.values()))])


def _name(times: float) -> str:
    return f"{times:g}x"


def judge_curve(curve: dict[str, float], capacity: float) -> list[Verdict]:
    """`curve`: good answers a second by offered load."""
    best = max(curve.values())
    shown = ", ".join(f"{name} {value:.2f}" for name, value in curve.items())
    return [
        Verdict("goodput/s by offered load", shown, f"(capacity measured: {capacity:.2f}/s)", best > 0),
        *(
            Verdict(
                f"goodput at {name} / its maximum",
                f"{curve[name] / best if best else 0.0:.1%}",
                f">= {least:.0%}",
                curve[name] >= least * best > 0,
            )
            for name, least in (("2x", AT_2X_MIN), ("10x", AT_10X_MIN))
        ),
    ]


def judge_shedding(samples: Sequence[Sample]) -> list[Verdict]:
    """A lower class is refused no less often than a higher one, at every load beyond capacity."""
    verdicts = []
    for times in TIMES[1:]:
        ratios = []
        for name in CLASSES:
            asked = of(samples, name, _name(times))
            ratios.append(sum(sample.status in (429, 503) for sample in asked) / max(1, len(asked)))
        shown = " <= ".join(f"{ratio:.1%}" for ratio in ratios)
        ok = ratios == sorted(ratios) and ratios[-1] > 0
        verdicts.append(Verdict(f"refused at {_name(times)}: {', '.join(CLASSES)}", shown, "in this order", ok))
    return verdicts


def emitted_by_request(attempts: Sequence[dict[str, object]]) -> dict[str, int]:
    """Output tokens that the engines made for each request, all attempts together."""
    emitted: dict[str, int] = {}
    for row in attempts:
        request_id = str(row["request_id"])
        emitted[request_id] = emitted.get(request_id, 0) + int(str(row["output_tokens"]))
    return emitted


def judge_waste(samples: Sequence[Sample], emitted: dict[str, int]) -> Verdict:
    """At 2x: tokens that engines made for answers that nobody got whole."""
    asked = [sample for sample in samples if sample.phase == "2x"]
    made = sum(emitted.get(sample.request_id, 0) for sample in asked)
    cut = sum(emitted.get(sample.request_id, 0) for sample in asked if not sample.done)
    late = sum(
        emitted.get(sample.request_id, 0) for sample in asked if sample.done and not TARGETS[sample.stream].met(sample)
    )
    ratio = cut / made if made else 1.0
    text = f"{ratio:.2%} ({cut:,} of {made:,} in answers that were cut; {late:,} in late ones)"
    return Verdict("tokens wasted at 2x", text, f"<= {WASTED_MAX:.0%}", ratio <= WASTED_MAX)


def judge_control(left: float, best: float) -> Verdict:
    ratio = left / best if best else 1.0
    return Verdict(
        f"goodput at {CONTROL_TIMES:g}x, queue only / the maximum with admission",
        f"{ratio:.1%} ({left:.2f}/s)",
        f"breaks: < {CONTROL_MAX:.0%}, or the drill proves nothing",
        ratio < CONTROL_MAX,
    )
