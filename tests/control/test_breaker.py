"""A replica whose tries break gets nothing for a while, then one request to prove itself."""

from __future__ import annotations

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
