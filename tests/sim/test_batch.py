"""The played engine against arithmetic: steps, chunks, cancels, and runs of steps against single ones."""

from __future__ import annotations

from random import Random

import pytest

from rungway.policies.prefixes import HeldPrefixes
from rungway.simulate import batch as batch_module
from rungway.simulate.batch import Batch
from rungway.simulate.cost import PRESETS, CostModel
from rungway.simulate.job import Job
from rungway.simulate.loop import Loop
from rungway.simulate.prefix import PrefixCache, prefix_keys

MS = 1_000_000
COST = CostModel(weights_ms=10.0, token_ms=0.1)


class Played:
    """A batch on its own; what it said, in milliseconds."""

    def __init__(
        self, cost: CostModel = COST, *, slots: int = 4, kv_tokens: int = 10_000, step_tokens: int = 100
    ) -> None:
        self.loop = Loop()
        self.firsts: dict[str, float] = {}
        self.ends: dict[str, tuple[float, str, int]] = {}
        self.batch = Batch(
            self.loop,
            cost,
            slots=slots,
            kv_tokens=kv_tokens,
            step_tokens=step_tokens,
            on_first=lambda job: self.firsts.__setitem__(job.request_id, self.loop.now_ns / MS),
            on_end=self._end,
        )

    def _end(self, job: Job, finish: str) -> None:
        self.ends[job.request_id] = (self.loop.now_ns / MS, finish, job.finished)

    def submit(self, name: str, prompt: int, target: int, **more: object) -> None:
        self.batch.submit(Job(name, 1, prompt=prompt, target=target, **more))  # type: ignore[arg-type]

    def run(self, until_ms: float = 1e6) -> None:
        self.loop.run(int(until_ms * MS))


def test_one_request_takes_prefill_chunks_and_then_a_step_per_token() -> None:
    played = Played()
    played.submit("a", 250, 5)
    played.run()
    # 100 + 100 + 50 tokens: each chunk costs max(10, tokens x 0.1) = 10 ms; the last one yields the first token.
    assert played.firsts["a"] == pytest.approx(30)
    assert played.ends["a"] == (pytest.approx(70), "length", 5)


def test_arithmetic_takes_over_where_it_is_dearer_than_the_weights() -> None:
    played = Played(step_tokens=400)
    played.submit("a", 400, 1)
    played.run()
    assert played.ends["a"][0] == pytest.approx(40)


def test_a_full_batch_makes_the_next_wait() -> None:
    played = Played(slots=1)
    played.submit("a", 10, 10)
    played.submit("b", 10, 1)
    played.run()
    assert played.ends["a"][0] == pytest.approx(100)
    assert played.ends["b"][0] == pytest.approx(110)


def test_a_cancel_takes_effect_at_the_end_of_the_step_under_way() -> None:
    played = Played()
    played.submit("a", 10, 50)
    played.run(until_ms=104)
    played.batch.cancel("a")
    played.run()
    assert played.ends["a"] == (pytest.approx(110), "cancelled", 11)
    assert not played.batch.running and played.batch.emitted_total == 11


def test_a_newcomer_joins_at_the_next_step_and_lengthens_nothing_before_it() -> None:
    played = Played()
    played.submit("a", 10, 20)
    played.run(until_ms=55)
    played.submit("b", 100, 3)
    played.run()
    # Steps of 10 ms until 60; then 99 + 1 tokens (10 ms), 1 + 1 (10 ms), and b's first token at 80.
    assert played.firsts["b"] == pytest.approx(80)
    assert played.ends["a"][0] == pytest.approx(200)


def test_the_dead_emit_nothing_more() -> None:
    played = Played()
    played.submit("a", 10, 50)
    played.run(until_ms=104)
    gone = played.batch.kill()
    assert [(job.request_id, job.finished) for job in gone] == [("a", 10)]
    played.run()
    assert not played.ends


def test_prefill_turns_go_to_the_tenant_that_had_least() -> None:
    played = Played(slots=8)
    for number in range(3):
        played.submit(f"hog-{number}", 300, 1, share="hog")
    played.submit("small", 100, 1, share="small")
    played.run()
    assert played.firsts["small"] <= 30 and played.firsts["hog-2"] == pytest.approx(100)


@pytest.mark.parametrize("seed", range(5))
def test_runs_of_steps_are_the_same_as_single_steps(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def play() -> tuple[dict[str, float], dict[str, tuple[float, str, int]]]:
        rng, played = Random(seed), Played(slots=3)
        for number in range(30):
            job = (f"r{number}", rng.randint(1, 300), rng.randint(1, 150))
            played.loop.at(int(rng.uniform(0, 3000) * MS), played.submit, *job)
            if rng.random() < 0.3:
                played.loop.at(int(rng.uniform(0, 4000) * MS), played.batch.cancel, f"r{number}")
        played.run()
        return played.firsts, played.ends

    whole = play()
    monkeypatch.setattr(batch_module, "RUN_STEPS_MAX", 1)
    assert play() == whole


def test_prefix_blocks_are_found_from_the_front_and_per_tenant() -> None:
    cache = PrefixCache(10)
    assert cache.look("a", (1, 2, 3), 1600) == 0
    assert cache.look("a", (1, 2, 9), 1600) == 1024
    assert cache.look("a", (8, 1), 1600) == 0, "what comes after a miss is no prefix"
    assert cache.look("b", (1, 2), 1600) == 0
    assert cache.look("a", (1, 2, 3), 1536) == 1535, "a prompt is never found whole"


def test_the_presets_give_plausible_engines() -> None:
    a10g = PRESETS["a10g-7b"]
    assert 30 < a10g.step_ms(1, 0) < 50, "13.4 GB over 360 GB/s"
    assert PRESETS["h200-8b"].step_ms(1, 0) < 10
    assert a10g.capacity_tokens_per_s(16, 256, 256) < a10g.capacity_tokens_per_s(32, 256, 256)


def test_a_played_cache_tells_what_comes_and_goes() -> None:
    cache, held = PrefixCache(10), HeldPrefixes()
    rng = Random(2)
    for turn in range(200):
        first = rng.randrange(6) * 100
        cache.look("ab"[turn % 2], tuple(range(first, first + rng.randint(1, 8))), 9999)
        news = cache.news(full=turn % 50 == 20)
        if news is not None:
            held.apply(news.full, news.added, news.removed)
        assert len(held) <= 10
    for share in "ab":
        for first in range(0, 600, 100):
            blocks = tuple(range(first, first + 8))
            hits = held.leading(prefix_keys(share, blocks))
            assert hits == next((at for at in range(8) if (share, blocks[at]) not in cache._blocks), 8)
