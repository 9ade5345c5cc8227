"""Soft quotas of KV blocks per tenant: nobody is refused, but who holds more than its part loses blocks first."""

from __future__ import annotations

import random

import pytest

from engine.native_kit import Heard, drain, work
from engine.test_prefix_cache import BLOCK, fill
from engine.test_scheduler import random_work, rig
from rungway.engine.blocks import BlockPool
from rungway.engine.rules import Rules

QUOTA = Rules(kv_soft_quota=0.25)


def cached(pool: BlockPool, share: str, tokens: list[int]) -> int:
    return len(pool.known.match(share, tokens, [], len(tokens) // BLOCK))


@pytest.mark.parametrize("quota", [0.25, None])
def test_cached_blocks_of_a_share_over_its_quota_go_first_and_its_longest_unused_leaf_first(
    quota: float | None,
) -> None:
    pool = BlockPool(12, BLOCK, soft_quota=quota)
    quiet, loud = list(range(8)), [list(range(at, at + 16)) for at in (100, 200)]
    fill(pool, "quiet", quiet)  # 2 blocks, used longest ago
    for text in loud:
        fill(pool, "loud", text)  # 8 of 12 blocks, 3 are its quota
    taken = pool.take(2, "new") or []
    lengths = []
    for _ in range(5):
        taken += pool.take(1, "new") or []
        lengths.append((cached(pool, "quiet", quiet), cached(pool, "loud", loud[0]), cached(pool, "loud", loud[1])))
        assert pool.check([taken]) == []
    if quota is None:
        assert lengths[:2] == [(1, 4, 4), (0, 4, 4)], "without a quota age alone decides"
    else:
        assert lengths == [(2, 3, 4), (2, 2, 4), (2, 1, 4), (2, 0, 4), (2, 0, 3)]


def test_once_nobody_is_over_age_decides_again() -> None:
    pool = BlockPool(8, BLOCK, soft_quota=0.5)
    old, new = list(range(12)), list(range(100, 116))
    fill(pool, "a", old)
    fill(pool, "b", new)
    taken = pool.take(1, "c") or []
    assert (cached(pool, "a", old), cached(pool, "b", new)) == (3, 4), "a free block was there"
    taken += pool.take(1, "c") or []
    assert (cached(pool, "a", old), cached(pool, "b", new)) == (2, 4)
    assert pool.check([taken]) == []


def test_a_weight_widens_the_quota() -> None:
    for weight, over in ((1.0, True), (2.0, False)):
        pool = BlockPool(8, BLOCK, soft_quota=0.25)
        table = pool.take(3, "a", weight)
        assert table is not None and pool.over_quota("a") is over and not pool.over_quota("nobody")
        pool.release(table)
        assert not pool.over_quota("a") and pool.quotas is not None and pool.quotas.used("a") == 0


def test_shared_blocks_count_once() -> None:
    pool = BlockPool(8, BLOCK, soft_quota=0.25)
    table = pool.take(2, "a") or []
    pool.share(table)
    assert pool.quotas is not None and pool.quotas.used("a") == 2 and not pool.over_quota("a")
    pool.release(table)
    assert pool.quotas.used("a") == 2 and pool.check([table]) == []


@pytest.mark.parametrize(("rules", "victim"), [(Rules(kv_soft_quota=0.5), "big"), (Rules(), "small")])
def test_within_a_band_who_is_over_its_quota_gives_way_first(rules: Rules, victim: str) -> None:
    """The newest would go; with quotas the older one of a tenant that holds most of the pool does."""
    core, scheduler, _ = rig(blocks=12, seqs=3, context=48, rules=rules)
    core.add(work("big", [1] * 20, max_tokens=28, share="a"))
    core.step()
    core.add(work("small", [2] * 4, max_tokens=40, share="b"))
    while not scheduler.preemptions:
        core.step()
    assert [seq.group.work.request_id for seq in scheduler.waiting] == [victim]


def test_an_urgent_request_takes_from_who_is_over_its_quota_first() -> None:
    core, scheduler, _ = rig(blocks=40, seqs=2, batched=64, rules=QUOTA)
    core.add(work("big", [1] * 44, max_tokens=4, share="a", priority=2))
    core.add(work("small", [2] * 4, max_tokens=30, share="b", priority=2))
    core.step()
    core.step()
    assert scheduler.pool.over_quota("a") and scheduler.waiting.got("a") > scheduler.waiting.got("b")
    core.add(work("much", [4] * 4, max_tokens=9, share="b", priority=0, weight=1.0))
    core.step()
    assert [seq.group.work.request_id for seq in scheduler.waiting] == ["big"]


@pytest.mark.parametrize("seed", range(3))
def test_random_load_under_quotas_balances_after_every_step_and_ends(seed: int) -> None:
    rng = random.Random(seed)
    core, scheduler, _ = rig(blocks=rng.choice([16, 24]), rules=Rules(kv_soft_quota=rng.choice([0.1, 0.3])))
    heard, names = Heard(), []
    for tick in range(300):
        if rng.random() < 0.4 and len(names) < 80:
            names.append(f"r{tick}")
            heard.take(core.add(random_work(rng, names[-1])))
        if names and rng.random() < 0.1:
            heard.take(core.cancel(rng.choice(names)))
        if core.busy:
            heard.take(core.step())
        assert core.check() == []
    drain(core, heard)
    assert scheduler.preemptions > 0 and scheduler.pool.free == scheduler.pool.total


def test_the_self_check_sees_blocks_counted_for_the_wrong_share() -> None:
    pool = BlockPool(8, BLOCK, soft_quota=0.25)
    table = pool.take(3, "a") or []
    pool._owners[table[0]] = "b"
    assert pool.check([table])
