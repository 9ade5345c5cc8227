"""Too much load: what is still worth something gets through, the classes give way in order, and it ends when it ends."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from random import Random
from typing import Any

import pytest

from rungway.contracts import CLASS_ORDER, LadderTerms, Quotas, Slo, TenantClass
from rungway.outcomes import Outcome
from rungway.overload import ShedSpec
from rungway.simulate import scenario
from rungway.simulate.clients import Call
from rungway.simulate.summary import good, summary
from rungway.simulate.workload import Arrival, Stream, arrivals
from rungway.simulate.world import World
from sim import kit

CAPACITY_PER_S = 25.0  # two replicas of 16 sequences at 20 ms a token, answers of 64 tokens on average
TTFT_MS = {TenantClass.INTERACTIVE: 1000.0, TenantClass.STANDARD: 3000.0, TenantClass.BATCH: 20_000.0}
TPOT_MS = 20.0
WARM_S, LOADED_S = 10.0, 60.0


def crowd(shed: ShedSpec | None = None, floor: str = "defer", **changes: Any) -> World:
    """Two tenants of each class on two replicas, with the platform's defaults for all that is not asked for."""
    quotas = Quotas(requests_per_minute=None, tokens_per_minute=None, concurrent_requests=None, queue_max=200)
    tenants = [
        scenario.tenant(
            f"{name}-{number}",
            tenant_class=name,
            models=("small",),
            slo=Slo(ttft_ms_p99=TTFT_MS[name], tpot_ms_p99=100.0, availability=0.99),
            quotas=quotas,
            ladder=LadderTerms(floor=floor),
        )
        for name in CLASS_ORDER
        for number in range(2)
    ]
    spec: dict[str, Any] = {"tick_ms": 100.0} if shed is None else {"tick_ms": 100.0, "shed": shed}
    return kit.world(kit.one_tier(*tenants, **spec), replicas=2, report_ms=200.0, **changes)


def load(world: World, *phases: tuple[float, float, float], seed: int = 3, deadlines: bool = True) -> list[Arrival]:
    """Phases of (times the capacity, from, to): every tenant asks for its sixth. Clients want nothing that comes later than
    their first token's target and the pace after it."""
    streams = [
        Stream(tenant.name, times * CAPACITY_PER_S / 6, (100, 100), (32, 96), start_s=start_s, end_s=end_s)
        for times, start_s, end_s in phases
        for tenant in world.platform.tenants
    ]
    wanted = arrivals(streams, Random(seed))
    if not deadlines:
        return wanted
    targets = {tenant.name: TTFT_MS[tenant.tenant_class] for tenant in world.platform.tenants}
    return [replace(a, deadline_ms=targets[a.tenant] + TPOT_MS * a.output_tokens) for a in wanted]


@cache
def overloaded(times: float, arm: str = "deadlines") -> tuple[World, dict[str, Any]]:
    """With deadlines of the clients; or with none, where the ladder may answer (`ladder`) or every answer has to be a
    model's (`models`)."""
    world = crowd(floor="small_tier" if arm == "models" else "defer")
    world.play(load(world, (times, 0.0, LOADED_S), deadlines=arm == "deadlines"))
    return world, summary(world)


def goodput_per_s(world: World) -> float:
    """In the steady part of the load."""
    start_ns = world.sampler.started_ns
    steady = [call for call in world.clients.calls if WARM_S <= (call.done_ns - start_ns) / 1e9 < LOADED_S]
    return sum(good(world, call) for call in steady) / (LOADED_S - WARM_S)


def shed_ratio(calls: list[Call]) -> float:
    """Refused, by the platform's state or at a full queue (both are overload), or answered by the ladder without a model."""
    return sum(call.outcome in (Outcome.REFUSED, Outcome.TEMPLATE) for call in calls) / len(calls)


def test_goodput_stays_at_its_plateau() -> None:
    goodput = {times: goodput_per_s(overloaded(times)[0]) for times in (1.0, 1.5, 2.0, 5.0, 10.0)}
    best = max(goodput.values())
    assert goodput[2.0] >= 0.95 * best, goodput
    assert goodput[10.0] >= 0.90 * best, goodput
    assert 0.9 * CAPACITY_PER_S <= best <= CAPACITY_PER_S


