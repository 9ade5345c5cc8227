"""Lent shares come back and higher classes get their places, by stopping just enough; what was stopped goes on."""

from __future__ import annotations

import json
from typing import Any

import pytest

from control.harness import World, tenant
from rungway.contracts import Isolation, LadderTerms, Slo, Tenant, TenantClass
from rungway.engine.protocol import EngineStats
from rungway.messages import Evict, Report
from rungway.overload import PreemptSpec

SLO = Slo(ttft_ms_p99=1000, tpot_ms_p99=100, availability=0.99)


PATIENT = LadderTerms(floor="full")


def owner(reclaim_s: float | None = 2.0, **more: Any) -> Tenant:
    isolation = Isolation(in_flight_share_max=1.0, reserved_share=0.5, reclaim_s=reclaim_s)
    return tenant("owner", isolation=isolation, slo=SLO, ladder=PATIENT, **more)


def hog(**more: Any) -> Tenant:
    return tenant("hog", isolation=Isolation(in_flight_share_max=1.0), slo=SLO, ladder=PATIENT, **more)


def fill(world: World, count: int = 4, **changes: Any) -> list[str]:
    """Requests of the hog, one after the other, with answers that are long enough to bear a pause."""
    made = []
    for _ in range(count):
        made.append(world.submit("hog", **({"output_bound": 1000} | changes)))
        begun(world, made[-1])
        world.advance(0.05)
    return made


def begun(world: World, request_id: str, emitted: int = 1) -> None:
    """Its client has the first tokens."""
    flight = world.cell.flights[request_id]
    if (attempt := flight.attempts.get(1)) is not None:
        progress = [(request_id, 1, emitted)]
        world.core.report(Report(attempt.replica_id, EngineStats(0, 0, 0, 1000, 1000, 0), progress), world.now)


def evictions(world: World) -> list[tuple[str, Evict]]:
    return [(peer, message) for peer, message in world.sent if isinstance(message, Evict)]


def obey(world: World, emitted: int = 3) -> list[str]:
    """The replicas stop what they were told to stop; the gateway asks to go on."""
    done = []
    for _, message in evictions(world):
        flight = world.cell.flights.get(message.request_id)
        if flight is None or flight.attempts[message.attempt].end is not None:
            continue
        world.engine_end(message.request_id, emitted, attempt=message.attempt, finish="error")
        world.retry(message.request_id, "evicted", emitted)
        done.append(message.request_id)
    return done


def test_a_lent_share_comes_back_within_the_stated_time() -> None:
    world = World(owner(), hog())
    lent = fill(world)  # all places of the replica
    mine = [world.submit("owner") for _ in range(3)]
    since_ns = world.mono_ns
    world.advance(0.9)
    assert evictions(world) == [], "new grants have half of the time"
    world.advance(0.2)
    stopped = [message.request_id for _, message in evictions(world)]
    assert stopped == [lent[3], lent[2]], "the newest, and just enough for half of the pool"
    assert sorted(obey(world)) == sorted(stopped)
    assert [world.answer(request) is not None for request in mine] == [True, True, False]
    assert all(world.answer(request) is not None for request in lent[:2])
    assert world.mono_ns - since_ns <= 2 * 10**9
    world.advance(5.0)
    assert len(evictions(world)) == 2, "beyond its reserve nobody is stopped for it"


def test_what_was_stopped_goes_on_first_in_its_line_and_is_billed_once() -> None:
    world = World(owner(), hog())
    lent = fill(world)
    later = world.submit("hog")
    mine = world.submit("owner")
    world.advance(1.1)
    assert obey(world) == [lent[3]]
    world.complete(mine)
    assert world.grant(lent[3]).attempt == 1, "the owner's share stays free while it is active"
    world.advance(10.5, step_s=0.5)
    again = world.grant(lent[3])
    assert (again.attempt, again.evictions) == (2, 1) and world.answer(later) is None
    world.engine_end(lent[3], 17)
    world.client_end(lent[3], delivered={1: 3, 2: 17}, ttft_ms=5.0, tpot_ms=5.0, e2e_ms=100.0)
    row = world.row(lent[3])
    assert (row.outcome, row.output_tokens, row.wasted_tokens, row.prompt_tokens) == ("completed", 20, 0, 10)
    assert json.loads(row.decision)["evictions"] == 1
    [entry] = [entry for entry in world.audit if entry.kind == "eviction"]
    detail = json.loads(entry.detail)
    assert (entry.tenant, detail["why"], detail["for_tenant"]) == ("hog", "reclaim", "owner")
    for request in [*lent[:3], later]:
        world.complete(request)
    world.at_rest()


def test_waiting_longer_than_the_queue_allows_does_not_end_a_stopped_answer() -> None:
    world = World(owner(), hog(), queue_timeout_s=3.0)
    lent = fill(world)
    mine = world.submit("owner")
    world.advance(1.1)
    assert obey(world) == [lent[3]]
    world.advance(10.0)
    assert world.cell.flights[lent[3]].entry is not None
    for request in (mine, *lent[:3]):
        world.complete(request)
    assert world.grant(lent[3]).attempt == 2
    world.complete(lent[3])
    world.at_rest()


@pytest.mark.parametrize("arm", ["never", "no evictions", "no reserve"])
def test_nobody_is_stopped_where_nobody_may_be(arm: str) -> None:
    preempt = PreemptSpec(at=None, evictions_max=0 if arm == "no evictions" else 2)
    mine = owner(None if arm == "never" else 2.0)
    if arm == "no reserve":
        mine = tenant("owner", isolation=Isolation(in_flight_share_max=1.0), slo=SLO, ladder=PATIENT)
    world = World(mine, hog(), preempt=preempt)
    for _ in range(4):
        world.submit("hog")
    waiting = world.submit("owner")
    world.advance(20.0)
    assert evictions(world) == [] and world.answer(waiting) is None


