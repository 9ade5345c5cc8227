"""Shared steps of the fake engine: what a prompt costs its neighbours, and whose chunk is next."""

from __future__ import annotations

import random

import pytest

from rungway.engine.fake_steps import SharedSteps
from rungway.engine.fake_stream import FakeProfile
from rungway.engine.protocol import Delta, Sampling, Work

MS = 1_000_000


def work(words: int, request_id: str, *, share: str = "", tokens: int = 8, priority: int = 0, more: str = "") -> Work:
    return Work(
        request_id=request_id,
        attempt=1,
        prompt_ids=[],
        prompt_text="w " * words + more,
        sampling=Sampling(max_tokens=tokens),
        priority=priority,
        share=share,
    )


class Bench:
    """A core with a hand-driven clock: 10 ms a step and 0.1 ms a prompt token, 100 tokens a step."""

    def __init__(self, **profile: object) -> None:
        base: dict[str, object] = {"tpot_ms": 10, "ttft_ms": 0, "prefill_ms_per_1k": 100, "step_tokens": 100}
        self.core = SharedSteps(FakeProfile(**(base | profile)), max_num_seqs=8, max_context=4096)  # type: ignore[arg-type]
        self.now = 0
        self.times: dict[str, list[int]] = {}

    def run(self, until_ms: int = 1 << 40) -> None:
        """Step from wake to wake; keeps when each request said something, in ms."""
        while (wake := self.core.wake_ns()) is not None and max(self.now, wake) <= until_ms * MS:
            self.now = max(self.now, wake)
            for delta in self.core.step(self.now):
                self.times.setdefault(delta.request_id, []).append(self.now // MS)
            assert self.core.check() == []


def test_a_step_takes_its_decodes_and_its_chunk() -> None:
    bench = Bench()
    bench.core.submit(work(50, "r", tokens=3))
    bench.run()
    assert bench.times["r"] == [15, 25, 35]


def test_a_long_prompt_slows_its_neighbours_while_it_is_computed() -> None:
    bench = Bench()
    bench.core.submit(work(10, "short", tokens=12))
    bench.run(until_ms=11)
    bench.core.submit(work(400, "long", tokens=1))
    bench.run()
    gaps = [b - a for a, b in zip(bench.times["short"], bench.times["short"][1:], strict=False)]
    # The step that ran is not touched; then 99 prompt tokens a step, 19.9 ms, four times, and the last four tokens.
    assert gaps[0] == 10 and all(19 <= gap <= 20 for gap in gaps[1:5])
    assert (sum(gaps[1:6]), gaps[6]) == (90, 10)


def test_tenants_share_the_chunk_and_one_tenant_waits_for_itself() -> None:
    bench = Bench()
    bench.core.submit(work(1000, "bully", share="b"))
    bench.core.submit(work(1000, "bully-2", share="b"))
    bench.core.submit(work(40, "victim", share="v"))
    bench.run()
    assert bench.times["victim"][0] == 20
    # Alone for itself it would have come after both: 2,000 tokens in 20 steps.
    same = Bench()
    for name, words in (("bully", 1000), ("bully-2", 1000), ("victim", 40)):
        same.core.submit(work(words, name, share="one"))
    same.run()
    assert same.times["victim"][0] > 400


def test_an_urgent_band_takes_the_chunk_first() -> None:
    bench = Bench()
    bench.core.submit(work(300, "later", share="a", priority=2))
    bench.core.submit(work(100, "now", share="b", priority=0))
    bench.run()
    assert bench.times["now"][0] == 20


def test_ttft_passes_before_the_prompt_begins_and_late_steps_catch_up() -> None:
    bench = Bench(ttft_ms=100)
    bench.core.submit(work(50, "r", tokens=4))
    assert bench.core.step(0) == [] and bench.core.wake_ns() == 100 * MS
    assert bench.core.step(100 * MS) == []
    said: list[Delta] = bench.core.step(200 * MS)
    assert sum(len(delta.token_ids) for delta in said) == 4


def test_one_that_hangs_keeps_nobody_awake() -> None:
    bench = Bench()
    bench.core.submit(work(3, "r", more="[[hang=2]]"))
    bench.run()
    assert bench.core.wake_ns() is None and len(bench.times["r"]) == 2
    bench.core.cancel("r")
    bench.run()
    assert bench.core.stats().running == 0


@pytest.mark.parametrize("seed", [1, 2])
def test_random_work_keeps_the_books(seed: int) -> None:
    rng = random.Random(seed)
    core = SharedSteps(
        FakeProfile(block_tokens=4, kv_blocks=40, step_tokens=16, prefix_cache=True), max_num_seqs=5, max_context=120
    )
    now, ends = 0, []
    names = [f"r{number}" for number in range(200)]
    for name in names:
        directive = rng.choice(["", "", "[[fail_after=4]]", "[[hang=2]]", "[[emit=%E2%82%AC]]"])
        core.submit(work(rng.randint(1, 30), name, share=rng.choice("ab"), tokens=rng.randint(0, 40), more=directive))
        for _ in range(rng.randint(0, 6)):
            now = max(now, core.wake_ns() or 0) + rng.choice([0, 0, 30 * MS])
            ends += [delta.request_id for delta in core.step(now) if delta.usage]
            assert core.check() == []
        if rng.random() < 0.3:
            core.cancel(rng.choice(names))
    for name in names:
        core.cancel(name)
    while (wake := core.wake_ns()) is not None:
        now = max(now, wake)
        ends += [delta.request_id for delta in core.step(now) if delta.usage]
    assert sorted(ends) == sorted(names)
    stats = core.stats()
    assert (stats.running, stats.waiting, stats.tokens_in_flight) == (0, 0, 0)
