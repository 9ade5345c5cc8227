from __future__ import annotations

from itertools import combinations
from math import comb

from policies.test_placement import view
from rungway.policies.shard import shard_of

TENANTS = [f"tenant-{k}" for k in range(400)]


def shards(count: int, size: int) -> dict[str, frozenset[str]]:
    views = [view(f"replica-{k}") for k in range(count)]
    return {name: frozenset(v.replica_id for v in shard_of(name, views, size)) for name in TENANTS}


def test_two_tenants_seldom_share_all_of_their_replicas() -> None:
    made = shards(20, 4)
    assert all(len(shard) == 4 for shard in made.values())
    pairs = list(combinations(made.values(), 2))
    same = sum(a == b for a, b in pairs)
    assert same <= 3 * len(pairs) / comb(20, 4)
    assert sum(len(a & b) for a, b in pairs) / len(pairs) < 1.1 * 4 * 4 / 20  # as chance has it


def test_a_small_pool_is_used_whole_by_everybody() -> None:
    assert all(len(shard) == 3 for shard in shards(3, 4).values())


def test_a_lost_replica_moves_only_those_who_had_it_and_only_by_one() -> None:
    views = [view(f"replica-{k}") for k in range(12)]
    for name in TENANTS:
        before = {v.replica_id for v in shard_of(name, views, 3)}
        after = {v.replica_id for v in shard_of(name, views[1:], 3)}
        assert before - after <= {"replica-0"} and len(after) == 3


def test_a_broken_member_is_not_replaced() -> None:
    views = [view(f"replica-{k}") for k in range(6)]
    before = shard_of("acme", views, 2)
    before[0].breaker_open = True
    assert shard_of("acme", views, 2) == before