@pytest.mark.parametrize("arm", ["ladder", "models"])
def test_goodput_stays_at_its_plateau_without_a_deadline_of_any_client(arm: str) -> None:
    """No client sends a deadline and no setting is changed: the classes' own targets hold it."""
    loads = (1.0, 1.5, 2.0, 5.0, 10.0) if arm == "ladder" else (1.0, 2.0, 10.0)
    goodput = {times: goodput_per_s(overloaded(times, arm)[0]) for times in loads}
    best = max(goodput.values())
    assert goodput[2.0] >= 0.95 * best, goodput
    assert goodput[10.0] >= 0.90 * best, goodput
    assert 0.9 * CAPACITY_PER_S <= best <= CAPACITY_PER_S


def test_the_ladder_answers_before_anybody_is_refused() -> None:
    """At 2x no request of the higher classes is refused: who is late has a template instead."""
    _, result = overloaded(2.0, "ladder")
    assert result["outcomes"]["template"] > 50 * result["outcomes"].get("refused", 0)


def test_without_a_latest_start_most_is_served_too_late() -> None:
    """The control arm: nobody says until when an answer is worth something."""
    world = crowd(ShedSpec(target_factor=None))
    world.play(load(world, (2.0, 0.0, LOADED_S), deadlines=False))
    assert goodput_per_s(world) < 0.5 * CAPACITY_PER_S


def test_nobody_is_turned_away_below_the_capacity() -> None:
    world, result = overloaded(0.7, "ladder")
    assert result["outcomes"] == {"completed": len(world.clients.calls)}


@pytest.mark.parametrize(
    ("times", "arm"),
    [(times, "deadlines") for times in (1.5, 2.0, 5.0, 10.0)]
    + [(times, "ladder") for times in (1.5, 2.0, 5.0, 10.0)]
    + [(times, "models") for times in (2.0, 10.0)],
)
def test_lower_classes_give_way_first(times: float, arm: str) -> None:
    world, _ = overloaded(times, arm)
    by_class = {
        name: shed_ratio([call for call in world.clients.calls if call.tenant_class == name]) for name in CLASS_ORDER
    }
    ratios = list(by_class.values())
    assert ratios == sorted(ratios), by_class
    assert ratios[-1] > ratios[0], "nothing was shed: the test shows nothing"


@pytest.mark.parametrize("arm", ["deadlines", "ladder", "models"])
def test_the_lowest_class_still_trickles(arm: str) -> None:
    world, result = overloaded(10.0, arm)
    share = world.platform.controller.class_shares["batch"]
    assert result["classes"]["batch"]["goodput_per_s"] >= 0.9 * share * result["goodput_per_s"]


@pytest.mark.parametrize(
    ("times", "arm"),
    [(1.0, "deadlines"), (1.5, "deadlines"), (2.0, "deadlines"), (2.0, "ladder"), (2.0, "models")],
)
def test_hardly_a_token_is_made_for_nothing(times: float, arm: str) -> None:
    _, result = overloaded(times, arm)
    assert result["wasted_tokens_ratio"] <= 0.01
    assert result["violations"] == []


def test_a_refusal_costs_no_engine_anything() -> None:
    world, _ = overloaded(5.0)
    refused = [call for call in world.clients.calls if call.outcome == Outcome.REFUSED]
    assert refused and not any(call.engine_starts for call in refused)
    assert not any(end.request_id in refused[0].request_ids for r in world.replicas.values() for end in r.truth)


@pytest.mark.parametrize("deadlines", [True, False])
def test_a_retry_storm_ends_with_its_cause(deadlines: bool) -> None:
    """Ten times the capacity for half a minute from clients who try three times without a pause, then a normal day."""
    shed = None if deadlines else scenario.TIGHT
    world = crowd(shed, floor="small_tier", tries_max=3, backoff_s=0.0)
    world.play(load(world, (10.0, 0.0, 30.0), (0.8, 30.0, 110.0), seed=4, deadlines=deadlines))
    assert world.watch.broken == []
    start_ns = world.sampler.started_ns
    later = [call for call in world.clients.calls if call.sent_ns - start_ns >= int(90e9)]
    assert len(later) > 200
    assert sum(good(world, call) for call in later) >= 0.99 * len(later)
    tries = sum(call.tries for call in world.clients.calls) / len(world.clients.calls)
    starts = sum(gateway.starts for gateway in world.gateways) / len(world.clients.calls)
    assert tries > 1.5, "nobody retried: no storm"
    assert starts <= 1.2
