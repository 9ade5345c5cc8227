"""Turning away what would come too late: code, Retry-After, no trace in any quota, and never what has begun."""

from __future__ import annotations

from typing import Any

from control.harness import World, tenant
from rungway.contracts import Isolation, LadderTerms, Slo, Tenant, TenantClass
from rungway.overload import Ramp, ShedSpec

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


def test_what_cannot_begin_in_time_is_turned_away_at_once_and_holds_nothing() -> None:
    world = World(one(), shed=TARGET)
    busy(world)
    before = world.cell.tenants["acme"].waiting
    answers = [world.answer(world.submit()) for _ in range(10)]
    refused = [answer for answer in answers if answer is not None and hasattr(answer, "code")]
    assert refused and {answer.code for answer in refused} == {"overloaded"}
    assert all(answer.retry_after_s is not None and 1 <= answer.retry_after_s <= 60 for answer in refused)
    assert world.cell.tenants["acme"].waiting == before + len(answers) - len(refused)
    assert not any(row.attempts for row in world.rows if row.code == "overloaded")


def test_what_waits_too_long_is_turned_away_but_with_a_deadline_of_its_own_it_waits_for_that() -> None:
    world = World(one(), shed=TARGET)
    for _ in range(4):
        world.submit()
    plain, own = world.submit(), world.submit(deadline_ms=4000.0)
    world.advance(1.1)
    assert world.refusal(plain).code == "overloaded" and world.answer(own) is None
    world.advance(3.0)
    assert world.refusal(own).code == "deadline_unreachable"


def test_by_default_a_request_waits_on() -> None:
    world = World(one())
    for _ in range(4):
        world.submit()
    waiting = world.submit()
    world.advance(20.0, step_s=0.25)
    assert world.answer(waiting) is None


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
