"""The fake engine under constraints: what it says fits, is the same every time, and is bytes of the same protocol."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import quote

import jsonschema
import msgspec
import pytest

from engine.test_constrained import SCHEMAS
from rungway.engine.constraint import DEAD_END, INVALID, Tool, Tools
from rungway.engine.fake_core import FakeCore
from rungway.engine.fake_stream import FakeProfile
from rungway.engine.protocol import Constraint, Delta, Sampling, Work

WEATHER = Tool(
    "weather", {"type": "object", "properties": {"city": {"type": "string", "minLength": 3}}, "required": ["city"]}
)
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "'


def say(constraint: Constraint | None, prompt: str = "hello", **more: Any) -> list[Delta]:
    """All deltas of one request."""
    outer = {name: more.pop(name) for name in ("sequences", "resume") if name in more}
    core = FakeCore(FakeProfile(ttft_ms=0, tpot_ms=1, prefill_ms_per_1k=0), max_num_seqs=8, max_context=4096)
    sampling = Sampling(**{"max_tokens": 2000, "constraint": constraint, **more})
    core.submit(Work(request_id="r", attempt=1, prompt_ids=[], prompt_text=prompt, sampling=sampling, **outer))
    deltas: list[Delta] = []
    now_ns = 0
    while (wake_ns := core.wake_ns()) is not None:
        now_ns = max(now_ns + 1_000_000, wake_ns)
        deltas += core.step(now_ns)
    assert core.check() == []
    return deltas


def text(deltas: list[Delta], index: int = 0) -> str:
    return "".join(delta.text for delta in deltas if delta.index == index)


def tools(**changes: Any) -> Constraint:
    made = Tools(**{"tools": (WEATHER, Tool("stop")), **changes})
    return Constraint("tools", msgspec.json.encode(made).decode())


@pytest.mark.parametrize(
    "schema", [*SCHEMAS, {"type": "integer", "multipleOf": 2, "minimum": 3}], ids=lambda one: json.dumps(one)[:40]
)
def test_it_answers_with_an_instance(schema: dict[str, Any]) -> None:
    constraint = Constraint("json_schema", json.dumps(schema))
    deltas = say(constraint, sequences=2)
    for index in range(2):
        jsonschema.validate(json.loads(text(deltas, index)), schema)
    assert {delta.finish for delta in deltas if delta.finish} == {"stop"}
    assert text(deltas) == text(say(constraint))
    usage = deltas[-1].usage
    assert usage is not None and usage.output_tokens == 2 * len(text(deltas).encode())


NODE = {
    "type": "object",
    "properties": {"v": {"type": "integer"}, "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
    "required": ["v", "next"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    "schema",
    [
        {"$defs": {"node": NODE}, "$ref": "#/$defs/node"},
        {"$defs": {"node": NODE}, "type": "array", "items": {"$ref": "#/$defs/node"}, "minItems": 2},
        *[{"type": "string", "format": name} for name in ("email", "uri", "ipv6", "duration", "date-time", "hostname")],
        {"type": "string", "pattern": "^(foo|bar)+baz$"},
        {"type": "string", "pattern": "^[^x]{3,}x$"},
    ],
    ids=lambda one: json.dumps(one)[-40:],
)
def test_it_finds_the_end_where_there_are_ways_round(schema: dict[str, Any]) -> None:
    """Recursion and repetition: a choice that is always made in the same way would be made for ever."""
    deltas = say(Constraint("json_schema", json.dumps(schema)))
    assert deltas[-1].finish == "stop", deltas[-1].error
    jsonschema.validate(json.loads(text(deltas)), schema)


def test_other_constraints() -> None:
    assert json.loads(text(say(Constraint("json_object")))) == {}
    assert text(say(Constraint("choice", '["no", "yes"]'))) in ("no", "yes")
    assert text(say(Constraint("regex", "[a-z]+@x"))).endswith("@x")
    assert text(say(Constraint("grammar", 'start: "a" /[0-9]{3}/'))).startswith("a")


def test_tools_are_called_where_they_must_be_or_the_prompt_says_so() -> None:
    assert text(say(tools(must=True))).startswith(CALL)
    assert text(say(tools(), "x [[calls=2]]")).count(CALL) == 2
    plain = say(tools(), "hello", max_tokens=6)
    assert text(plain) == text(say(None, "hello", max_tokens=6)), "an answer in words is one that fits"
    assert json.loads(text(say(tools(answer={"const": [1]})))) == [1]
    assert (say(tools(must=True, most=1), "x [[calls=2]]")[-1].error or "").startswith(INVALID)


def test_directed_text_has_to_fit() -> None:
    answer = '{"x": 3}'
    good = say(Constraint("json_object"), f"[[emit={quote(answer)}]]")
    assert text(good) == answer and good[-1].finish == "stop"
    assert say(Constraint("json_object"), "[[emit=hello]]")[-1].error == DEAD_END


def test_a_bad_constraint_is_refused() -> None:
    (end,) = say(Constraint("json_schema", '{"not": {}}'))
    assert end.finish == "error" and (end.error or "").startswith(INVALID) and end.usage is not None


def test_length_and_resumption() -> None:
    whole = say(tools(must=True))
    ids = [token for delta in whole for token in delta.token_ids]
    cut = say(tools(must=True), max_tokens=5)
    assert cut[-1].finish == "length" and text(cut) == text(whole)[:5]
    rest = say(tools(must=True), resume=[ids[:9]])
    assert text(whole)[:9] + text(rest) == text(whole)
