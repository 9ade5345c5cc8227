"""What would come too late: it goes behind the rest, the ladder answers it, and beyond that it is turned away."""

from __future__ import annotations

import json
from typing import Any

from control.harness import World, tenant
from rungway.contracts import Isolation, LadderTerms, Quotas, Slo, Tenant, TenantClass
from rungway.messages import Granted, Refused
from rungway.overload import Ramp, ShedSpec
from rungway.policies.fairness import Queued
from rungway.types import Action, Grant, Refusal, Risk

PATIENT: dict[str, Any] = {
    "isolation": Isolation(in_flight_share_max=1.0),
    "ladder": LadderTerms(floor="full"),
    "slo": Slo(ttft_ms_p99=1000, tpot_ms_p99=100, availability=0.99),
}
NEVER = Ramp(begin=1e6, full=2e6)
TARGET = ShedSpec(target_factor=1.0, interactive=NEVER, standard=NEVER, batch=NEVER)


def one(name: str = "acme", **more: Any) -> Tenant:
    return tenant(name, **(PATIENT | more))


def busy(world: World, who: str = "acme", seconds: float = 2.0) -> None:
    """Full, and slow enough that the queue is known to move at about four requests a second."""
    running = [world.submit(who) for _ in range(6)]
    for _ in range(int(seconds * 4)):
        world.advance(0.25)
        for request in [name for name in running if name in world.cell.flights]:
            if world.cell.flights[request].attempts:
                world.complete(request)
                running.remove(request)
                running.append(world.submit(who))
                break


def waiting(world: World, request_id: str) -> Queued:
    entry = world.cell.flights[request_id].entry
    assert entry is not None
    return entry


def test_what_cannot_begin_in_time_is_late_at_once_and_counts_against_nobody_who_can() -> None:
    world = World(one(), shed=TARGET)
    busy(world)
    added = [world.submit() for _ in range(10)]
    late = [request for request in added if waiting(world, request).late]
    assert late and added[-1] in late
    state, pool = world.cell.tenants["acme"], world.cell.pools["small"]
    # The last one on time had a wait of one target before it; those who are late count for each other only.
    assert (
        pool.expected_wait_s(state, 0, world.mono_ns) < 1.5 < pool.expected_wait_s(state, 0, world.mono_ns, late=True)
    )
    assert pool.late == sum(entry.late for entry in pool.queue.entries())


def test_what_waits_too_long_goes_behind_who_is_on_time_but_with_a_deadline_of_its_own_it_waits_for_that() -> None:
    world = World(one(), shed=TARGET)
    running = [world.submit() for _ in range(4)]
    plain, own = world.submit(), world.submit(deadline_ms=4000.0)
    world.advance(1.1)
    assert waiting(world, plain).late and not waiting(world, own).late
    new = world.submit()
    for request in running[:3]:
        world.complete(request)
    assert world.grant(own).attempt == world.grant(new).attempt == world.grant(plain).attempt == 1
    order = [m.grant.request_id for _, m in world.sent if isinstance(m, Granted)]
    assert order[-3:] == [new, own, plain]


def test_a_deadline_of_its_own_that_cannot_be_met_is_refused() -> None:
    world = World(one(), shed=TARGET)
    for _ in range(4):
        world.submit()
    own = world.submit(deadline_ms=2000.0)
    world.advance(2.1)
    assert world.refusal(own).code == "deadline_unreachable"


def test_where_nobody_is_ever_late_a_request_waits_on_in_order() -> None:
    world = World(one(), shed=ShedSpec(target_factor=None))
    for _ in range(4):
        world.submit()
    request = world.submit()
    world.advance(20.0, step_s=0.25)
    assert not waiting(world, request).late


