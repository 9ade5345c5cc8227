"""Shuffle sharding in the controller: a tenant's requests stay on its replicas, whatever they do to them."""

from __future__ import annotations

from control.harness import World, tenant
from rungway.contracts import Isolation, Tenant


def sharded(name: str, size: int) -> Tenant:
    return tenant(name, isolation=Isolation(in_flight_share_max=1.0, shard_replicas=size))


def cell(*, kv_tokens: int = 100_000) -> World:
    harness = World(sharded("acme", 1), tenant("globex", isolation=Isolation(in_flight_share_max=1.0)), replicas=())
    for index in range(4):
        harness.replica("small", f"r{index}", slots=2, kv_tokens=kv_tokens)
    return harness


def test_a_tenant_keeps_to_its_shard_and_a_full_shard_stops_nobody_else() -> None:
    harness = cell()
    mine = [harness.submit("acme") for _ in range(3)]
    others = [harness.submit("globex") for _ in range(6)]
    homes = {harness.grant(request).replica_id for request in mine[:2]}
    assert len(homes) == 1
    assert harness.answer(mine[2]) is None  # its only replica has two places
    assert {harness.grant(request).replica_id for request in others} == {f"r{k}" for k in range(4)} - homes
    harness.complete(mine[0])
    assert harness.grant(mine[2]).replica_id in homes


def test_nobody_behind_takes_the_place_that_a_passed_tenant_waits_for() -> None:
    harness = cell(kv_tokens=100)
    first = [harness.submit("acme") for _ in range(2)]
    home = harness.grant(first[0]).replica_id
    big = harness.submit("acme", prompt=60)  # needs the cache of both
    elsewhere = [harness.submit("globex") for _ in range(6)]
    late = harness.submit("globex")
    harness.complete(first[0], output=1)
    assert harness.answer(late) is None and harness.answer(big) is None
    harness.complete(first[1], output=1)
    assert harness.grant(big).replica_id == home
    assert harness.answer(late) is None
    harness.complete(elsewhere[0])
    assert harness.grant(late).replica_id != home


def test_a_lost_member_is_replaced() -> None:
    harness = cell()
    home = harness.grant(harness.submit("acme")).replica_id
    harness.lose(home)
    assert harness.grant(harness.submit("acme")).replica_id != home
