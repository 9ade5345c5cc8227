"""Drill `retry-storm`: ten times the capacity for half a minute from clients who try again at once, then a normal day.

capacity   measured
storm      10x for STORM_S; every client tries up to four times without a pause
after      0.8x from the same clients
control    the same, shorter, queue only: no deadlines, no refusals; clients give up after CONTROL_PATIENCE_S and try again
"""

from __future__ import annotations

from collections.abc import Sequence

from rungway.chaos.course import Course, Report, Say
from rungway.chaos.crowd import TARGETS, asking, capacity_per_s, undivided
from rungway.chaos.invariants import Verdict
from rungway.chaos.load import Phase, Sample
from rungway.chaos.stage import Stage

ANSWER_TOKENS = 64
RETRIES = 3
STORM_TIMES, AFTER_TIMES = 10.0, 0.8
CAPACITY_S, STORM_S, AFTER_S = 14.0, 30.0, 80.0
CONTROL_STORM_S, CONTROL_AFTER_S, CONTROL_PATIENCE_S = 8.0, 24.0, 6.0
PROOF_S = 40.0  # recovered = good from then on, for at least so long: more than a hundred requests
WITHIN_S, GOODPUT_MIN = 60.0, 0.99
ATTEMPTS_MAX = 1.2


def retry_storm(stage: Stage, say: Say) -> Report:
    """Runs against config/drill-fairness.yaml."""
    with Course(stage, say) as course:
        capacity = capacity_per_s(course, ANSWER_TOKENS, CAPACITY_S)
        streams = asking(course, _phases(capacity, STORM_S, AFTER_S), answer_tokens=ANSWER_TOKENS, retries=RETRIES)
        samples = course.send(
            f"{STORM_TIMES:g} times {capacity:.2f}/s for {STORM_S:.0f} s, then {AFTER_TIMES:g} for {AFTER_S:.0f} s",
            streams,
        )
        course.at_rest()
        attempts = course.attempts()
        control_phases = _phases(capacity, CONTROL_STORM_S, CONTROL_AFTER_S)
        control = course.send(
            f"control arm: the storm for {CONTROL_STORM_S:.0f} s, {CONTROL_AFTER_S:.0f} s after it, queue only",
            undivided(
                course,
                control_phases,
                answer_tokens=ANSWER_TOKENS,
                patience_s=CONTROL_PATIENCE_S,
                retries=RETRIES,
            ),
        )
        course.at_rest()
        verdicts = [judge_recovery(samples), judge_attempts(samples, attempts), *judge_storm(samples)]
        began_ns = min(sample.planned_wall_ns for sample in control)
        made = sum(int(str(row["ended_wall_ns"])) >= began_ns for row in course.attempts())
        return course.report("retry-storm", verdicts, judge_control(control, made))


def _phases(capacity: float, storm_s: float, after_s: float) -> list[Phase]:
    return [
        Phase("storm", 0.0, storm_s, STORM_TIMES * capacity),
        Phase("after", storm_s, after_s, AFTER_TIMES * capacity),
    ]


def _good(samples: Sequence[Sample]) -> float:
    """Each against its own class's target."""
    return sum(TARGETS[sample.stream].met(sample) for sample in samples) / len(samples) if samples else 0.0


def recovered_after_s(samples: Sequence[Sample]) -> float | None:
    """From the end of the storm until goodput is good enough and stays so to the end of the load, in whole seconds; None
    where it never was for PROOF_S."""
    after = sorted((s for s in samples if s.phase == "after"), key=lambda sample: sample.planned_wall_ns)
    if not after:
        return None
    began_ns = max((s.planned_wall_ns for s in samples if s.phase == "storm"), default=after[0].planned_wall_ns)
    ends_s = (after[-1].planned_wall_ns - began_ns) / 1e9
    for second in range(int(ends_s - PROOF_S) + 1):
        if _good([s for s in after if (s.planned_wall_ns - began_ns) / 1e9 >= second]) >= GOODPUT_MIN:
            return float(second)
    return None


def judge_recovery(samples: Sequence[Sample]) -> Verdict:
    after = [sample for sample in samples if sample.phase == "after"]
    second = recovered_after_s(samples)
    text = "not within the load" if second is None else f"{second:.0f} s after the storm"
    return Verdict(
        f"goodput back at {GOODPUT_MIN:.0%} for good",
        f"{text} (all after it: {_good(after):.1%} of {len(after)})",
        f"<= {WITHIN_S:.0f} s",
        second is not None and second <= WITHIN_S,
    )


def judge_attempts(samples: Sequence[Sample], attempts: Sequence[dict[str, object]]) -> Verdict:
    """Attempts at the engines for each client request that reached one: the stricter count, since most reach none."""
    per_request, made = engine_attempts(samples, attempts)
    text = f"{per_request:.3f} per request that reached an engine, {made / len(samples):.3f} per request of a client"
    return Verdict("attempts / requests at the engines", text, f"<= {ATTEMPTS_MAX}", 0 < per_request <= ATTEMPTS_MAX)


def engine_attempts(samples: Sequence[Sample], attempts: Sequence[dict[str, object]]) -> tuple[float, int]:
    """(attempts per client request that had at least one, all of them). A client's tries are one request of his."""
    by_id: dict[str, int] = {}
    for row in attempts:
        request_id = str(row["request_id"])
        by_id[request_id] = by_id.get(request_id, 0) + 1
    made = [sum(by_id.get(request_id, 0) for request_id in sample.request_ids) for sample in samples]
    reached = [count for count in made if count]
    return (sum(reached) / len(reached) if reached else 0.0), sum(made)


def judge_storm(samples: Sequence[Sample]) -> list[Verdict]:
    """That there was one, and what it was worth."""
    storm = [sample for sample in samples if sample.phase == "storm"]
    tries = sum(sample.tries for sample in storm) / max(1, len(storm))
    return [
        Verdict(
            "the storm: tries of a client per request",
            f"{tries:.2f} ({_good(storm):.1%} of {len(storm):,} answered in time)",
            "> 1.5, or there was none",
            tries > 1.5,
        )
    ]


def judge_control(control: Sequence[Sample], made: int) -> list[Verdict]:
    """`made`: all attempts of the arm. Who gives up before the first byte knows no request id, so they cannot be told apart."""
    after = sorted((s for s in control if s.phase == "after"), key=lambda sample: sample.planned_wall_ns)
    late = after[len(after) // 2 :]
    good, per_request = _good(late), made / len(control)
    return [
        Verdict(
            f"goodput {CONTROL_AFTER_S / 2:.0f} to {CONTROL_AFTER_S:.0f} s after the storm, queue only",
            f"{good:.1%} of {len(late)}",
            f"breaks: < {GOODPUT_MIN:.0%}",
            good < GOODPUT_MIN,
        ),
        Verdict(
            "attempts / requests at the engines, queue only",
            f"{per_request:.2f}",
            f"breaks: > {ATTEMPTS_MAX}",
            per_request > ATTEMPTS_MAX,
        ),
    ]
