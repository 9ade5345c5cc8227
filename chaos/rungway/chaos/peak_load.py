"""Drill `peak-load`: a tenant inside its quota while another sends ten times its fair share.

    alone      the victim by itself
    together   victim and aggressor: more than the platform can serve
    recovery   the victim by itself; the ladder has to come back to 0
    control    the same two loads behind one key: one queue, no caps, no ladder

The bar on the victim's TTFT is 1.35 x its own p99 alone, or NOISE_MS more than that, whichever is larger: on a machine
whose two cores carry platform, engines and load together, one late wake-up of one process costs tens of milliseconds
and says nothing about isolation. Both numbers are printed, and beside them the time that the victim's requests waited in
our queue, which isolation alone decides.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from rungway.chaos import invariants
from rungway.chaos.course import Course, Report, Say, Target, goodput, of, ttft_p99_ms
from rungway.chaos.invariants import Admin, Verdict
from rungway.chaos.load import Phase, Sample, Stream, percentile
from rungway.chaos.stage import Stage

MODEL, POOL, TENANT_CLASS = "large", "large", "interactive"
ANSWER_TOKENS = 24
FAIR_SHARE_PER_S = 5.5  # of the large tier's 11 answers a second between two tenants of equal weight
VICTIM_PER_S = 3.5
AGGRESSOR_PER_S = 10 * FAIR_SHARE_PER_S
ALONE_S, TOGETHER_S, RECOVERY_S, CONTROL_S = 15.0, 18.0, 4.0, 9.0
TARGET = Target(ttft_ms=1000.0, tpot_ms=200.0)  # the victim's SLO
RATIO_MAX, NOISE_MS = 1.35, 100.0
WAIT_MS_MAX = 100.0
GOODPUT_MIN, CONTROL_RATIO_MIN = 0.99, 10.0
BACK_WITHIN_S = 40.0


def peak_load(stage: Stage, say: Say) -> Report:
    """Run it against `stage`, which serves config/drill.yaml. About 75 s of load."""
    with Course(stage, say) as course:
        admin, since_ns = course.admin, course.since_s * 1_000_000_000
        samples = course.send(
            f"victim {VICTIM_PER_S}/s, after {ALONE_S:.0f} s aggressor {AGGRESSOR_PER_S:.0f}/s for {TOGETHER_S:.0f} s",
            _streams(stage),
        )
        say("waiting for the ladder to come back to 0")
        back = _ladder_back(admin, samples)
        probe = course.send("one request of the aggressor at rest", (_probe(stage),))
        course.at_rest()
        logged, rungs = admin.audit("downgrade", since_ns), admin.audit("rung", since_ns)
        verdicts = [
            *_victim(samples),
            _victim_wait(admin, samples),
            *_ladder(samples, rungs),
            back,
            _undegraded_again(probe),
            invariants.downgrades_match(samples, logged),
            invariants.downgrades_first(samples, logged),
        ]
        control = course.send(
            f"control arm: both behind one key for {CONTROL_S:.0f} s, no caps, no ladder", _control_streams(stage)
        )
        return course.report("peak-load", verdicts, _control(samples, control))


def _stream(name: str, key: str, phases: tuple[Phase, ...], *, seed: int) -> Stream:
    flood = name == "aggressor"
    return Stream(name=name, key=key, model=MODEL, max_tokens=ANSWER_TOKENS, phases=phases, poisson=flood, seed=seed)


def _streams(stage: Stage) -> tuple[Stream, ...]:
    victim = (
        Phase("alone", 0.0, ALONE_S, VICTIM_PER_S),
        Phase("together", ALONE_S, TOGETHER_S, VICTIM_PER_S),
        Phase("recovery", ALONE_S + TOGETHER_S, RECOVERY_S, VICTIM_PER_S),
    )
    aggressor = (Phase("together", ALONE_S, TOGETHER_S, AGGRESSOR_PER_S),)
    return (
        _stream("victim", stage.key("victim"), victim, seed=1),
        _stream("aggressor", stage.key("aggressor"), aggressor, seed=2),
    )


def _control_streams(stage: Stage) -> tuple[Stream, ...]:
    key = stage.key("undivided")
    return (
        _stream("victim", key, (Phase("control", 0.0, CONTROL_S, VICTIM_PER_S),), seed=1),
        _stream("aggressor", key, (Phase("control", 0.0, CONTROL_S, AGGRESSOR_PER_S),), seed=2),
    )


def _victim(samples: Sequence[Sample]) -> list[Verdict]:
    alone, together = of(samples, "victim", "alone"), of(samples, "victim", "together")
    p99_alone, p99_together = ttft_p99_ms(alone), ttft_p99_ms(together)
    ratio, bar_ms = p99_together / p99_alone, max(RATIO_MAX * p99_alone, p99_alone + NOISE_MS)
    degraded = sum(sample.degraded != "none" for sample in samples if sample.stream == "victim")
    share_good = goodput(together, TARGET)
    return [
        Verdict(
            "victim TTFT p99, alone -> with aggressor",
            f"{p99_alone:.0f} -> {p99_together:.0f} ms, {ratio:.2f}x (+{p99_together - p99_alone:.0f} ms)",
            f"<= {bar_ms:.0f} ms (the larger of {RATIO_MAX}x and +{NOISE_MS:.0f} ms)",
            p99_together <= bar_ms,
        ),
        Verdict(
            "victim goodput with aggressor",
            f"{share_good:.1%} of {len(together)} ({goodput(alone, TARGET):.1%} alone)",
            f">= {GOODPUT_MIN:.0%}",
            share_good >= GOODPUT_MIN,
        ),
        Verdict("victim answers degraded", str(degraded), "0", degraded == 0),
    ]


def _victim_wait(admin: Admin, samples: Sequence[Sample]) -> Verdict:
    """From the ledger: how long the victim's requests waited for a place."""

    def p99_ms(phase: str) -> float:
        ids = [sample.request_id for sample in of(samples, "victim", phase) if sample.status == 200]
        return percentile([admin.get(f"/v1/decisions/{each}")["request"]["queue_wait_ms"] for each in ids], 99)

    alone_ms, together_ms = p99_ms("alone"), p99_ms("together")
    return Verdict(
        "victim's wait for a place, p99",
        f"{alone_ms:.1f} -> {together_ms:.1f} ms",
        f"<= {WAIT_MS_MAX:.0f} ms",
        together_ms <= WAIT_MS_MAX,
    )


