"""The engine with its thread and the event loop."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.native_kit import ByteVocabulary, generate, random_model, random_prompts, work
from engine.tiny_model import save_tiny_llama
from rungway.engine import core as core_module
from rungway.engine.assemble import Sizes, module_parts
from rungway.engine.engine import NativeEngine
from rungway.engine.errors import ModelError
from rungway.engine.protocol import Delta
from rungway.engine.rules import Rules

SIZES: dict[str, Any] = {
    "max_num_seqs": 4,
    "max_context": 128,
    "max_num_batched_tokens": 32,
    "kv_blocks": 64,
    "block_tokens": 4,
}


class Ear:
    """Collects deltas and waits for ends."""

    def __init__(self) -> None:
        self.deltas: list[Delta] = []
        self.steps = 0
        self._news = asyncio.Event()

    def __call__(self, deltas: list[Delta]) -> None:
        self.deltas += deltas
        self.steps += 1
        self._news.set()

    async def until(self, done: int) -> None:
        async with asyncio.timeout(60):
            while sum(1 for delta in self.deltas if delta.usage is not None) < done:
                self._news.clear()
                await self._news.wait()

    async def first_token(self) -> None:
        async with asyncio.timeout(60):
            while not self.deltas:
                self._news.clear()
                await self._news.wait()


@pytest.fixture(scope="module")
def model() -> Any:
    return random_model("llama")


def make(model: Any) -> NativeEngine:
    return NativeEngine.from_module(model, ByteVocabulary(), **SIZES)


def unheld(engine: NativeEngine) -> int:
    stats = engine.stats()
    return stats.kv_blocks_free + stats.kv_blocks_cached


async def test_many_requests_through_the_thread(model: Any) -> None:
    prompts = random_prompts(6, longest=20)
    engine, ear = make(model), Ear()
    await engine.start(ear)
    for at, prompt in enumerate(prompts):
        engine.submit(work(str(at), prompt, max_tokens=8))
    await ear.until(6)
    for at, prompt in enumerate(prompts):
        got = [token for delta in ear.deltas if delta.request_id == str(at) for token in delta.token_ids]
        assert got == generate(model, prompt, 8)
    assert engine.check() == [] and unheld(engine) == 64
    assert engine.stats().decode_tokens_per_s > 0 and engine.stats().prefill_tokens_per_s > 0
    await engine.stop()
    await engine.stop()
    assert engine.check() == []


async def test_cancel_frees_the_blocks_with_its_last_delta(model: Any) -> None:
    engine, ear = make(model), Ear()
    await engine.start(ear)
    engine.cancel("unknown")
    engine.submit(work("r", [1] * 20, max_tokens=100, sequences=3))
    await ear.first_token()
    engine.cancel("r")
    await ear.until(1)
    ends = [delta for delta in ear.deltas if delta.finish]
    assert [delta.finish for delta in ends] == ["cancelled"] * 3 and ends[-1].usage is not None
    assert ends[-1].usage.output_tokens == sum(len(delta.token_ids) for delta in ear.deltas)
    assert unheld(engine) == 64 and engine.stats().running == 0
    await engine.stop()


async def test_stop_delivers_the_last_deltas(model: Any) -> None:
    engine, ear = make(model), Ear()
    await engine.start(ear)
    for name in ("a", "b"):
        engine.submit(work(name, [1] * 20, max_tokens=100))
    await engine.stop()
    assert sorted(delta.request_id for delta in ear.deltas if delta.usage is not None) == ["a", "b"]


async def test_what_comes_while_it_stops_or_later_has_an_end(model: Any) -> None:
    engine, ear = make(model), Ear()
    await engine.start(ear)
    engine.submit(work("running", [1] * 20, max_tokens=100))
    stopping, sent = asyncio.create_task(engine.stop()), 0
    while not stopping.done():
        engine.submit(work(f"r{sent}", [1] * 20, max_tokens=100))
        sent += 1
        await asyncio.sleep(0.001)
    engine.submit(work("late", [1] * 20, sequences=2))
    await ear.until(sent + 2)
    ends = [(delta.request_id, delta.finish) for delta in ear.deltas if delta.usage is not None]
    assert sorted(ends) == sorted(
        (name, "cancelled") for name in ("running", "late", *(f"r{at}" for at in range(sent)))
    )
    assert engine.check() == []


async def test_a_slow_reader_does_not_lose_or_reorder(model: Any) -> None:
    """The event loop is held for longer than the engine may run ahead."""
    engine, ear = make(model), Ear()
    await engine.start(ear)
    engine.submit(work("r", [1], max_tokens=100))
    await ear.first_token()
    time.sleep(1.0)  # noqa: ASYNC251  (on purpose: holds up the loop)
    await ear.until(1)
    assert [token for delta in ear.deltas for token in delta.token_ids] == generate(model, [1], 100)
    await engine.stop()


async def test_what_a_dead_step_loop_ends_is_an_error_not_a_cancellation(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, ear = make(model), Ear()
    await engine.start(ear)
    engine.submit(work("running", [1] * 20, max_tokens=100, sequences=2))
    await ear.first_token()
    monkeypatch.setattr(threading, "excepthook", lambda _: None)

    def broken(*_: Any) -> Any:
        raise ZeroDivisionError("a fault of our own")

    monkeypatch.setattr(core_module, "sample", broken)
    engine.submit(work("waiting", [1] * 20, max_tokens=100))
    await ear.until(2)
    engine.submit(work("late", [1] * 20, max_tokens=100))
    await ear.until(3)
    ends = {(delta.request_id, delta.index): delta for delta in ear.deltas if delta.finish}
    assert set(ends) == {("running", 0), ("running", 1), ("waiting", 0), ("late", 0)}
    assert all(delta.finish == "error" and "a fault of our own" in (delta.error or "") for delta in ends.values())
    assert unheld(engine) == 64 and engine.stats().running == 0
    assert any("died" in problem for problem in engine.check())
    await engine.stop()


async def test_a_request_whose_admission_kills_the_engine_is_told_too(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, ear = make(model), Ear()
    await engine.start(ear)
    monkeypatch.setattr(threading, "excepthook", lambda _: None)

    def broken(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError("a fault of our own")

    monkeypatch.setattr(core_module, "problem", broken)
    engine.submit(work("deadly", [1] * 20))
    await ear.until(1)
    assert [(delta.request_id, delta.finish) for delta in ear.deltas] == [("deadly", "error")]
    await engine.stop()


def test_from_a_directory_and_its_mistakes(tmp_path: Path) -> None:
    path = save_tiny_llama(tmp_path / "model")
    engine = NativeEngine.from_dir(path, **{**SIZES, "kv_blocks": None, "max_context": 100_000})
    assert engine.context == 512 and engine.kv_tokens == 4 * 512 and engine.max_num_seqs == 4
    for wrong in ({"dtype": "int3"}, {"dtype": "float16"}, {"device": "abacus"}, {"max_num_seqs": 0}):
        with pytest.raises(ModelError):
            NativeEngine.from_dir(path, **{**SIZES, **wrong})
    (path / "model.safetensors").write_bytes(b"nonsense")
    with pytest.raises(ModelError, match="cannot be read"):
        NativeEngine.from_dir(path, **SIZES)
    config = (path / "config.json").read_text()
    (path / "config.json").write_text(config.replace('"llama"', '"mamba"'))
    with pytest.raises(ModelError, match="mamba"):
        NativeEngine.from_dir(path, **SIZES)


async def test_a_step_that_hangs_makes_the_engine_unsound_and_a_long_one_that_ends_does_not(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its thread lives and its books balance, so only the time that the step takes can say it."""
    now_ns = 0
    parts = module_parts(model, ByteVocabulary(), Sizes(4, 128, 32, 64, 4), "float32", torch.device("cpu"))
    engine, ear = NativeEngine(*parts, rules=Rules(step_timeout_s=5.0), clock_ns=lambda: now_ns), Ear()
    inside, go_on = threading.Event(), threading.Event()
    run = engine._core._runner.run

    def hang(step: Any) -> Any:
        inside.set()
        assert go_on.wait(60)
        return run(step)

    monkeypatch.setattr(engine._core._runner, "run", hang)
    await engine.start(ear)
    try:
        engine.submit(work("r", [1, 2, 3], max_tokens=2))
        assert await asyncio.to_thread(inside.wait, 60)
        now_ns += 5 * 10**9
        assert engine.check() == []
        now_ns += 10**9
        assert engine.check() == ["a step has lasted 6 s"]
    finally:
        go_on.set()
    await ear.until(1)
    now_ns += 100 * 10**9
    assert engine.check() == [], "nothing runs"
    await engine.stop()
