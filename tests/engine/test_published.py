"""What an engine tells others about its prefix cache: the truth, in changes, within bounds, and nothing across tenants."""

from __future__ import annotations

import random
from typing import Any

import pytest

from engine.test_fake import Bench
from engine.test_fake import work as said
from engine.test_prefix_cache import fill
from rungway.engine.blocks import BlockPool
from rungway.engine.chain import DEPTH_MAX, chain_keys, word_ids
from rungway.engine.protocol import PrefixNews
from rungway.engine.published import SHARE_PART, Published
from rungway.policies.prefixes import HeldPrefixes

BLOCK = 4
LIMIT = 64


class Listener:
    """A controller's picture of one pool."""

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self.held = HeldPrefixes()

    def hear(self, *, full: bool = False) -> PrefixNews:
        news = self.pool.known.published.news(full=full)
        self.held.apply(news.full, news.added, news.removed)
        return news

    def leading(self, share: str, tokens: list[int]) -> int:
        return self.held.leading(chain_keys(share, tokens, self.pool.block_tokens))


def matched(pool: BlockPool, share: str, tokens: list[int]) -> int:
    return len(pool.known.match(share, tokens, [], (len(tokens) - 1) // BLOCK))


@pytest.mark.parametrize("seed", range(4))
def test_whoever_hears_all_changes_knows_what_the_engine_would_find(seed: int) -> None:
    rng = random.Random(seed)
    pool = BlockPool(24, BLOCK, published=Published(10_000))
    listener = Listener(pool)
    texts = [("ab"[rng.randrange(2)], [rng.randrange(3) for _ in range(rng.randint(4, 24))]) for _ in range(40)]
    evicted = 0
    for turn in range(300):
        share, tokens = rng.choice(texts)
        fill(pool, share, tokens[: len(tokens) // BLOCK * BLOCK])
        if rng.random() < 0.5:
            evicted += len(listener.hear(full=rng.random() < 0.1).removed)
        if turn % 10 == 0:
            listener.hear()
            assert all(listener.leading(name, text) == matched(pool, name, text) for name, text in texts)
            assert len(listener.held) == len(pool.known)
    assert evicted > 0


def test_the_keys_of_one_tenant_say_nothing_about_anothers_texts() -> None:
    pool = BlockPool(24, BLOCK, published=Published(LIMIT))
    listener = Listener(pool)
    fill(pool, "a", list(range(16)))
    listener.hear()
    assert listener.leading("a", list(range(16))) == 3 and listener.leading("b", list(range(16))) == 0
    assert not set(chain_keys("a", list(range(40)), BLOCK)) & set(chain_keys("b", list(range(40)), BLOCK))


def test_no_tenant_takes_more_than_its_part_of_the_list_and_what_was_left_out_comes_in_later() -> None:
    pool = BlockPool(400, 1, published=Published(LIMIT))
    listener = Listener(pool)
    for text in range(100):
        fill_one(pool, "loud", text)
    fill_one(pool, "small", 1)
    listener.hear()
    assert len(listener.held) == LIMIT // SHARE_PART + 1 and listener.leading("small", [1, 0]) == 1
    assert pool.take(300 + 50) is not None  # the first texts go
    listener.hear()
    assert listener.leading("loud", [0, 0]) == 0
    assert len(listener.held) == LIMIT // SHARE_PART + 1
    assert sum(listener.leading("loud", [text, 0]) for text in range(100)) == LIMIT // SHARE_PART


def fill_one(pool: BlockPool, share: str, token: int) -> None:
    (block,) = pool.take(1) or []
    pool.known.learn(share, [token], [], [block], 0)
    pool.release([block])


def test_the_list_is_bounded_in_length_and_depth_and_can_be_empty() -> None:
    for limit in (0, 1, LIMIT):
        pool = BlockPool(500, 1, published=Published(limit))
        listener = Listener(pool)
        for text in range(200):
            fill_one(pool, f"s{text % 20}", text)
        listener.hear()
        assert len(listener.held) == limit
    pool = BlockPool(500, 1, published=Published(100_000))
    listener = Listener(pool)
    table = pool.take(200) or []
    keys: list[bytes] = []
    for at in range(200):
        pool.known.learn("a", list(range(200)), keys, table, at)
    listener.hear()
    assert len(listener.held) == DEPTH_MAX
    assert len(chain_keys("a", list(range(200)), 1)) == DEPTH_MAX and len(chain_keys("a", [1] * 9, 1, 3)) == 3


def test_a_new_listener_gets_everything_and_a_change_is_told_once() -> None:
    pool = BlockPool(24, BLOCK, published=Published(LIMIT))
    published = pool.known.published
    fill(pool, "a", list(range(12)))
    assert len(published.news(full=False).added) == 3
    assert published.news(full=False) == PrefixNews(False, [], [])
    again = published.news(full=True)
    assert again.full and len(again.added) == 3
    pool.take(24)
    assert sorted(published.news(full=False).removed) == sorted(again.added)
    assert published.news(full=True).added == []


def test_the_last_token_of_a_prompt_is_never_counted_as_found() -> None:
    assert [len(chain_keys("a", [1] * count, BLOCK)) for count in (0, 1, 4, 5, 8, 9)] == [0, 0, 0, 1, 1, 2]


def test_a_believed_list_never_outgrows_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rungway.policies.prefixes.HELD_MAX", 10)
    held = HeldPrefixes()
    held.apply(True, range(25), [])
    held.apply(False, range(100, 125), [3])
    assert len(held) == 10 and held.leading([0, 1, 2, 3]) == 3


SYSTEM = " ".join(f"w{at}" for at in range(64))


def cached_bench(**more: Any) -> Bench:
    return Bench(block_tokens=16, prefix_cache=True, ttft_ms=0, prefill_ms_per_1k=1000, **more)


def first_token_ms(bench: Bench, name: str, text: str, share: str = "a") -> tuple[float, int]:
    """Time to the first token, and cached tokens, of one request alone."""
    item = said(text, name, max_tokens=2)
    began, mark = bench.now, len(bench.log)
    bench.core.submit(type(item)(**{**{f: getattr(item, f) for f in item.__struct_fields__}, "share": share}))
    bench.run()
    mine = [(at, delta) for at, delta in bench.log[mark:] if delta.request_id == name]
    (usage,) = [delta.usage for _, delta in mine if delta.usage is not None]
    return (mine[0][0] - began) / 1e6, usage.cached_tokens


def test_the_fake_engine_finds_what_the_same_tenant_has_asked() -> None:
    bench = cached_bench()
    cold, none = first_token_ms(bench, "one", f"{SYSTEM} x y")
    warm, most = first_token_ms(bench, "two", f"{SYSTEM} p q")
    other, nothing = first_token_ms(bench, "three", f"{SYSTEM} p q", share="b")
    assert (none, most, nothing) == (0, 64, 0)
    assert cold == other == pytest.approx(66, abs=3) and warm == pytest.approx(2, abs=3)
    stats = bench.core.stats()
    assert stats.kv_blocks_cached == 8 and stats.kv_blocks_free + 8 == stats.kv_blocks_total


def test_the_fake_engine_tells_what_it_holds_under_the_names_that_gateways_use() -> None:
    bench = cached_bench()
    first_token_ms(bench, "one", f"{SYSTEM} x y")
    held = HeldPrefixes()
    news = bench.core.blocks.prefix_news(full=True)
    held.apply(news.full, news.added, news.removed)
    asked = word_ids(f"{SYSTEM} something else altogether", 3 * 16 + 1)
    assert len(asked) == 49 and held.leading(chain_keys("a", asked, 16)) == 3
    assert held.leading(chain_keys("a", word_ids(f"other {SYSTEM}"), 16)) == 0


def test_the_fake_engine_keeps_its_books_with_a_cache_in_a_pool_that_is_too_small() -> None:
    rng = random.Random(5)
    bench = cached_bench(kv_blocks=24, max_num_seqs=6, max_context=200)
    for at in range(120):
        text = " ".join(SYSTEM.split()[: rng.choice([5, 20, 40, 64])])
        bench.core.submit(said(f"{text} {at % 7}", f"r{at}", max_tokens=rng.randint(1, 40), priority=at % 2))
        if at % 5 == 0:
            bench.core.cancel(f"r{rng.randrange(at + 1)}")
        bench.step(bench.now + rng.randrange(30) * 1_000_000)
    ended = [delta for delta in bench.run() if delta.usage is not None]
    assert len(ended) == 120 and sum(delta.usage.cached_tokens for delta in ended if delta.usage) > 500
    stats = bench.core.stats()
    assert stats.kv_blocks_free + stats.kv_blocks_cached == 24 and stats.running == 0


@pytest.mark.parametrize("every", [2, 3])
def test_keys_of_every_so_many_blocks_tell_what_the_engine_would_find_to_that_grain(every: int) -> None:
    rng = random.Random(every)
    pool = BlockPool(60, BLOCK, published=Published(10_000, every))
    held, told = HeldPrefixes(), 0
    texts = [("ab"[rng.randrange(2)], [rng.randrange(2) for _ in range(rng.randint(4, 60))]) for _ in range(30)]
    for _ in range(200):
        share, tokens = rng.choice(texts)
        fill(pool, share, tokens[: len(tokens) // BLOCK * BLOCK])
        news = pool.known.published.news(full=False)
        held.apply(news.full, news.added, news.removed)
        for name, text in texts:
            named = chain_keys(name, text, BLOCK, every=every)
            assert len(named) == (len(text) - 1) // BLOCK // every
            assert held.leading(named) == matched(pool, name, text) // every
            told = max(told, held.leading(named))
    assert told >= 3 and len(held) < len(pool.known)
