"""The embedding engine without a model: order, budget, cancellation, failures, and what it counts."""

from __future__ import annotations

import asyncio
import math
from array import array
from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rungway.engine.embedding.core import EmbedCore
from rungway.engine.embedding.encoder import Failed, Piece
from rungway.engine.embedding.engine import EmbeddingEngine
from rungway.engine.embedding.fake import FAKE_DIMENSIONS, FakeEncoder, unit_vector
from rungway.engine.fake import FakeEngine
from rungway.engine.fake_stream import FakeProfile
from rungway.engine.protocol import Delta, EmbedInput, Sampling, Work

WAIT_S = 60.0


class Plain:
    """An encoder that notes its batches; the vector of a piece is its first id, and id 13 fails."""

    dimensions, context, vocab_size, path, goes_by_text = 1, 64, 1000, "test", False

    def __init__(self) -> None:
        self.batches: list[list[Piece]] = []
        self.broken = False

    def encode(self, batch: Sequence[Piece]) -> list[bytes | Failed | None]:
        self.batches.append(list(batch))
        if self.broken:
            raise RuntimeError("device lost")
        return [Failed("unlucky") if piece.ids[0] == 13 else bytes(piece.ids[:1]) for piece in batch]


def work(name: str, *lengths: int, share: str = "acme", token: int = 1, **more: Any) -> Work:
    inputs = [EmbedInput([token] * length) for length in lengths]
    fields: dict[str, Any] = {"attempt": 1, "prompt_ids": [], "prompt_text": "", "kind": "embed", "share": share}
    fields |= {"sampling": Sampling(max_tokens=0), "sequences": len(lengths), "inputs": inputs}
    return Work(request_id=name, **(fields | more))


def core_of(encoder: Any, *, budget: int = 32, waiting_max: int = 1000) -> EmbedCore:
    return EmbedCore(encoder, max_num_batched_tokens=budget, waiting_max=waiting_max, clock_ns=lambda: 0)


def finished(core: EmbedCore) -> list[Delta]:
    deltas = []
    while core.busy:
        deltas += core.step()
        assert core.check() == []
    return deltas


def test_requests_share_steps_within_the_budget() -> None:
    encoder = Plain()
    core = core_of(encoder)
    assert core.add(work("a", 10, 10)) == [] and core.add(work("b", 10, share="beta")) == []
    (*first, last) = finished(core)
    assert len(encoder.batches) == 1 and sum(piece.tokens for piece in encoder.batches[0]) == 30
    assert {(d.request_id, d.index, d.finish, d.vector) for d in [*first, last]} == {
        ("a", 0, "stop", b"\x01"),
        ("a", 1, "stop", b"\x01"),
        ("b", 0, "stop", b"\x01"),
    }
    usages = {d.request_id: d.usage.prompt_tokens for d in [*first, last] if d.usage is not None}
    assert usages == {"a": 20, "b": 10}
    stats = core.stats()
    assert (stats.running, stats.tokens_in_flight) == (0, 0)


def test_a_long_input_has_a_step_of_its_own_and_nobody_overtakes_it() -> None:
    encoder = Plain()
    core = core_of(encoder, budget=20)
    core.add(work("a", 5, 60, 5))
    finished(core)
    assert [[piece.tokens for piece in batch] for batch in encoder.batches] == [[5], [60], [5]]


@pytest.mark.parametrize(("weight", "expected"), [(1.0, 1.0), (3.0, 3.0)])
def test_two_shares_divide_the_batch_by_weight(weight: float, expected: float) -> None:
    """One tenant came first, with ten times as much; the other's vectors come at the pace of its weight."""
    encoder = Plain()
    core = core_of(encoder, budget=32)
    assert core.add(work("bulk", *[8] * 800, share="bulk")) == []
    assert core.add(work("small", *[8] * 80, share="small", weight=weight)) == []
    got: Counter[str] = Counter()
    while got["small"] < 80 and core.busy:
        got.update(delta.request_id for delta in core.step())
    assert got["small"] / got["bulk"] == pytest.approx(expected, rel=0.1)


def test_a_higher_class_goes_before_everything_that_waits() -> None:
    core = core_of(Plain(), budget=8)
    core.add(work("batch", *[8] * 50, priority=2))
    core.step()
    core.add(work("urgent", 8, share="beta", priority=0))
    assert [delta.request_id for delta in core.step()] == ["urgent"]


def test_cancel_ends_what_is_open_and_bills_what_was_computed() -> None:
    core = core_of(Plain(), budget=8)
    core.add(work("a", 8, 8, 8))
    (first,) = core.step()
    assert first.vector is not None and first.usage is None
    ends = core.cancel("a")
    assert [(d.index, d.finish) for d in ends] == [(1, "cancelled"), (2, "cancelled")]
    assert ends[-1].usage is not None and ends[-1].usage.prompt_tokens == 8
    assert core.cancel("a") == [] and not core.busy and core.check() == []


