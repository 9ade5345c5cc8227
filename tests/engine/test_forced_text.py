"""Demands that leave no choice over a long stretch: met in full, and no step pays for their length again and again."""

from __future__ import annotations

import json

import numpy as np
import pytest

from engine.native_kit import ByteVocabulary
from rungway.engine.constraint import ConstraintError
from rungway.engine.grammar import Grammars
from rungway.engine.guides import FORCED_MAX, GrammarGuide
from rungway.engine.protocol import Constraint

LONG = 4 * FORCED_MAX
DEMANDS = {
    "regex": (Constraint("regex", f"a{{{LONG}}}"), "a" * LONG),
    "nested regex": (Constraint("regex", "((ab){64}){64}"), "ab" * 4096),
    "after a choice": (Constraint("regex", f"b|a{{{LONG}}}"), "a" * LONG),
    "beyond the fuel": (Constraint("regex", "b|a{30000}"), "a" * 30_000),
    "choice": (Constraint("choice", json.dumps(["x" * LONG])), "x" * LONG),
    "constant": (Constraint("json_schema", json.dumps({"const": "x" * LONG})), f'"{"x" * LONG}"'),
    "array": (
        Constraint("json_schema", '{"type": "array", "items": {"const": 7}, "minItems": 3000, "maxItems": 3000}'),
        json.dumps([7] * 3000),
    ),
    "grammar": (Constraint("grammar", f'start: "b" | "a"{{{LONG}}}'), "a" * LONG),
}


class Listening(ByteVocabulary):
    """Notes how much text it was asked to spell: what the library found to be forced."""

    def __init__(self) -> None:
        self.spelled: list[int] = []

    def spell(self, text: str) -> list[int]:
        self.spelled.append(len(text))
        return list(text.encode())


def allowed(guide: GrammarGuide) -> set[int]:
    return {int(token) for token in np.flatnonzero(np.unpackbits(guide.mask().view(np.uint8), bitorder="little"))}


@pytest.mark.parametrize("name", DEMANDS)
def test_a_long_forced_text_comes_whole_and_is_looked_ahead_at_most_once(name: str) -> None:
    constraint, text = DEMANDS[name]
    vocabulary = Listening()
    grammar = Grammars(vocabulary).compile(constraint)
    guide = grammar.guide()
    for byte in text.encode():
        assert byte in allowed(guide)
        assert guide.accept(byte)
    assert guide.complete or guide.fits
    assert sum(size > FORCED_MAX for size in vocabulary.spelled) <= 1
    before = len(vocabulary.spelled)
    assert text.encode()[0] in allowed(grammar.guide()), "all later sequences begin without it"
    assert len(vocabulary.spelled) == before or vocabulary.spelled[-1] <= FORCED_MAX


def test_short_forced_text_is_still_spelled_as_the_model_would() -> None:
    vocabulary = Listening()
    guide = Grammars(vocabulary).compile(Constraint("choice", json.dumps(["hello there"]))).guide()
    assert allowed(guide) == {ord("h")} and len("hello there") in vocabulary.spelled


def test_what_was_taken_back_is_not_said_again_without_looking_ahead() -> None:
    guide = Grammars(ByteVocabulary()).compile(DEMANDS["after a choice"][0]).guide()
    assert allowed(guide) == {ord("a"), ord("b")}
    assert guide.accept(ord("b"))
    guide.rollback(1)
    assert guide.accept(ord("a")) and guide.accept(ord("a"))
    assert allowed(guide) == {ord("a")}  # from here on it looks no further
    guide.rollback(2)
    assert allowed(guide) == {ord("a"), ord("b")}


@pytest.mark.parametrize(
    ("constraint", "why"),
    [
        (Constraint("grammar", '%llguidance {"no_forcing": false}\nstart: "a"'), "options"),
        (Constraint("grammar", ' {"grammars": [{"lark_grammar": "start: \\"a\\""}]}'), "Lark"),
        (Constraint("regex", "a\ud800"), "surrogate"),
        (Constraint("grammar", 'start: "\ud800"'), "surrogate"),
        (Constraint("choice", '["\ud800"]'), "surrogate"),
        (Constraint("tools", '{"tools": [{"name": "\ud800"}]}'), "surrogate"),
    ],
)
def test_what_would_undo_it_or_is_no_text_is_refused(constraint: Constraint, why: str) -> None:
    with pytest.raises(ConstraintError, match=why):
        Grammars(ByteVocabulary()).compile(constraint)
