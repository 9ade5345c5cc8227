"""The verdicts of the drills on recorded samples: each holds on a good run and fails on what it is there to catch."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rungway.chaos import course, crowd, fair_shares, isolation, overload_curve, retry_storm, service
from rungway.chaos.invariants import Verdict
from rungway.chaos.load import Phase, Sample, Stream
from rungway.chaos.stage import Stage
from rungway.settings import load_platform

ROOT = Path(__file__).parents[2]
S = 1_000_000_000


def sample(stream: str, phase: str, at_s: float = 0.0, **changes: Any) -> Sample:
    base = Sample(
        stream=stream,
        phase=phase,
        planned_wall_ns=int(at_s * S),
        lag_ms=0.0,
        status=200,
        request_id=f"{stream}-{phase}-{at_s:.3f}",
        ttft_ms=400.0,
        e2e_ms=1900.0,
        tokens=24,
        done=True,
    )
    return msgspec.structs.replace(base, **changes)


def refused(stream: str, phase: str, at_s: float = 0.0, **changes: Any) -> Sample:
    return sample(stream, phase, at_s, status=503, done=False, ttft_ms=None, tokens=0, e2e_ms=5.0, **changes)


def failing(verdicts: list[Verdict]) -> list[str]:
    return [verdict.what for verdict in verdicts if not verdict.ok]


# --- the course


def test_whoever_gave_up_waiting_counts_with_his_wait_and_who_was_refused_does_not() -> None:
    given_up = sample("v", "p", status=0, code="gave_up", done=False, ttft_ms=None, e2e_ms=9000.0)
    assert course.ttft_p99_ms([sample("v", "p"), given_up, refused("v", "p")]) == 9000.0


def test_a_round_without_a_measurement_does_not_vanish_in_the_median() -> None:
    assert course.median([3.0, 1.0, 2.0]) == 2.0
    assert math.isnan(course.median([3.0, math.nan, 2.0])) and math.isnan(course.median([]))


def test_load_that_was_not_sent_or_late_is_no_measurement() -> None:
    given_up = sample("v", "p", status=0, code="gave_up", done=False)
    assert course.as_planned([sample("v", "p"), given_up]).ok
    assert not course.as_planned([sample("v", "p", status=0, code="client_full", tries=0)]).ok
    assert not course.as_planned([sample("v", "p", lag_ms=101.0)]).ok


# --- service by time


def test_a_part_of_an_answer_counts_as_a_part() -> None:
    one = sample("v", "p", at_s=10.0, ttft_ms=1000.0, e2e_ms=3000.0, tokens=11)
    assert service.tokens_by(one, 10.9, 0) == 0.0
    assert service.tokens_by(one, 11.0, 0) == 1.0
    assert service.tokens_by(one, 12.0, 0) == pytest.approx(6.0)
    assert service.tokens_by(one, 13.0, 0) == 11.0
    assert service.tokens_between([one], 12.0, 99.0, 0) == pytest.approx(5.0)
    assert service.tokens_by(sample("v", "p", done=False), 99.0, 0) == 0.0
    target = {"v": course.Target(ttft_ms=1000.0, tpot_ms=300.0)}
    assert service.good_per_s([one], target, 10.0, 12.0, 0) == pytest.approx(6 / 11 / 2)
    assert service.good_per_s([one], {"v": course.Target(999.0, 300.0)}, 10.0, 12.0, 0) == 0.0


def test_the_start_of_a_load_comes_from_its_plan() -> None:
    stream = Stream(name="v", key="k", model="m", max_tokens=1, phases=(Phase("p", 0.0, 2.0, 2.0),))
    samples = [sample("v", "p", at_s=101.0), sample("v", "p", at_s=100.5)]
    assert service.zero_ns(samples, [stream]) == 100 * S


# --- isolation


def neighbours(
    ten_ms: float = 420.0, *, bad: int = 0, quota_ms: float = 410.0, one_spike: bool = False
) -> list[Sample]:
    found = []
    for number in range(isolation.ROUNDS):
        for phase, ttft_ms in (("alone", 400.0), ("quota", quota_ms), ("ten", ten_ms)):
            spike = one_spike and phase == "ten" and number == 0
            found += [
                sample("victim", f"{phase}-{number}", at, ttft_ms=ttft_ms * (3 if spike and at == 3 else 1))
                for at in range(20)
            ]
        found += [sample("aggressor", f"ten-{number}"), refused("aggressor", f"ten-{number}")]
    for at in range(bad):
        found.append(refused("victim", "ten-0", at))
    return found


def test_isolation_holds_and_one_late_wake_up_does_not_decide() -> None:
    assert failing(isolation.judge(neighbours())) == []
    assert failing(isolation.judge(neighbours(one_spike=True))) == ["victim goodput, neighbour at 10x"]


@pytest.mark.parametrize(
    ("samples", "what"),
    [
        (neighbours(bad=1), ["victim goodput, neighbour at 10x"]),
        (neighbours(515.0), ["victim TTFT p99, neighbour at 10x / at its quota"]),
        (neighbours(545.0, quota_ms=500.0), ["victim TTFT p99, neighbour at 10x / alone"]),
        (
            [s for s in neighbours() if s.stream == "victim" or s.done],
            ["neighbour at 10x: answered / refused"],
        ),
    ],
)
def test_what_a_victim_feels_is_seen(samples: list[Sample], what: list[str]) -> None:
    assert failing(isolation.judge(samples)) == what


def test_a_control_arm_that_does_not_break_proves_nothing() -> None:
    slow = [sample("victim", "control", at, ttft_ms=9000.0) for at in range(10)]
    assert failing(isolation.judge_control(neighbours(), slow)) == []
    mild = [sample("victim", "control", at, ttft_ms=900.0) for at in range(10)]
    assert len(failing(isolation.judge_control(neighbours(), mild))) == 2


def test_the_bully_sends_the_longest_prompts_that_fit() -> None:
    version = load_platform(ROOT / "config" / "drill-fairness.yaml").tiers[0].versions[0]
    room = version.max_context - isolation.ANSWER_TOKENS
    assert 0.97 * room <= isolation.BULLY.words < room
    assert version.fake is not None and version.fake.shared_steps, "else a long prompt costs nobody but itself"


def test_loads_only_rise_so_that_nothing_reaches_back() -> None:
    stage = Stage("http://x", {"victim": "v", "aggressor": "a"})
    victim, other = isolation.streams(isolation.NOISY, stage)
    assert [phase.name for phase in victim.phases] == [f"{p}-{n}" for p in ("alone", "quota", "ten") for n in range(3)]
    rates = [phase.rate for phase in other.phases]
    assert rates == sorted(rates) and rates[-1] == 10 * rates[0]


# --- overload


CURVE = {"1x": 7.0, "1.5x": 7.2, "2x": 7.1, "5x": 7.0, "10x": 6.8}


def test_a_plateau_holds_and_a_collapse_does_not() -> None:
    assert failing(overload_curve.judge_curve(CURVE, 7.5)) == []
    assert failing(overload_curve.judge_curve(CURVE | {"2x": 6.8}, 7.5)) == ["goodput at 2x / its maximum"]
    assert failing(overload_curve.judge_curve(CURVE | {"10x": 6.4}, 7.5)) == ["goodput at 10x / its maximum"]
    assert len(failing(overload_curve.judge_curve(dict.fromkeys(CURVE, 0.0), 7.5))) == 3


def shed(ratios: tuple[float, float, float]) -> list[Sample]:
    found = []
    for phase in ("1.5x", "2x", "5x", "10x"):
        for name, ratio in zip(crowd.CLASSES, ratios, strict=True):
            found += [(refused if at < ratio * 100 else sample)(name, phase, at) for at in range(100)]
    return found


@pytest.mark.parametrize(
    ("ratios", "fails"),
    [((0.0, 0.2, 0.7), 0), ((0.3, 0.3, 0.3), 0), ((0.3, 0.2, 0.7), 4), ((0.0, 0.7, 0.6), 4), ((0.0, 0.0, 0.0), 4)],
)
def test_shedding_must_follow_the_classes(ratios: tuple[float, float, float], fails: int) -> None:
    assert len(failing(overload_curve.judge_shedding(shed(ratios)))) == fails


def test_tokens_of_cut_answers_are_waste() -> None:
    asked = [sample("standard", "2x", at) for at in range(100)]
    emitted = overload_curve.emitted_by_request([{"request_id": s.request_id, "output_tokens": 24} for s in asked])
    assert overload_curve.judge_waste(asked, emitted).ok
    cut = [msgspec.structs.replace(s, done=False) for s in asked[:2]]
    assert not overload_curve.judge_waste([*cut, *asked[2:]], emitted).ok
    assert not overload_curve.judge_waste(asked, {}).ok, "nothing was emitted: nothing was measured"


def test_a_queue_without_admission_has_to_collapse() -> None:
    assert overload_curve.judge_control(1.0, 7.0).ok
    assert not overload_curve.judge_control(5.0, 7.0).ok
    assert not overload_curve.judge_control(0.0, 0.0).ok


# --- the storm


def stormy(bad_until_s: float, *, at_end: bool = False) -> list[Sample]:
    storm = [refused("standard", "storm", at * 0.1, tries=4) for at in range(300)]
    after = [
        (refused if at * 0.4 < bad_until_s or (at_end and at == 199) else sample)("standard", "after", 30.0 + at * 0.4)
        for at in range(200)
    ]
    return [*storm, *after]


def test_recovery_is_the_moment_from_which_on_all_is_well() -> None:
    assert retry_storm.recovered_after_s(stormy(0.0)) == 0.0
    assert retry_storm.recovered_after_s(stormy(7.5)) == pytest.approx(7.0, abs=1.0)
    assert retry_storm.judge_recovery(stormy(7.5)).ok
    assert retry_storm.recovered_after_s(stormy(50.0)) is None, "too late to be shown for long enough"
    assert not retry_storm.judge_recovery(stormy(50.0)).ok
    assert retry_storm.recovered_after_s([]) is None


def test_a_single_late_failure_in_a_hundred_is_allowed_and_two_are_not() -> None:
    assert retry_storm.recovered_after_s(stormy(0.0, at_end=True)) == 0.0
    worse = [replace_done(s) if s.phase == "after" and s.planned_wall_ns > 105 * S else s for s in stormy(0.0)]
    assert retry_storm.recovered_after_s(worse) is None


def replace_done(one: Sample) -> Sample:
    return msgspec.structs.replace(one, done=False)


def test_tries_of_one_client_at_the_engines_are_counted_together() -> None:
    once = [sample("standard", "storm", at, request_ids=(f"r{at}",)) for at in range(10)]
    rows: list[dict[str, object]] = [{"request_id": f"r{at}"} for at in range(10)]
    assert retry_storm.judge_attempts(once, rows).ok
    twice = [msgspec.structs.replace(s, request_ids=(s.request_ids[0], s.request_ids[0] + "b")) for s in once]
    again: list[dict[str, object]] = [*rows, *({"request_id": f"r{at}b"} for at in range(5))]
    assert retry_storm.engine_attempts(twice, again) == (1.5, 15)
    assert not retry_storm.judge_attempts(twice, again).ok
    assert not retry_storm.judge_attempts(once, []).ok, "nothing reached an engine: nothing was measured"


def test_a_storm_without_retries_is_none_and_its_control_must_stay_broken() -> None:
    calm = [msgspec.structs.replace(s, tries=1) for s in stormy(0.0)]
    assert failing(retry_storm.judge_storm(stormy(0.0))) == [] != failing(retry_storm.judge_storm(calm))
    assert failing(retry_storm.judge_control(stormy(99.0), 2000)) == []
    assert len(failing(retry_storm.judge_control(stormy(0.0), 500))) == 2


# --- shares


def shares(per_s: Callable[[int], float]) -> list[Sample]:
    """A minute of answers of 12 tokens that each took a second, and somebody who waited 5 s for each."""
    found = []
    for name, weight in fair_shares.WEIGHTS.items():
        count = int(60 * per_s(weight))
        found += [
            sample(name, "together", at / per_s(weight) - 5.0, ttft_ms=5000.0, e2e_ms=6000.0, tokens=12)
            for at in range(count)
        ]
    return found


def test_service_by_weight_holds_and_by_turn_does_not() -> None:
    assert failing(fair_shares.judge(shares(lambda weight: 1.0 * weight), 5.0, 55.0, 0)) == []
    by_turn = fair_shares.judge(shares(lambda weight: 2.5), 5.0, 55.0, 0)
    assert [verdict.ok for verdict in by_turn] == [False, False, True]
    a_bit_off = fair_shares.judge(shares(lambda weight: 1.05 if weight == 1 else 1.0 * weight), 5.0, 55.0, 0)
    assert [verdict.ok for verdict in a_bit_off] == [False, True, True]
    assert not fair_shares.judge_control(shares(lambda weight: 1.0 * weight), 5.0, 55.0, 0).ok
    assert fair_shares.judge_control(shares(lambda weight: 2.5), 5.0, 55.0, 0).ok


def test_shares_of_tenants_that_do_not_wait_prove_nothing() -> None:
    idle = [
        msgspec.structs.replace(s, ttft_ms=100.0, e2e_ms=1100.0) if s.stream == "share-4" else s
        for s in shares(lambda weight: 1.0 * weight)
    ]
    assert fair_shares.judge(idle, 5.0, 55.0, 0)[2].ok is False


def test_jains_index() -> None:
    assert fair_shares.jain([2.0, 2.0, 2.0]) == pytest.approx(1.0)
    assert fair_shares.jain([3.0, 0.0, 0.0]) == pytest.approx(1 / 3)
    assert fair_shares.jain([0.0, 0.0]) == 0.0


# --- the stage


def test_the_stage_is_what_the_drills_assume() -> None:
    platform = load_platform(ROOT / "config" / "drill-fairness.yaml")
    tenants = {tenant.name: tenant for tenant in platform.tenants}
    assert set(platform.demo_keys) == set(tenants) - {"platform"}
    assert {name: tenants[name].weight for name in fair_shares.WEIGHTS} == fair_shares.WEIGHTS
    assert [tenants[name].tenant_class for name in crowd.CLASSES] == ["interactive", "standard", "batch"]
    for name, target in crowd.TARGETS.items():
        assert (tenants[name].slo.ttft_ms_p99, tenants[name].slo.tpot_ms_p99) == target
    victim, aggressor, undivided = (tenants[name] for name in ("victim", "aggressor", "undivided"))
    assert victim.tenant_class == aggressor.tenant_class and victim.weight == aggressor.weight
    assert aggressor.quotas.requests_per_minute is None, "only isolation may stand in its way"
    assert (undivided.isolation.in_flight_share_max, undivided.isolation.reserved_share) == (1.0, 0.0)
    assert platform.controller.in_flight_factor == 1, "nobody may wait inside the engine"
