"""Constraints in the engine: what is refused, what is enforced, and that nothing else changes. Numbers in brackets are
those of known faults of other engines that a test stands for."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.native_kit import GRAMMARS, VOCAB, ByteVocabulary
from rungway.engine.constraint import ConstraintError, Tool, Tools, check
from rungway.engine.grammar import Grammars
from rungway.engine.protocol import Constraint

END = 256
POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 99}, "on": {"type": "boolean"}},
    "required": ["x", "on"],
    "additionalProperties": False,
}


def schema(shape: Any) -> Constraint:
    return Constraint("json_schema", json.dumps(shape))


def tools(**changes: Any) -> Constraint:
    made = Tools(**{"tools": (Tool("locate", POINT), Tool("stop")), **changes})
    return Constraint("tools", msgspec.json.encode(made).decode())


def reads(constraint: Constraint, text: str) -> str:
    """no | open | fits | complete: how far `text` leads."""
    guide = GRAMMARS.compile(constraint).guide()
    if not all(guide.accept(byte) for byte in text.encode()):
        return "no"
    return "complete" if guide.complete else "fits" if guide.fits else "open"


# Keyword by keyword: (schema, an instance that violates it). Refused by name or enforced, never neither.
VIOLATIONS: list[tuple[dict[str, Any], Any]] = [
    ({"type": "integer"}, 1.5),
    ({"type": ["integer", "null"], "minimum": 2}, 1),
    ({"enum": [1, "a"]}, "b"),
    ({"const": {"a": 1}}, {"a": 2}),
    ({"type": "object", "properties": {"a": {"type": "string"}}, "required": ["b"]}, {"a": "x"}),
    ({"type": "object", "properties": {"a": False}}, {"a": 1}),
    ({"type": "object", "additionalProperties": {"type": "integer"}}, {"a": "x"}),
    ({"type": "object", "patternProperties": {"^x": {"type": "integer"}}}, {"xa": "s"}),
    ({"type": "object", "propertyNames": {"maxLength": 2}}, {"abc": 1}),
    ({"type": "object", "minProperties": 1}, {}),
    ({"type": "object", "maxProperties": 1}, {"a": 1, "b": 2}),
    ({"type": "object", "dependentRequired": {"a": ["b"]}}, {"a": 1}),
    ({"type": "object", "dependentSchemas": {"a": {"required": ["b"]}}}, {"a": 1}),
    ({"type": "object", "dependencies": {"a": ["b"]}}, {"a": 1}),
    ({"type": "object", "unevaluatedProperties": False}, {"a": 1}),
    ({"type": "array", "uniqueItems": True}, [1, 1]),
    ({"type": "array", "items": [{"type": "integer"}], "additionalItems": False}, [1, 2]),
    ({"type": "array", "prefixItems": [{"type": "integer"}], "items": False}, [1, 2]),
    ({"type": "array", "contains": {"const": 1}}, [2]),
    ({"type": "array", "contains": {"const": 1}, "minContains": 1}, [2]),
    ({"type": "array", "maxContains": 0}, [1]),
    ({"type": "array", "minItems": 1}, []),
    ({"type": "array", "maxItems": 1}, [1, 2]),
    ({"type": "array", "unevaluatedItems": False}, [1]),
    ({"type": "string", "minLength": 2}, "a"),
    ({"type": "string", "maxLength": 2}, "abc"),
    ({"type": "string", "pattern": "a"}, "b"),
    ({"type": "string", "pattern": "(?=b)a"}, "a"),
    ({"type": "string", "maxLength": 3, "pattern": "^a+$"}, "aaaa"),
    ({"type": "string", "format": "date"}, "2024-13-45"),
    ({"type": "string", "format": "email"}, "nobody"),
    ({"type": "string", "format": "regex"}, "("),
    ({"type": "string", "contentEncoding": "base64"}, "?"),
    ({"type": "string", "contentMediaType": "application/json"}, "nope"),
    ({"type": "number", "minimum": 3}, 2),
    ({"type": "number", "exclusiveMinimum": 3}, 3),
    ({"type": "number", "minimum": 3, "exclusiveMinimum": True}, 3),
    ({"type": "number", "maximum": 3}, 4),
    ({"type": "number", "multipleOf": 3}, 4),
    ({"type": "integer", "divisibleBy": 3}, 4),
    ({"not": {"const": 3}}, 3),
    ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "x"),
    ({"allOf": [{"minimum": 3}, {"maximum": 5}], "type": "integer"}, 7),
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, 3),
    ({"oneOf": [{"type": "string"}, {"type": "null"}]}, 3),
    ({"if": {"const": 1}, "then": {"type": "string"}, "else": True}, 1),
    ({"$ref": "#/$defs/a", "$defs": {"a": {"type": "integer"}}, "minimum": 3}, 1),
    ({"$ref": "https://example.org/schema"}, 1),
    ({"$dynamicRef": "#a"}, 1),
    ({"type": "string", "maxlength": 2}, "abc"),
    ({"extends": {"type": "string"}}, 3),
    ({"type": "object", "x-guidance": {"lenient": True}, "not": {}}, {}),
    ({"properties": {"deep": {"anyOf": [{"items": {"uniqueItems": True}}]}}}, {"deep": [1, 1]}),
]


@pytest.mark.parametrize(("shape", "instance"), VIOLATIONS, ids=lambda value: json.dumps(value)[:50])
def test_a_keyword_is_enforced_or_refused_never_ignored(shape: dict[str, Any], instance: Any) -> None:
    try:
        enforced = reads(schema(shape), json.dumps(instance)) in ("no", "open")
    except ConstraintError:
        enforced = True
    assert enforced


def test_a_refusal_names_the_keyword() -> None:
    for shape, keyword in (
        ({"items": {"uniqueItems": True}}, "uniqueItems"),
        ({"format": "regex"}, "regex"),
        ({"x-guidance": {"lenient": True}}, "x-guidance"),
    ):
        with pytest.raises(ConstraintError, match=keyword):
            check(schema({"type": "object", "properties": {"a": shape}}))


def test_properties_may_bear_the_names_of_keywords() -> None:
    shape = {"type": "object", "properties": {"uniqueItems": {"type": "integer"}}, "required": ["uniqueItems"]}
    assert reads(schema(shape), '{"uniqueItems": 3}') == "complete"


MALFORMED = [
    Constraint("json_schema", ""),
    Constraint("json_schema", "[]"),
    Constraint("json_schema", "[" * 100_000),
    Constraint("json_schema", '{"type": "nonsense"}'),
    Constraint("json_schema", '{"type": "object", "required": ["a"], "properties": {"a": false}}'),
    Constraint("json_schema", '{"items": ' * 200 + "{}" + "}" * 200),
    Constraint("json_schema", '{"type": "string", "pattern": "("}'),
    Constraint("json_schema", json.dumps({"description": "x" * 140_000})),
    Constraint("regex", "("),
    Constraint("regex", "(a)\\1"),
    Constraint("regex", "\\"),
    Constraint("regex", "a\\\\\\"),
    Constraint("choice", "{}"),
    Constraint("choice", "[]"),
    Constraint("choice", '["", "a"]'),
    Constraint("grammar", ""),
    Constraint("grammar", "start: missing"),
    Constraint("grammar", "start: x\nx: x"),
    Constraint("json_schema", '{"$ref": "#"}'),
    Constraint("grammar", "start: <|im_end|>"),
    Constraint("grammar", "start: <[999999]>"),
    Constraint("grammar", 'start: %json {"not": {}}'),
    Constraint("tools", "{}"),
    Constraint("tools", '{"tools": []}'),
    Constraint("tools", '{"tools": [{"name": "a", "parameters": {"type": "string"}}]}'),
]


@pytest.mark.parametrize("constraint", MALFORMED, ids=lambda constraint: f"{constraint.kind}:{constraint.text[:30]}")
def test_a_malformed_constraint_ends_alone(constraint: Constraint) -> None:
    """[35] It is refused, and the next one compiles."""
    grammars = Grammars(ByteVocabulary())
    with pytest.raises(ConstraintError):
        grammars.compile(constraint)
    assert grammars.compile(schema(POINT)).guide().mask().any()


@settings(deadline=None)
@given(st.sampled_from(["json_schema", "regex", "choice", "grammar", "tools"]), st.text(max_size=40))
def test_any_text_compiles_or_is_refused(kind: Any, text: str) -> None:
    try:
        GRAMMARS.compile(Constraint(kind, text)).guide().mask()
    except ConstraintError:
        pass


def test_the_cache_is_bounded_and_used() -> None:
    grammars = Grammars(ByteVocabulary(), cached_max=2)
    made = [grammars.compile(Constraint("regex", "a" * size)) for size in (1, 2, 3)]
    assert grammars.cached(Constraint("regex", "a")) is None
    assert grammars.compile(Constraint("regex", "aaa")) is made[2]


def test_what_the_kinds_take() -> None:
    assert reads(Constraint("json_object"), '{"a": [1, "x", null]}') == "complete"
    assert reads(Constraint("json_object"), "[1]") == "no"
    assert reads(Constraint("json_object"), '{"a":  1}') == "no", (
        "one form of white space, so that it cannot go on for ever"
    )
    assert reads(Constraint("regex", "^a[0-9]{2}$"), "a12") == "complete"
    assert reads(Constraint("regex", "a[0-9]{2}"), "ba12") == "no"
    assert reads(Constraint("regex", "a/\\\\"), "a/\\") == "complete"
    strange = 'ü"\\\n/€\x00\x1f\x7f\x80\u2028🙂'
    choice = Constraint("choice", json.dumps(["yes", "yesterday", strange]))
    assert [reads(choice, text) for text in ("yes", "yesterday", strange, "no")] == [
        "fits",
        "complete",
        "complete",
        "no",
    ]
    assert reads(Constraint("grammar", 'start: "a" b\nb: /[0-9]+/'), "a12") == "fits"


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def test_the_tool_call_grammar() -> None:
    good, other = call("locate", '{"x": 3, "on": true}'), call("stop", "{}")
    two = good + "\n" + other
    assert [reads(tools(must=True), text) for text in (good, two, "hi" + good, "hi", call("jump", "{}"))] == [
        "fits",
        "fits",
        "no",
        "no",
        "no",
    ]
    assert [reads(tools(must=True, most=1), text) for text in (good, two)] == ["complete", "no"]
    assert [reads(tools(), text) for text in ("1 < 2 and <b>", "well.\n" + two, good + "!", call("locate", "{}"))] == [
        "fits",
        "fits",
        "no",
        "no",
    ]
    answer = tools(answer={"type": "integer"})
    assert [reads(answer, text) for text in ("12", good, "hi")] == ["fits", "fits", "no"]


def test_a_tools_schema_may_refer_to_itself() -> None:
    node = {"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}}}
    node |= {"required": ["next"], "additionalProperties": False}
    constraint = tools(tools=(Tool("link", {"$defs": {"node": node}, "$ref": "#/$defs/node"}),), must=True, most=1)
    assert reads(constraint, call("link", '{"next": {"next": null}}')) == "complete"


def test_a_guide_refuses_without_a_change_and_takes_back() -> None:
    guide = GRAMMARS.compile(schema({"type": "integer"})).guide()
    before = guide.mask().copy()
    assert not guide.accept(ord("x")) and (guide.mask() == before).all()
    assert guide.accept(ord("1")) and guide.accept(END) and guide.complete
    guide.rollback(2)
    assert (guide.mask() == before).all() and not guide.complete
    assert len(before) == -(-VOCAB // 32)


def test_guides_of_one_grammar_do_not_touch_each_other() -> None:
    grammar = GRAMMARS.compile(schema({"enum": [12, 13]}))
    first, second = grammar.guide(), grammar.guide()
    assert first.accept(ord("1")) and first.accept(ord("2")) and first.complete
    assert not second.complete and second.accept(ord("1"))