def test_the_ladder_answers_who_is_late_by_his_own_wait_and_leaves_the_others_alone() -> None:
    """Rungs without a model begin at 4 targets here: the one that has waited so long gets the template, one by one."""
    world = World(one(ladder=LadderTerms(floor="defer")))
    for _ in range(4):
        world.submit()
    late = world.submit()
    world.advance(3.9)
    assert waiting(world, late).late
    new = world.submit()
    world.advance(0.2)
    grant = world.grant(late)
    assert (grant.offer.kind, grant.offer.degraded, grant.reason) == ("template", ("template",), "queue_wait")
    assert not waiting(world, new).late
    assert all(state.in_force < 5 for state in world.cell.pools["small"].scopes.values())
    [downgrade] = [entry for entry in world.audit if entry.kind == "downgrade"]
    assert downgrade.request_id == late
    assert json.loads(downgrade.detail)["pressure"]["small"][0] >= 4.0


def test_what_the_ladder_may_not_answer_is_deferred_with_a_time_to_come_back() -> None:
    world = World(one(ladder=LadderTerms(floor="defer")))
    for _ in range(4):
        world.submit()
    write = world.submit(action=Action.NON_IDEMPOTENT_WRITE)
    world.advance(7.9)
    assert waiting(world, write).late
    world.advance(0.2)
    refusal = world.refusal(write)
    assert refusal.code == "deferred" and refusal.retry_after_s is not None and refusal.retry_after_s >= 1


def test_a_late_request_has_its_turn_after_so_many() -> None:
    world = World(one(), shed=ShedSpec(late_turn=3))
    running = [world.submit() for _ in range(4)]
    late = world.submit()
    world.advance(1.1)
    served = []
    for _ in range(4):
        running.append(world.submit())
        world.complete(running.pop(0))
        served.append(isinstance(world.answer(late), Grant))
    assert served == [False, False, False, True]


def test_a_full_line_turns_away_the_newest_that_is_late_and_keeps_who_is_on_time() -> None:
    world = World(
        one(quotas=Quotas(requests_per_minute=None, tokens_per_minute=None, concurrent_requests=None, queue_max=3))
    )
    for _ in range(4):
        world.submit()
    old, newer = world.submit(), world.submit()
    world.advance(1.1)
    first, second, third = world.submit(), world.submit(), world.submit()
    assert world.refusal(newer).code == world.refusal(old).code == "queue_full"
    assert not any(waiting(world, request).late for request in (first, second, third))
    fourth = world.submit()
    assert world.refusal(fourth).code == "queue_full"
    refused = [m.refusal.request_id for _, m in world.sent if isinstance(m, Refused)]
    assert refused == [newer, old, fourth]


def test_the_ramp_turns_some_away_and_the_lower_class_more() -> None:
    ramp = Ramp(begin=0.1, full=4.0)
    shed = ShedSpec(interactive=ramp, standard=ramp, batch=Ramp(begin=0.1, full=2.0))
    refused = {}
    for tenant_class in (TenantClass.INTERACTIVE, TenantClass.BATCH):
        world = World(one(tenant_class=tenant_class), one("globex"), shed=shed)
        busy(world)
        answers = [world.answer(world.submit()) for _ in range(60)]
        refused[tenant_class] = sum(hasattr(answer, "code") for answer in answers)
    assert 0 < refused[TenantClass.INTERACTIVE] < refused[TenantClass.BATCH] < 60


def test_late_requests_leave_by_the_ramp_each_at_its_own_moment_and_high_risk_waits() -> None:
    ramp = Ramp(begin=4.0, full=8.0)
    world = World(one(), one("other"), shed=ShedSpec(interactive=ramp), queue_timeout_s=60.0)
    busy(world)
    world.submit("other")  # somebody whose share it takes
    plain = [world.submit() for _ in range(12)]
    risky = world.submit(risk=Risk.HIGH)
    left: dict[str, float] = {}
    for step in range(1, 400):  # nothing ends: nobody begins
        world.advance(0.05)
        for request in plain:
            if request not in left and isinstance(world.answer(request), Refusal):
                left[request] = step * 0.05
    assert set(left) == set(plain)
    assert {world.refusal(request).code for request in plain} == {"overloaded"}
    assert min(left.values()) > 4.0 - 0.1 and max(left.values()) < 12.0 + 0.5
    assert len({round(when, 1) for when in left.values()}) > 6, "who came together does not leave together"
    assert isinstance(world.cell.flights[risky].entry, Queued)
