"""Claw-back and preemption over a whole simulated life: the stated time is kept, what was stopped ends, bills are right."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from random import Random

import pytest

from rungway.contracts import Isolation, Slo, TenantClass
from rungway.outcomes import Outcome
from rungway.overload import PreemptSpec
from rungway.simulate.clients import Call
from rungway.simulate.measure import percentile
from rungway.simulate.workload import Stream, arrivals
from rungway.simulate.world import World
from sim import kit

SLO = Slo(ttft_ms_p99=1000, tpot_ms_p99=100, availability=0.99)
LOADED_S, RECLAIM_S = 80.0, 1.0
SETTLING_S = 0.3  # a tick, the step under way and the messages


@cache
def lent_and_claimed(reclaim_s: float | None, seed: int = 1) -> World:
    """A hog with answers of 10 s fills a pool of 16; every 20 s, when the owner of half of it counts as idle, it sends what
    fits into its half at once."""
    owner = kit.patient(
        "owner", slo=SLO, isolation=Isolation(in_flight_share_max=1.0, reserved_share=0.5, reclaim_s=reclaim_s)
    )
    hog = kit.patient("hog", isolation=Isolation(in_flight_share_max=1.0))
    world = kit.world(
        kit.one_tier(owner, hog, tick_ms=50.0, queue_timeout_s=kit.FOREVER_S, preempt=PreemptSpec(at=None)), seed=seed
    )
    streams = [Stream("hog", 2.0, (64, 64), (400, 600), end_s=LOADED_S)]
    streams += [Stream("owner", 200.0, (64, 64), (20, 40), start_s=at, end_s=at + 0.04) for at in (20.0, 40.0, 60.0)]
    world.play(arrivals(streams, Random(seed)))
    assert world.watch.broken == []
    return world


def waits_s(world: World, tenant: str) -> list[float]:
    calls = [call for call in world.clients.calls if call.arrival.tenant == tenant]
    assert all(call.outcome == Outcome.COMPLETED for call in calls), tenant
    return [(call.first_ns - call.sent_ns) / 1e9 for call in calls]


def evicted(world: World) -> dict[str, int]:
    """Request -> how often it was stopped, of rows."""
    found = {name: json.loads(row.decision)["evictions"] for name, row in world.disk.rows.items()}
    return {name: count for name, count in found.items() if count}


@pytest.mark.parametrize("seed", range(1, 4))
def test_a_lent_share_is_back_within_the_stated_time(seed: int) -> None:
    world = lent_and_claimed(RECLAIM_S, seed)
    assert max(waits_s(world, "owner")) <= RECLAIM_S + SETTLING_S
    assert evicted(world), "nobody was stopped: the test shows nothing"


def test_by_new_grants_only_it_takes_as_long_as_the_answers_that_run() -> None:
    assert max(waits_s(lent_and_claimed(None), "owner")) > RECLAIM_S + SETTLING_S


@pytest.mark.parametrize("seed", range(1, 4))
def test_what_was_stopped_ends_whole_and_is_stopped_at_most_twice(seed: int) -> None:
    """The bills are compared with the engines' tokens, request by request, in `world.watch`."""
    world = lent_and_claimed(RECLAIM_S, seed)
    counts = evicted(world)
    assert max(counts.values()) <= 2
    for name in counts:
        row = world.disk.rows[name]
        assert (row.tenant, row.outcome, row.wasted_tokens, row.prompt_tokens) == ("hog", "completed", 0, 64)
    waits_s(world, "hog")


def test_a_stopped_answer_costs_what_it_costs_when_it_runs_through() -> None:
    plain, disturbed = (_bills(lent_and_claimed(reclaim_s)) for reclaim_s in (None, RECLAIM_S))
    assert plain == disturbed


def _bills(world: World) -> dict[str, int]:
    return {name: row.cost_nusd for name, row in world.disk.rows.items()}


# -- classes ---------------------------------------------------------------------------------------------------------


@cache
def two_classes(at: float | None) -> World:
    """Batch answers of 30 s fill the pool; now and then somebody asks who wants his first token within a second."""
    urgent = kit.patient("urgent", slo=SLO)
    bulk = kit.patient("bulk", tenant_class=TenantClass.BATCH)
    world = kit.world(kit.one_tier(urgent, bulk, tick_ms=50.0, preempt=PreemptSpec(at=at)))
    streams = [
        Stream("bulk", 0.6, (64, 64), (1200, 1800), end_s=120.0),
        Stream("urgent", 0.5, (64, 64), (20, 60), start_s=40.0, end_s=120.0),
    ]
    world.play(arrivals(streams, Random(2)))
    assert world.watch.broken == []
    return world


def test_a_full_batch_of_long_answers_of_a_lower_class_does_not_cost_a_higher_one_its_target() -> None:
    assert max(waits_s(two_classes(0.5), "urgent")) <= 1.0
    worst = percentile(waits_s(two_classes(None), "urgent"), 0.9)
    assert worst is not None and worst > 1.0, "without it they wait: else the test shows nothing"


def test_the_lower_class_loses_no_more_than_it_must() -> None:
    world = two_classes(0.5)
    waits_s(world, "bulk")  # all end whole
    urgent = [call for call in world.clients.calls if call.arrival.tenant == "urgent"]
    counts = evicted(world)
    assert 0 < sum(counts.values()) <= len(urgent)
    assert max(counts.values()) <= 2
    assert longest(world, "bulk") < 2.5 * longest(two_classes(None), "bulk")


def longest(world: World, tenant: str) -> float:
    def took(call: Call) -> float:
        return (call.done_ns - call.sent_ns) / 1e9

    return max(took(call) for call in world.clients.calls if call.arrival.tenant == tenant)


def test_a_lower_class_is_not_stopped_below_its_minimum_share() -> None:
    """Higher-class work without end, from tenants inside their shares: batch still has its tenth of the places."""
    many = [kit.patient(f"u{k}", slo=SLO) for k in range(8)]
    bulk = kit.patient("bulk", tenant_class=TenantClass.BATCH)
    world = kit.world(kit.one_tier(*many, bulk, tick_ms=50.0, queue_timeout_s=600.0))
    streams = [Stream(tenant.name, 1.5, (64, 64), (64, 64), start_s=5.0, end_s=60.0) for tenant in many]
    streams.append(Stream("bulk", 2.0, (64, 64), (200, 300), end_s=60.0))
    start_s = world.loop.now_ns / 1e9
    world.clients.begin(iter([replace(a, at_s=a.at_s + start_s) for a in arrivals(streams, Random(3))]))
    held = []
    for _ in range(60):
        world.loop.run(world.loop.now_ns + 10**9)
        held.append(world.controller.core.cell.pools["small"].band_sequences[2])
    assert min(held[10:]) >= 1
    served = world.sampler.served()
    total = sum(served.values())
    assert served[("small", "bulk")] >= 0.09 * total
