"""A reload in mid-traffic: tenants that go and come, other shards, ladders, limits and periods."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from control.harness import LADDER, NO_LIMITS, SECOND, World, platform, tenant
from rungway.contracts import Budget, Isolation, LadderSpec, Tenant
from rungway.control import snapshot
from rungway.control.restore import look_up, newcomers, recall
from rungway.policies.ladder import LadderState
from rungway.simulate.disk import Disk
from rungway.types import Grant

MONTH, DAY = Budget(nusd=10_000_000, per="month"), Budget(nusd=10_000_000, per="day")


def reload(world: World, *tenants: Tenant, **changes: Any) -> None:
    world.core.reload(msgspec.structs.replace(platform(*tenants), **changes), world.now)
    world.take()


def test_who_left_the_configuration_gets_nothing_new_ends_what_it_has_and_is_forgotten() -> None:
    world = World(tenant("acme"), tenant("gone"))
    running = [world.submit("gone") for _ in range(4)]
    waiting = world.submit("gone")
    reload(world, tenant("acme"))
    assert world.refusal(world.submit("gone")).code == "invalid_api_key"
    for request in running:
        world.complete(request)
    world.complete(waiting)
    assert world.row(waiting).outcome == "completed"
    world.advance(0.1)
    assert set(world.cell.tenants) == {"acme"} and not world.cell.leaving
    assert all(pool.queue.counter("gone", 0) == 0.0 for pool in world.cell.pools.values())
    world.at_rest()


def test_who_comes_back_before_it_is_gone_was_never_away() -> None:
    world = World(tenant("acme"), tenant("gone"))
    running, state = world.submit("gone"), world.cell.tenants["gone"]
    reload(world, tenant("acme"))
    reload(world, tenant("acme"), tenant("gone"))
    world.complete(running)
    world.advance(0.1)
    assert world.cell.tenants["gone"] is state
    world.grant(world.submit("gone"))


def test_another_size_of_shard_holds_at_once() -> None:
    def sharded(size: int) -> Tenant:
        return tenant("acme", isolation=Isolation(shard_replicas=size))

    world = World(sharded(1), replicas=())
    for number in range(4):
        world.replica("small", f"r{number}", slots=1)
    first = world.submit()
    assert world.answer(world.submit()) is None
    reload(world, sharded(4))
    more = [world.submit() for _ in range(2)]
    assert len({world.grant(request).replica_id for request in (first, *more)}) == 3


@pytest.mark.parametrize("override", [None, 7])
def test_a_shorter_ladder_takes_its_scopes_along(override: int | None) -> None:
    world = World(tenant("acme"))
    pool = world.cell.pools["small"]
    for scope in pool.scopes:
        pool.scopes[scope] = LadderState(7, world.mono_ns - 1000 * SECOND, override, world.mono_ns + 5 * SECOND)
    floor = msgspec.structs.replace(tenant("acme").ladder, floor=LADDER.rungs[2].name)
    reload(world, tenant("acme", ladder=floor), ladder=short())
    assert {shown["rung"] for shown in snapshot.ladder(world.cell, world.now)["scopes"]} == {0, 2}  # type: ignore[attr-defined]
    world.advance(6.0)
    world.advance(130.0, 1.0)
    assert {state.in_force for state in pool.scopes.values()} == {0}
    world.grant(world.submit())


def short() -> LadderSpec:
    return msgspec.structs.replace(LADDER, rungs=LADDER.rungs[:3], digest="short")


def test_a_spent_budget_degrades_as_far_as_the_ladder_goes() -> None:
    spent = Budget(nusd=1, at_limit="degrade")
    floor = msgspec.structs.replace(tenant("acme").ladder, floor=LADDER.rungs[2].name)
    world = World(tenant("acme", budget=spent, ladder=floor), ladder=short())
    assert world.refusal(world.submit()).code == "budget_exhausted"


def test_breakers_take_other_terms() -> None:
    world = World(tenant("acme"), breaker_failures=50)
    state, breaker = world.cell.tenants["acme"], world.cell.pools["small"].breakers["small-r1"]
    spec = msgspec.structs.replace(world.cell.platform.controller, breaker_failures=1, breaker_open_s=9.0)
    reload(world, tenant("acme"), controller=spec)
    for each in (state.breaker, breaker):
        each.record(False, world.mono_ns)
        assert each.retry_s(world.mono_ns) == 9.0


def renew(world: World, *tenants: Tenant, meanwhile: int = 0) -> None:
    """What the service does: look into the ledger, reload, remember. `meanwhile`: requests settled in between."""
    loaded, disk, then = platform(*tenants), Disk(), world.now
    found = newcomers(world.cell, loaded)
    for row in world.rows:
        disk.rows[row.request_id] = row
    for _ in range(meanwhile):
        world.mono_ns, world.wall_ns = world.mono_ns + 1000, world.wall_ns + 1000
        world.complete(world.submit())
    for row in world.rows:
        disk.rows[row.request_id] = row
    known = look_up(found, disk, then)
    world.core.reload(loaded, world.now)
    recall(world.cell, known, world.now)
    world.take()


def test_who_was_a_tenant_before_comes_back_with_what_it_has_used() -> None:
    limits = msgspec.structs.replace(NO_LIMITS, requests_per_minute=3, tokens_per_minute=200)
    one = tenant("acme", budget=MONTH, quotas=limits)
    world = World(one, tenant("beta"))
    for _ in range(3):
        world.complete(world.submit())
    used = world.cell.tenants["acme"]
    spent, tokens = used.budget.spent, used.tokens.remaining(world.mono_ns)
    renew(world, tenant("beta"))
    assert "acme" not in world.cell.tenants
    renew(world, one, tenant("beta"))
    back = world.cell.tenants["acme"]
    assert (back.budget.spent, back.tokens.remaining(world.mono_ns)) == (spent, tokens) and spent > 0
    assert world.refusal(world.submit()).code == "requests_per_minute"


@pytest.mark.parametrize("meanwhile", [0, 2])
def test_a_longer_period_knows_what_was_spent_before_the_shorter_one_began(meanwhile: int) -> None:
    world = World(tenant("acme", budget=DAY))
    for _ in range(3):
        world.complete(world.submit())
        world.mono_ns, world.wall_ns = world.mono_ns + 86_400 * SECOND, world.wall_ns + 86_400 * SECOND
        world.report_all()
    running = world.submit()
    renew(world, tenant("acme", budget=MONTH), meanwhile=meanwhile)
    state = world.cell.tenants["acme"]
    assert state.budget.spent == sum(row.cost_nusd for row in world.rows) > 0
    assert state.budget.held == world.grant(running).reserved_nusd
    world.complete(running)
    assert state.budget.spent == sum(row.cost_nusd for row in world.rows)
    renew(world, tenant("acme", budget=DAY))
    assert state.budget.spent == sum(row.cost_nusd for row in world.rows[3:])


def test_a_reload_that_changes_no_period_asks_the_ledger_nothing() -> None:
    world = World(tenant("acme"))
    assert newcomers(world.cell, platform(tenant("acme", weight=3.0))) == []
    assert isinstance(world.answer(world.submit()), Grant)
