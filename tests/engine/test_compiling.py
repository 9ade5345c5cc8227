"""Constraints on their way to a grammar, beside the engine's step loop: bounded, in turns, and each request's own affair.
Numbers in brackets are those of known faults of other engines that a test stands for."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import jsonschema
import pytest

from engine.native_kit import ByteVocabulary, random_model
from engine.test_constrained import POINT, ask, schema
from engine.test_native_engine import SIZES, Ear
from rungway.engine.compiling import BUSY, GrammarLimits
from rungway.engine.constraint import INVALID
from rungway.engine.engine import NativeEngine
from rungway.engine.grammar import Grammar, Grammars
from rungway.engine.protocol import Constraint


@pytest.fixture(scope="module")
def model() -> Any:
    return random_model("llama")


def engine(model: Any, **limits: Any) -> NativeEngine:
    return NativeEngine.from_module(model, ByteVocabulary(), **SIZES, grammar=GrammarLimits(**limits))


async def test_a_bad_schema_fails_only_its_own_request(model: Any) -> None:
    """[35] Before a token is spent."""
    made, ear = engine(model), Ear()
    await made.start(ear)
    made.submit(ask("bad", schema({"not": {}})))
    made.submit(ask("good", schema(POINT)))
    made.submit(ask("free", None, max_tokens=5))
    await ear.until(3)
    ends = {delta.request_id: delta for delta in ear.deltas if delta.usage is not None}
    assert ends["bad"].finish == "error" and (ends["bad"].error or "").startswith(
        INVALID + "the schema's keyword 'not'"
    )
    assert ends["bad"].usage is not None and ends["bad"].usage.prompt_tokens == 0
    assert ends["good"].finish == "stop" and ends["free"].finish in ("stop", "length")
    text = "".join(delta.text for delta in ear.deltas if delta.request_id == "good")
    jsonschema.validate(json.loads(text), POINT)
    made.submit(ask("again", schema(POINT)))
    await ear.until(4)
    await made.stop()
    assert made.check() == []


class Gate:
    """Holds every compilation, or those of one constraint, until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, only: Constraint | None = None) -> None:
        self.open = threading.Event()
        compile_ = Grammars.compile

        def held(grammars: Grammars, constraint: Constraint) -> Grammar:
            if only is None or constraint == only:
                assert self.open.wait(60)
            return compile_(grammars, constraint)

        monkeypatch.setattr(Grammars, "compile", held)


async def test_no_step_waits_for_a_compilation(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    made, ear = engine(model), Ear()
    await made.start(ear)
    made.submit(ask("slow", schema(POINT)))
    made.submit(ask("free", None, max_tokens=30))
    await ear.until(1)
    assert {delta.request_id for delta in ear.deltas} == {"free"} and made.stats().waiting == 1
    made.submit(ask("gone", schema(POINT)))
    made.cancel("gone")
    await ear.until(2)
    assert ear.deltas[-1].request_id == "gone" and ear.deltas[-1].finish == "cancelled"
    gate.open.set()
    await ear.until(3)
    assert ear.deltas[-1].request_id == "slow" and ear.deltas[-1].finish == "stop"
    await made.stop()


def errors(ear: Ear) -> dict[str, str]:
    return {delta.request_id: delta.error or "" for delta in ear.deltas if delta.usage is not None}


async def test_compilations_are_bounded_in_time_and_number(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    made, ear = engine(model, timeout_s=1.0, waiting_max=2), Ear()
    await made.start(ear)
    for at in range(3):
        made.submit(ask(f"r{at}", schema(POINT)))
    await ear.until(3)
    whys = errors(ear)
    assert "takes longer" in whys["r0"] and whys["r0"].startswith(INVALID)
    assert whys["r1"] == whys["r2"] == BUSY, "who never had a turn asked for nothing that cannot be"
    gate.open.set()
    await asyncio.sleep(0.05)
    assert len(ear.deltas) == 3, "a compilation that ends late has no effect"
    made.submit(ask("next", schema(POINT)))
    await ear.until(4)
    assert errors(ear)["next"] == "", "the thread is free again"
    await made.stop()


@pytest.mark.parametrize("threads", [1, 2, 3])
async def test_what_compiles_for_long_holds_up_its_own_share_only(
    model: Any, monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    """However many one share has, it has one thread; what it gave up on counts until the thread is free."""
    slow = schema({"const": "slow"})
    gate = Gate(monkeypatch, slow)
    made, ear = engine(model, timeout_s=1.0 if threads == 1 else 20.0, threads=threads), Ear()
    await made.start(ear)
    for at in range(5):
        made.submit(ask(f"slow{at}", slow, share="hostile"))
    for at in range(4):
        made.submit(ask(f"r{at}", schema({"const": at}), share=f"tenant{at % 2}"))
    if threads == 1:
        await ear.until(1)
        assert "takes longer" in errors(ear)["slow0"]
        gate.open.set()
    await ear.until(9 if threads == 1 else 4)
    assert [errors(ear)[f"r{at}"] for at in range(4)] == [""] * 4
    assert made.stats().waiting == (0 if threads == 1 else 5)
    gate.open.set()
    await ear.until(9)
    await made.stop()
    assert made.check() == []


async def test_shares_take_turns(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    held, order = Grammars.compile, []

    def noted(grammars: Grammars, constraint: Constraint) -> Grammar:
        order.append(json.loads(constraint.text)[0])
        return held(grammars, constraint)

    monkeypatch.setattr(Grammars, "compile", noted)
    made, ear = engine(model, threads=1), Ear()
    await made.start(ear)
    for name in ("a1", "a2", "a3", "b1", "b2", "c1"):
        made.submit(ask(name, Constraint("choice", f'["{name}"]'), share=name[0]))
    gate.open.set()
    await ear.until(6)
    assert order == ["a1", "b1", "c1", "a2", "b2", "a3"]
    await made.stop()


async def test_a_share_that_fills_the_room_makes_place_for_others(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    made, ear = engine(model, threads=1, waiting_max=4), Ear()
    await made.start(ear)
    for at in range(5):
        made.submit(ask(f"many{at}", schema(POINT), share="many"))
    made.submit(ask("few", schema({"const": 1}), share="few"))
    await ear.until(2)
    assert errors(ear) == {"many4": BUSY, "many3": BUSY}
    gate.open.set()
    await ear.until(6)
    assert errors(ear)["few"] == "" and made.stats().waiting == 0
    await made.stop()


async def test_whatever_the_compiler_raises_ends_the_request(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Foreign code: also what is no Exception, as a panic of its own."""

    class Panic(BaseException):
        pass

    raised: list[BaseException] = [Panic("broken"), RecursionError(), UnicodeEncodeError("utf-8", "", 0, 1, "half")]
    real = Grammars.compile

    def broken(grammars: Grammars, constraint: Constraint) -> Grammar:
        if raised:
            raise raised.pop()
        return real(grammars, constraint)

    monkeypatch.setattr(Grammars, "compile", broken)
    made, ear = engine(model), Ear()
    await made.start(ear)
    for at in range(4):
        made.submit(ask(f"r{at}", schema(POINT)))
    await ear.until(4)
    assert [errors(ear)[f"r{at}"].startswith(INVALID) for at in range(4)] == [True, True, True, False]
    await made.stop()


async def test_stopping_ends_what_still_waits_for_its_grammar(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    made, ear = engine(model), Ear()
    await made.start(ear)
    made.submit(ask("slow", schema(POINT), sequences=2))
    await made.stop()
    assert [(delta.index, delta.finish) for delta in ear.deltas] == [(0, "cancelled"), (1, "cancelled")]
    gate.open.set()