def test_a_failing_input_ends_its_request_and_no_other() -> None:
    core = core_of(Plain())
    core.add(work("bad", 4, token=13))
    core.add(work("good", 4, share="beta"))
    ends = {delta.request_id: delta for delta in finished(core)}
    assert (ends["bad"].finish, ends["bad"].error, ends["bad"].vector) == ("error", "unlucky", None)
    assert ends["bad"].usage is not None and ends["bad"].usage.prompt_tokens == 0
    assert ends["good"].finish == "stop"


def test_a_device_failure_ends_the_batch_and_the_engine_goes_on() -> None:
    encoder = Plain()
    core = core_of(encoder, budget=8)
    core.add(work("a", 8))
    core.add(work("b", 8, share="beta"))
    encoder.broken = True
    (broken,) = core.step()
    encoder.broken = False
    (good,) = core.step()
    assert broken.finish == "error" and "device lost" in str(broken.error) and good.finish == "stop"
    assert core.check() == []


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (work("x", 65), "does not fit a context of 64"),
        (work("x", 4, token=1000), "outside the vocabulary"),
        (work("x", 4, token=-1), "outside the vocabulary"),
        (work("x", 0), "no tokens"),
        (work("x", 4, 0, 4), "no tokens"),
        (work("x", 1, inputs=[EmbedInput([], "a text")]), "no tokens"),
        (work("x", 4, weight=0.0), "weight"),
        (work("x"), "0 sequences"),
        (work("x", 4, kind="generate"), "generates no text"),
    ],
)
def test_what_cannot_run_is_refused_alone(wrong: Work, why: str) -> None:
    core = core_of(Plain())
    core.add(work("here", 4))
    deltas = core.add(wrong)
    assert deltas and why in str(deltas[-1].error) and deltas[-1].usage is not None
    assert core.add(work("here", 4))[0].error == "a request of this id is already here"
    assert [delta.request_id for delta in finished(core)] == ["here"]


def test_waiting_inputs_are_bounded() -> None:
    core = core_of(Plain(), waiting_max=10)
    assert core.add(work("a", *[4] * 20)) == []  # alone it may wait
    assert "wait already" in str(core.add(work("b", 4))[0].error)


def test_a_text_engine_makes_no_embeddings() -> None:
    async def ends() -> list[Delta]:
        engine = FakeEngine(FakeProfile(), max_num_seqs=4, max_context=64)
        got: list[Delta] = []
        await engine.start(got.extend)
        engine.submit(work("a", 4))
        await engine.stop()
        return got

    (end,) = asyncio.run(ends())
    assert end.finish == "error" and "no embeddings" in str(end.error)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_whatever_happens_every_input_ends_once_and_the_books_agree(data: st.DataObject) -> None:
    core = core_of(Plain(), budget=data.draw(st.integers(1, 80)))
    ends: Counter[tuple[str, int]] = Counter()
    asked: dict[str, list[int]] = {}
    tokens: Counter[str] = Counter()
    usages: dict[str, int] = {}

    def take(deltas: list[Delta]) -> None:
        for delta in deltas:
            ends[delta.request_id, delta.index] += 1
            tokens[delta.request_id] += asked[delta.request_id][delta.index] if delta.vector is not None else 0
            if delta.usage is not None:
                assert delta.request_id not in usages
                usages[delta.request_id] = delta.usage.prompt_tokens

    for number in range(data.draw(st.integers(1, 12))):
        match data.draw(st.sampled_from(["add", "add", "step", "cancel"])):
            case "add":
                lengths = asked[f"r{number}"] = data.draw(st.lists(st.integers(1, 64), min_size=1, max_size=6))
                share, band = data.draw(st.sampled_from("abc")), data.draw(st.integers(0, 2))
                take(core.add(work(f"r{number}", *lengths, share=share, priority=band)))
            case "step":
                take(core.step())
            case _:
                take(core.cancel(data.draw(st.sampled_from(sorted(asked) or ["nobody"]))))
        assert core.check() == []
    take(finished(core))
    assert ends == Counter({(name, index): 1 for name, lengths in asked.items() for index in range(len(lengths))})
    assert usages == {name: tokens[name] for name in asked}


# --- the engine around it


