"""A replica, or a tenant, whose tries break gets nothing for a while, then one request to prove itself."""

from __future__ import annotations

import pytest

from control.harness import World, tenant


def broken_cell() -> World:
    """Of two replicas the first, which is chosen on a tie, has just failed twice."""
    world = World(tenant("acme"), replicas=("small",), breaker_failures=2, breaker_open_s=5.0)
    world.replica("small", "small-r2")
    for _ in range(2):
        request = world.submit()
        assert world.grant(request).replica_id == "small-r1"
        world.retry(request, "error")
        assert world.grant(request).replica_id == "small-r2"
        world.complete(request)
    return world


def place(world: World) -> tuple[str, str]:
    request = world.submit()
    return request, world.grant(request).replica_id


def test_a_broken_replica_gets_nothing_until_its_time_is_over() -> None:
    world = broken_cell()
    assert [place(world)[1] for _ in range(3)] == ["small-r2"] * 3
    world.advance(4.8)
    assert place(world)[1] == "small-r2"


def test_then_one_request_probes_it_and_its_end_decides() -> None:
    world = broken_cell()
    world.advance(5.2)
    probe, where = place(world)
    assert where == "small-r1"
    assert [place(world)[1] for _ in range(2)] == ["small-r2"] * 2, "one probe is under way"
    world.complete(probe)
    assert place(world)[1] == "small-r1"
    assert not world.cell.pools["small"].troubled


def test_a_probe_that_breaks_closes_it_off_again() -> None:
    world = broken_cell()
    world.advance(5.2)
    probe, where = place(world)
    assert where == "small-r1"
    world.retry(probe, "timeout")
    assert [place(world)[1] for _ in range(2)] == ["small-r2"] * 2
    world.advance(4.8)
    assert place(world)[1] == "small-r2"


def test_a_replica_that_comes_back_under_its_name_starts_afresh() -> None:
    world = broken_cell()
    world.lose("small-r1")
    world.replica("small", "small-r1")
    assert place(world)[1] == "small-r1"


def paused_tenant() -> World:
    """Two requests broke an engine, and the pause is over."""
    world = World(tenant("acme"), replicas=("small",), breaker_failures=2, breaker_open_s=5.0)
    for _ in range(2):
        request = world.submit()
        world.engine_end(request, 0, finish="error")
        world.client_end(request, "error", code="internal", delivered={1: 0})
    assert world.refusal(world.submit()).code == "tenant_suspended"
    world.advance(5.2)
    return world


@pytest.mark.parametrize("others", [1, 2, 5])
def test_a_paused_tenant_sends_one_probe_whoever_else_is_turned_away(others: int) -> None:
    world = paused_tenant()
    probe = world.submit()
    world.grant(probe)
    turned_away = [world.submit() for _ in range(others)]
    assert {world.refusal(request).code for request in turned_away} == {"tenant_suspended"}
    world.complete(probe)
    world.grant(world.submit())


def test_what_ran_before_the_pause_ends_no_probe() -> None:
    world = World(tenant("acme"), replicas=("small",), breaker_failures=2, breaker_open_s=5.0)
    old = world.submit()
    for _ in range(2):
        request = world.submit()
        world.engine_end(request, 0, finish="error")
        world.client_end(request, "error", code="internal", delivered={1: 0})
    world.advance(5.2)
    world.grant(world.submit())
    world.engine_end(old, 3, finish="cancelled")
    world.client_end(old, "client_cancelled", delivered={1: 3})
    assert world.refusal(world.submit()).code == "tenant_suspended"


@pytest.mark.parametrize("leaves", ["withdrawn", "gateway_lost", "cancelled"])
def test_a_probe_that_says_nothing_makes_room_for_the_next(leaves: str) -> None:
    world = paused_tenant()
    if leaves == "withdrawn":
        world.lose("small-r1")
        world.replica("small", "small-r1", slots=1, kv_tokens=8)  # no room: it waits
        probe = world.submit()
        world.core.withdraw(probe, "client_cancelled", world.now)
        world.replica("small", "small-r2")
    elif leaves == "gateway_lost":
        probe = world.submit()
        world.core.gateway_lost("g1", world.now)
        world.engine_end(probe, 1, finish="cancelled")
        world.core.gateway_hello("g1", [], world.now)
    else:
        probe = world.submit()
        world.engine_end(probe, 1, finish="cancelled")
        world.client_end(probe, "client_cancelled", delivered={1: 1})
    world.take()
    world.grant(world.submit())
