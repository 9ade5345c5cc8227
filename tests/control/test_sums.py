"""Sums that the controller keeps, against adding them up: who is active, what is reserved, who holds more than its due."""

from __future__ import annotations

from random import Random

import msgspec
import pytest

from control.harness import SECOND, World, platform, tenant
from rungway.contracts import Isolation
from rungway.control.pool import Pool
from rungway.control.sides import OVER, over_share
from rungway.control.tenant_state import TenantState
from rungway.messages import Flight, Granted, ReplicaInfo

NAMES = [f"t{number}" for number in range(6)]
SHARES = (0.0, 0.05, 0.1, 0.2, 0.0, 0.3)
WEIGHTS = (1.0, 2.0, 0.1, 0.7, 3.0, 1.0)


def contracts(more: float = 0.0) -> list[object]:
    return [
        tenant(name, weight=weight + more, isolation=Isolation(in_flight_share_max=0.6, reserved_share=share))
        for name, weight, share in zip(NAMES, WEIGHTS, SHARES, strict=True)
    ]


def reserved_by_scan(world: World, pool: Pool, mine: TenantState) -> tuple[int, int]:
    views = [view for view in pool.views.values() if not view.draining]
    room, slots = sum(view.kv_tokens for view in views), sum(view.max_num_seqs for view in views)
    tokens = places = 0
    for other in world.cell.tenants.values():
        if other is not mine and other.active(world.mono_ns):
            share = other.contract.isolation.reserved_share
            tokens += max(0, int(share * room) - other.pool_tokens.get(pool.name, 0))
            places += max(0, int(share * slots) - other.pool_running.get(pool.name, 0))
    return tokens, places


def over_by_scan(world: World, pool: Pool) -> set[str]:
    active = [state for state in world.cell.tenants.values() if state.active(world.mono_ns)]
    weight = sum(state.contract.weight for state in active)
    total = sum(state.load_tokens(pool.name) for state in world.cell.tenants.values())
    if len(active) < 2 or not total:
        return set()
    return {
        state.contract.name
        for state in active
        if state.load_tokens(pool.name) * weight > state.contract.weight * total * OVER
    }


def check(world: World) -> None:
    crowd, tenants = world.cell.crowd, world.cell.tenants.values()
    crowd.look(world.mono_ns)
    active = [state for state in tenants if state.active(world.mono_ns)]
    assert [state for state in tenants if state in crowd] == active and len(crowd) == len(active)
    assert crowd.weight == pytest.approx(sum(state.contract.weight for state in active))
    for pool in world.cell.pools.values():
        for state in tenants:
            assert pool.reserved_for_others(state) == reserved_by_scan(world, pool, state)
        assert set(over_share(pool, world.mono_ns)) == over_by_scan(world, pool)


class Story:
    """Random traffic on one core: asks, ends, lost replicas, drains, reloads, silence."""

    def __init__(self, seed: int) -> None:
        self.rng = Random(seed)
        self.world = World(*contracts())
        for number in (2, 3):
            self.world.replica("small", f"small-r{number}")

    def step(self) -> None:
        rng, world = self.rng, self.world
        running = [name for name, flight in world.cell.flights.items() if flight.grant is not None and flight.running]
        kind = rng.choice(("ask", "ask", "ask", "end", "end", "wait", "wait", "silence", "replica", "reload", "leave"))
        if kind == "ask":
            world.submit(rng.choice(NAMES), model=rng.choice(("small", "large")), prompt=rng.choice((10, 500, 9000)))
        elif kind == "end" and running:
            world.complete(rng.choice(running), rng.randint(1, 30))
        elif kind == "wait":
            world.advance(rng.choice((0.05, 1.0, 3.0)))
        elif kind == "silence":
            world.advance(9.9, 0.3)
            world.mono_ns += rng.choice((0, SECOND // 10 - 1, SECOND // 10))
        elif kind == "replica":
            self.replica(rng.choice(("small-r1", "small-r2", "small-r3")))
        elif kind == "reload":
            world.core.reload(platform(*contracts(rng.choice((0.0, 1.0)))), world.now)  # type: ignore[arg-type]
        elif kind == "leave":
            waiting = [name for name, flight in world.cell.flights.items() if flight.entry is not None]
            if waiting:
                world.core.withdraw(rng.choice(waiting), "client_cancelled", world.now)

    def replica(self, name: str) -> None:
        world = self.world
        if name not in world.cell.replicas:
            world.replica("small", name)
        elif self.rng.random() < 0.5:
            world.lose(name)
        else:
            info = ReplicaInfo(name, "", "small", "small-v1", 4, 100_000, self.rng.choice(("draining", "ready")))
            world.core.replica_hello(info, world.now)


@pytest.mark.parametrize("seed", range(12))
def test_kept_sums_are_what_adding_up_gives(seed: int) -> None:
    story = Story(seed)
    for _ in range(60):
        story.step()
        check(story.world)


def test_who_is_adopted_is_active_and_who_left_the_configuration_is_not() -> None:
    old = World(*contracts())
    request = old.submit("t3")
    (grant,) = [message.grant for _, message in old.sent if isinstance(message, Granted)]
    new = World(*contracts())
    new.core.gateway_hello("g1", [Flight(old.cell.flights[request].ask, grant)], new.now)
    state = new.cell.tenants["t3"]
    assert state in new.cell.crowd
    check(new)
    new.sent += old.sent
    new.complete(request)
    check(new)
    new.count = old.count
    new.complete(new.submit("t3"))
    assert state in new.cell.crowd, "it asked a moment ago"
    rest = [each for each in new.cell.platform.tenants if each.name != "t3"]
    new.core.reload(msgspec.structs.replace(new.cell.platform, tenants=tuple(rest)), new.now)
    assert state not in new.cell.crowd and "t3" not in new.cell.tenants
    check(new)


def test_a_pools_saturation_is_what_is_scarcer_of_places_and_tokens() -> None:
    world = World(tenant("acme"), replicas=("small",))
    pool = world.cell.pools["small"]
    places, room = pool.in_flight()[1], pool.capacity_tokens()
    assert pool.saturation() == 0.0
    grant = world.grant(world.submit())
    tokens = pool.held_tokens
    assert pool.saturation() == pytest.approx(max(1 / places, tokens / room))
    world.lose(grant.replica_id)
    assert pool.saturation() == 1.0, "a pool without a replica has nothing free"