class Run:
    """An engine over the fake encoder, and all that it said."""

    def __init__(self, **profile: Any) -> None:
        encoder = FakeEncoder(FakeProfile(**({"ttft_ms": 0, "prefill_ms_per_1k": 0} | profile)), max_context=64)
        self.engine = EmbeddingEngine(encoder, max_num_seqs=8, max_num_batched_tokens=64, tokens_max=4096)
        self.deltas: list[Delta] = []

    async def ended(self, name: str) -> list[Delta]:
        async with asyncio.timeout(WAIT_S):
            while not any(delta.request_id == name and delta.usage is not None for delta in self.deltas):
                await asyncio.sleep(0.005)
        return [delta for delta in self.deltas if delta.request_id == name]


def texts(name: str, *given: str) -> Work:
    return msgspec.structs.replace(work(name, *[1] * len(given)), inputs=[EmbedInput([], text) for text in given])


def values(vector: bytes | None) -> list[float]:
    assert vector is not None
    return array("f", vector).tolist()


async def test_fake_vectors_are_of_length_one_and_of_their_text_alone() -> None:
    run = Run()
    await run.engine.start(run.deltas.extend)
    run.engine.submit(texts("a", "one text", "another", "one text"))
    first, other, again = sorted(await run.ended("a"), key=lambda delta: delta.index)
    assert first.vector == again.vector == unit_vector("one text") != other.vector
    assert len(values(first.vector)) == FAKE_DIMENSIONS
    assert math.fsum(value**2 for value in values(other.vector)) == pytest.approx(1.0, abs=1e-5)
    await run.engine.stop()


async def test_a_hanging_text_is_cancelled_while_others_are_served() -> None:
    run = Run()
    await run.engine.start(run.deltas.extend)
    run.engine.submit(texts("stuck", "[[hang]] here", "fine text"))
    run.engine.submit(texts("good", "fine text"))
    assert [delta.finish for delta in await run.ended("good")] == ["stop"]
    run.engine.cancel("stuck")
    ends = {delta.index: delta for delta in await run.ended("stuck")}
    assert ends[1].finish == "stop" and ends[0].finish == "cancelled"
    assert ends[0].usage is not None and ends[0].usage.prompt_tokens == 2  # the words of what was computed
    assert run.engine.check() == [] and run.engine.stats().running == 0
    await run.engine.stop()


@pytest.mark.parametrize("text", ["[[fail_after=0]] x", "[[ttft_ms=never]] x"])
async def test_a_scripted_failure_is_an_error(text: str) -> None:
    run = Run()
    await run.engine.start(run.deltas.extend)
    run.engine.submit(texts("a", text))
    (end,) = await run.ended("a")
    assert end.finish == "error" and end.error
    await run.engine.stop()


async def test_stop_ends_everything_with_its_usage() -> None:
    run = Run()
    await run.engine.start(run.deltas.extend)
    run.engine.submit(texts("a", "[[hang]]"))
    await run.engine.stop()
    await run.engine.stop()
    (end,) = await run.ended("a")
    assert end.finish == "cancelled"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_a_bug_in_the_encoder_ends_the_engine_in_words() -> None:
    run = Run()

    def bug(batch: Sequence[Piece]) -> list[bytes | Failed | None]:
        raise KeyError("bug")

    run.engine._core._encoder.encode = bug  # type: ignore[method-assign]
    await run.engine.start(run.deltas.extend)
    run.engine.submit(texts("a", "x"))
    (end,) = await run.ended("a")
    assert end.finish == "error" and "KeyError" in str(end.error)
    await run.engine.stop()
    assert "step loop has died" in run.engine.check()[0]


@pytest.mark.parametrize(
    ("sizes", "least", "most"),
    [
        ([1] * 300, 20_000, math.inf),  # they hardly tell what a token costs: no long text is called slow for it
        ([1000] * 50, 30_000, 55_000),
        ([1, 900, 3, 40, 500, 1000] * 20, 40_000, 60_000),
        ([1000] * 50 + [2] * 300, 30_000, 60_000),
    ],
)
def test_short_texts_do_not_make_an_engine_look_slow(sizes: list[int], least: float, most: float) -> None:
    """A step takes 5 ms and 20 us for each token, so 50,000 tokens a second is what a long text gets."""

    class Slow(Plain):
        context, now_ns = 1000, 0

        def encode(self, batch: Sequence[Piece]) -> list[bytes | Failed | None]:
            self.now_ns += 5_000_000 + 20_000 * sum(piece.tokens for piece in batch)
            return super().encode(batch)

    encoder = Slow()
    core = EmbedCore(encoder, max_num_batched_tokens=1000, waiting_max=10, clock_ns=lambda: encoder.now_ns)
    for at, size in enumerate(sizes):
        core.add(work(f"r{at}", size))
        finished(core)
    assert least <= core.stats().prefill_tokens_per_s <= most