def _ladder(samples: Sequence[Sample], rungs: Sequence[dict[str, Any]]) -> list[Verdict]:
    """From the audited moves: who went down first, how far, and that the victim's side never moved."""
    here = [row["detail"] | {"rung": row["rung"], "wall_ns": row["wall_ns"]} for row in rungs]
    mine = [row for row in here if row["pool"] == POOL and row["tenant_class"] == TENANT_CLASS]
    down = [row for row in mine if row["why"] in ("rise", "surge")]
    within = [row for row in down if row["side"] == "within"]
    starts_ns = min((s.planned_wall_ns for s in samples if s.stream == "aggressor"), default=0)
    first = f"side {down[0]['side']!r} after {(down[0]['wall_ns'] - starts_ns) / 1e9:.1f} s" if down else "nobody"
    answers = [s for s in samples if s.stream == "aggressor"]
    degraded = sum(s.status == 200 and s.degraded != "none" for s in answers)
    refused = sum(s.status in (429, 503) for s in answers)
    return [
        Verdict(
            "who goes down the ladder first",
            f"{first}; deepest rung {max((row['rung'] for row in down), default=0)}",
            "the aggressor's side, 'over'",
            bool(down) and down[0]["side"] == "over",
        ),
        Verdict("moves down of the victim's side", str(len(within)), "0", not within),
        Verdict(
            "aggressor: degraded / in full / refused",
            f"{degraded} / {len(answers) - degraded - refused} / {refused} of {len(answers)}",
            "degraded answers, and refusals beyond capacity",
            degraded > 0 and refused > 0,
        ),
    ]


def _ladder_back(admin: Admin, samples: Sequence[Sample]) -> Verdict:
    """Bounded wait for rung 0 everywhere, counted from the aggressor's last planned request."""
    ended_ns = max(sample.planned_wall_ns for sample in samples if sample.stream == "aggressor")
    left_s = BACK_WITHIN_S - (time.time_ns() - ended_ns) / 1e9
    back = invariants.wait_until(lambda: not any(admin.rungs().values()), max(left_s, 1.0))
    since = [row["wall_ns"] for row in admin.audit("rung", ended_ns) if row["rung"] == 0]
    text = f"after {(max(since, default=ended_ns) - ended_ns) / 1e9:.0f} s" if back else f"not: {admin.rungs()}"
    return Verdict("ladder back at 0, from the aggressor's end", text, f"<= {BACK_WITHIN_S:.0f} s", back)


def _probe(stage: Stage) -> Stream:
    """One request of the aggressor at rest."""
    return Stream(
        name="aggressor",
        key=stage.key("aggressor"),
        model=MODEL,
        max_tokens=ANSWER_TOKENS,
        phases=(Phase("after", 0.0, 1.5, 1.0),),
    )


def _undegraded_again(answers: Sequence[Sample]) -> Verdict:
    ok = bool(answers) and all(one.done and one.degraded == "none" for one in answers)
    text = ", ".join(f"{one.served} degraded={one.degraded}" for one in answers)
    return Verdict("the aggressor's next request at rest", text or "no answer", "in full, by large", ok)


def _control(samples: Sequence[Sample], control: Sequence[Sample]) -> list[Verdict]:
    alone, victim = of(samples, "victim", "alone"), of(control, "victim", "control")
    p99_alone, p99 = ttft_p99_ms(alone), ttft_p99_ms(victim)
    ratio = p99 / p99_alone
    return [
        Verdict(
            "victim TTFT p99 without isolation",
            f"{p99:.0f} ms, {ratio:.0f}x of alone",
            f"breaks: > {CONTROL_RATIO_MIN:.0f}x, or the drill proves nothing",
            ratio > CONTROL_RATIO_MIN,
        ),
        Verdict(
            "victim goodput without isolation",
            f"{goodput(victim, TARGET):.1%} of {len(victim)}",
            f"breaks: < {GOODPUT_MIN:.0%}",
            goodput(victim, TARGET) < GOODPUT_MIN,
        ),
    ]