def test_a_tenant_inside_its_own_share_is_left_alone() -> None:
    """Interactive or not: who holds no more than its weight entitles it to gives nothing."""
    world = World(owner(), hog(), tenant("small", slo=SLO, weight=3.0, isolation=Isolation(in_flight_share_max=1.0)))
    fair = [world.submit("small") for _ in range(2)]
    lent = fill(world, 2)
    world.submit("owner")
    world.submit("owner")
    world.advance(1.1)
    stopped = {message.request_id for _, message in evictions(world)}
    assert stopped <= set(lent) and stopped and not stopped & set(fair)


def test_a_higher_class_gets_a_place_before_its_target_is_missed() -> None:
    world = World(tenant("acme", slo=SLO, ladder=PATIENT), hog(tenant_class=TenantClass.BATCH))
    long = fill(world)
    urgent = world.submit("acme")
    world.advance(0.4)
    assert evictions(world) == []
    world.advance(0.2)
    assert [message.request_id for _, message in evictions(world)] == [long[3]]
    assert obey(world) == [long[3]]
    assert world.grant(urgent).attempt == 1
    world.advance(5.0)
    assert len(evictions(world)) == 1 and world.cell.flights[long[3]].entry is not None


def test_a_class_keeps_its_minimum_share_whoever_waits() -> None:
    """Batch keeps half of the places here, and what it lost does not take its place back from whom it was freed for."""
    shares = {"interactive": 0.4, "standard": 0.0, "batch": 0.5}
    world = World(
        *(tenant(f"t{k}", slo=SLO, ladder=PATIENT) for k in range(8)),
        hog(tenant_class=TenantClass.BATCH),
        class_shares=shares,
    )
    long = fill(world)
    for k in range(8):
        world.submit(f"t{k}")
    world.advance(0.6)
    assert [message.request_id for _, message in evictions(world)] == [long[3], long[2]]
    obey(world)
    assert world.cell.pools["small"].band_sequences == [2, 0, 2]
    world.advance(10.0)
    assert len(evictions(world)) == 2


def test_a_freed_place_is_kept_from_a_lower_class_that_is_owed_dispatches() -> None:
    """Batch holds most of the places, and by its account of dispatches it would be next for the place that it just lost."""
    world = World(tenant("acme", slo=SLO, ladder=PATIENT), hog(tenant_class=TenantClass.BATCH))
    long = fill(world)
    later = world.submit("hog")
    urgent = world.submit("acme")
    world.advance(0.6)
    world.cell.pools["small"].queue._bands[2].owed = 1000.0
    assert obey(world) == [long[3]]
    assert world.grant(urgent).attempt == 1 and world.cell.flights[long[3]].entry is not None
    assert world.answer(later) is None


def test_the_same_class_and_an_answer_with_a_tight_deadline_are_not_stopped_for_a_class() -> None:
    world = World(tenant("acme", slo=SLO, ladder=PATIENT), hog(tenant_class=TenantClass.BATCH), hog_twin())
    for _ in range(2):
        world.submit("hog", deadline_ms=3000.0)
        world.submit("twin")
    world.submit("acme")
    world.advance(2.0)
    assert evictions(world) == []


def hog_twin() -> Tenant:
    return tenant("twin", slo=SLO, isolation=Isolation(in_flight_share_max=1.0))


def test_nothing_is_stopped_more_often_than_allowed() -> None:
    world = World(
        tenant("acme", slo=SLO, ladder=PATIENT), hog(tenant_class=TenantClass.BATCH), preempt=PreemptSpec(rest_s=1.0)
    )
    long = fill(world)
    for round_ in range(4):
        urgent = world.submit("acme")
        world.advance(2.0)
        obey(world)
        if isinstance(world.answer(urgent), type(world.grant(long[0]))):
            world.complete(urgent)
        world.advance(1.5)
        assert round_ < 4
    counts = {request: world.cell.flights[request].evictions for request in long}
    assert max(counts.values()) <= 2 and sum(counts.values()) == 4
    for request in long:
        world.complete(request)
    world.at_rest()


def test_an_eviction_that_came_too_late_changes_nothing() -> None:
    world = World(owner(), hog())
    lent = fill(world)
    mine = world.submit("owner")
    world.advance(1.1)
    [(_, message)] = evictions(world)
    world.complete(message.request_id)
    assert world.row(message.request_id).outcome == "completed"
    assert json.loads(world.row(message.request_id).decision)["evictions"] is None
    for request in (*lent[:3], mine):
        world.complete(request)
    world.at_rest()


def test_the_prompt_of_a_resumed_answer_is_neither_charged_again_nor_paid_back() -> None:
    """Whatever the engine finds of it in its cache the second time: the fair queue has settled it with the first try."""
    world = World(owner(), hog())
    lent = fill(world)
    mine = world.submit("owner")
    world.advance(1.1)
    obey(world)
    world.complete(mine)
    world.advance(10.5, step_s=0.5)
    queue = world.cell.pools["small"].queue
    flight = world.cell.flights[lent[3]]
    assert flight.attempts[2].charged == 0 and flight.attempts[1].charged == 10
    before = queue.counter("hog", 0)
    world.engine_end(lent[3], 1, cached=4)
    assert queue.counter("hog", 0) == before + 2.0
