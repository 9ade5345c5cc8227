"""Formats at the gateway: what is served, what is refused by name, what the caches and the ladder may not do."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from typing import Any
from urllib.parse import quote

import jsonschema
import pytest

from rungway.contracts import GatewaySpec
from rungway.engine.protocol import Constraint
from rungway.errors import RequestError
from rungway.gateway import constrain, serving
from rungway.gateway.constrain import Checks, Demand
from rungway.types import Offer, OfferKind
from unit.gateway_rig import Rig, frames, platform, running, said, until, version
from unit.test_gateway_tools import BASE as TOOLED
from unit.test_gateway_tools import STOP, USER, call

BASE: dict[str, Any] = {"model": "small", "messages": [USER], "max_tokens": 200}
POINT = {"type": "object", "properties": {"x": {"type": "integer"}, "y": {"enum": ["a"]}}, "required": ["x", "y"]}


def formatted(schema: Any, **more: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, **more}}}


async def text_of(rig: Rig, change: dict[str, Any], path: str = "/v1/chat/completions") -> str:
    """The text of a whole answer, after a look that a stream says the same."""
    ask = BASE | change
    if path == "/v1/completions":
        ask = {name: value for name, value in ask.items() if name != "messages"} | {"prompt": "hi"}
    answer = await rig.post(ask, path)
    assert answer.status_code == 200, answer.text
    choice = answer.json()["choices"][0]
    text: str = choice["message"]["content"] if "message" in choice else choice["text"]
    assert said(frames((await rig.post(ask | {"stream": True}, path)).text)) == text
    assert choice["finish_reason"] == "stop"
    return text


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_every_form_is_served(tmp_path: Path, path: str) -> None:
    async with running(tmp_path) as rig:
        jsonschema.validate(json.loads(await text_of(rig, formatted(POINT, strict=True, description="d"), path)), POINT)
        assert json.loads(await text_of(rig, {"response_format": {"type": "json_object"}}, path)) == {}
        for form in ({"json": POINT}, {"json": json.dumps(POINT)}):
            jsonschema.validate(json.loads(await text_of(rig, {"structured_outputs": form}, path)), POINT)
        assert await text_of(rig, {"structured_outputs": {"choice": ["yes"]}}, path) == "yes"
        assert await text_of(rig, {"structured_outputs": {"regex": "a{3}"}}, path) == "aaa"
        assert await text_of(rig, {"structured_outputs": {"grammar": 'start: "x" "y"'}}, path) == "xy"
        assert await text_of(rig, {"structured_outputs": {"json_object": True}}, path) == "{}"
        assert all(ask.constrained for ask in rig.controller.asks)
        free = await rig.post(BASE | {"response_format": {"type": "text"}, "max_tokens": 3})
        assert free.json()["choices"][0]["finish_reason"] == "length" and not rig.controller.asks[-1].constrained


async def test_the_order_of_members_is_the_schemas(tmp_path: Path) -> None:
    async with running(tmp_path) as rig:
        backwards = {**POINT, "properties": dict(reversed(POINT["properties"].items()))}
        assert list(json.loads(await text_of(rig, formatted(POINT)))) == ["x", "y"]
        assert list(json.loads(await text_of(rig, formatted(backwards)))) == ["y", "x"]


async def test_a_refused_schema_is_told_in_words_that_help(tmp_path: Path) -> None:
    """No places in a grammar that the client did not write, no options of the library underneath."""
    async with running(tmp_path) as rig:
        overlapping = {"oneOf": [{"type": "integer"}, {"type": "number"}]}
        error = (await rig.post(BASE | formatted(overlapping))).json()["error"]
        assert error["message"] == "'response_format' cannot be enforced: oneOf constraints are not supported"


BAD: list[tuple[dict[str, Any], str, str, str]] = [
    (formatted({"uniqueItems": True}), "response_format", "invalid_schema", "uniqueItems"),
    (formatted({"type": "nonsense"}), "response_format", "invalid_schema", "nonsense"),
    (formatted([1]), "response_format", "invalid_schema", "object"),
    (formatted({"$ref": "http://example.org/x"}), "response_format", "invalid_schema", "example.org"),
    (formatted({"description": "x" * 70_000}), "response_format", "invalid_schema", "65536"),
    (formatted(None), "response_format.json_schema", "invalid_request", "schema"),
    ({"response_format": {"type": "yaml"}}, "response_format.type", "invalid_request", "json_object"),
    (
        {"response_format": {"type": "json_object", "schema": {}}},
        "response_format.schema",
        "invalid_request",
        "unknown",
    ),
    ({"structured_outputs": {"regex": "("}}, "structured_outputs", "invalid_schema", "regex"),
    ({"structured_outputs": {"regex": "a(?=b)"}}, "structured_outputs", "invalid_schema", "look"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs", "invalid_schema", "choices"),
    ({"structured_outputs": {"grammar": "start: nothing"}}, "structured_outputs", "invalid_schema", "nothing"),
    ({"structured_outputs": {"grammar": "start: <|im_end|>"}}, "structured_outputs", "invalid_schema", "special"),
    ({"structured_outputs": {}}, "structured_outputs", "invalid_request", "exactly one"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs", "invalid_request", "exactly one"),
    ({"structured_outputs": {"json_object": False}}, "structured_outputs.json_object", "invalid_request", "true"),
    (
        {"structured_outputs": {"structural_tag": "x"}},
        "structured_outputs.structural_tag",
        "invalid_request",
        "unknown",
    ),
    (
        {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
        "structured_outputs",
        "invalid_request",
        "both",
    ),
    (formatted(POINT) | {"ignore_eos": True}, "ignore_eos", "invalid_request", "response_format"),
    *[
        ({name: {}}, name, "invalid_request", "unknown")
        for name in (
            "guided_json",
            "guided_regex",
            "guided_choice",
            "guided_grammar",
            "json_schema",
            "grammar",
            "regex",
            "ebnf",
        )
    ],
    ({"tools": []}, "tools", "invalid_request", "1 to"),
    ({"tools": [STOP, STOP]}, "tools[1].function.name", "invalid_request", "stop"),
    ({"tools": [{"type": "retrieval"}]}, "tools[0]", "invalid_request", "function"),
    (
        {"tools": [{"type": "function", "function": {"name": "a b"}}]},
        "tools[0].function.name",
        "invalid_request",
        "letters",
    ),
    (
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"not": {}}}}}}]},
        "tools",
        "invalid_schema",
        "not",
    ),
    (
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": [1]}}]},
        "tools.f",
        "invalid_schema",
        "object",
    ),
    ({"tool_choice": "auto"}, "tool_choice", "invalid_request", "tools"),
    ({"tools": [STOP], "tool_choice": "any"}, "tool_choice", "invalid_request", "auto"),
    (
        {"tools": [STOP], "tool_choice": {"type": "function", "function": {"name": "go"}}},
        "tool_choice",
        "invalid_request",
        "not in",
    ),
    ({"tools": [STOP], "structured_outputs": {"regex": "a"}}, "structured_outputs", "invalid_request", "tools"),
    ({"parallel_tool_calls": True}, "parallel_tool_calls", "invalid_request", "tools"),
]

MESSAGES: list[tuple[list[Any], str]] = [
    ([{"role": "assistant", "content": None}], "messages[0].content"),
    ([{"role": "assistant", "content": None, "tool_calls": []}], "messages[0].tool_calls"),
    (
        [{"role": "user", "content": "x", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{}"}}]}],
        "messages[0].tool_calls",
    ),
    (
        [{"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{"}}]}],
        "messages[0].tool_calls[0].function.arguments",
    ),
    (
        [{"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "[]"}}]}],
        "messages[0].tool_calls[0].function.arguments",
    ),
    (
        [{"role": "assistant", "tool_calls": [{"id": "1", "type": "x", "function": {"name": "f", "arguments": "{}"}}]}],
        "messages[0].tool_calls[0].type",
    ),
    ([{"role": "tool", "content": "x"}], "messages[0].tool_call_id"),
    ([USER, {"role": "tool", "content": "x", "tool_call_id": "never"}], "messages[1].tool_call_id"),
    ([{"role": "user", "content": "x", "tool_call_id": "a"}], "messages[0].tool_call_id"),
    ([{"role": "function", "name": "f", "content": "x"}], "messages[0].role"),
]


async def test_what_cannot_be_served_is_named_and_costs_nothing(tmp_path: Path) -> None:
    """[35] [37] [38] Never silently ignored, never a 500, and the next request is served."""
    async with running(tmp_path) as rig:
        for change, param, code, word in BAD:
            error = await rig.post(BASE | change)
            assert error.status_code == 400, (change, error.text)
            told = error.json()["error"]
            assert (told["param"], told["code"]) == (param, code) and word in told["message"], (change, told)
            assert len(told["message"]) < 500
        for messages, param in MESSAGES:
            error = await rig.post(BASE | {"messages": messages})
            assert (error.status_code, error.json()["error"]["param"]) == (400, param), error.text
        assert rig.controller.asks == []
        await text_of(rig, formatted(POINT))


async def test_tools_with_a_format_for_answers_without_calls(tmp_path: Path) -> None:
    async with running(tmp_path) as rig:
        ask = TOOLED | formatted({"const": [1, 2]})
        assert json.loads((await rig.post(ask)).json()["choices"][0]["message"]["content"]) == [1, 2]
        made = (await rig.post(ask | {"tool_choice": "required"})).json()["choices"][0]
        assert made["finish_reason"] == "tool_calls"


async def test_a_truncated_answer_is_one_of_length_and_no_failure(tmp_path: Path) -> None:
    async with running(tmp_path) as rig:
        answer = (await rig.post(BASE | formatted(POINT) | {"max_tokens": 4})).json()["choices"][0]
        assert (answer["finish_reason"], answer["message"]["content"]) == ("length", '{"x"')
        await rig.settled()
        assert not [name for name, _ in rig.controller.counts if name.startswith("structured")]


async def test_failures_are_counted_and_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "conforms", lambda constraint, text: False)
    async with running(tmp_path) as rig:
        ask = BASE | formatted(POINT) | {"temperature": 0}
        first = await rig.post(ask, x_rungway_cache="exact")
        again = await rig.post(ask | {"stream": True}, x_rungway_cache="exact")
        assert (first.status_code, first.headers["x-rungway-cache"], again.headers["x-rungway-cache"]) == (
            200,
            "miss",
            "miss",
        )
        assert [ask.cached for ask in rig.controller.asks] == [False, False]
        await until(lambda: rig.controller.counts.get(("structured_output_failures_total", ("acme",))) == 2)


async def test_the_exact_cache_keeps_constraints_apart(tmp_path: Path) -> None:
    async with running(tmp_path) as rig:
        rig.controller.decide = lambda ask, attempt, avoid: (
            rig.controller.shaped(
                ask, attempt, "", Offer(kind=OfferKind.CACHE, tier="small", version="", prompt_tokens=0, max_tokens=0)
            )
            if ask.cached
            else rig.controller.grant_on(ask, attempt, avoid)
        )
        plain = BASE | {"temperature": 0}
        seen: list[str] = []
        for change in (
            {},
            formatted(POINT),
            formatted({**POINT, "required": ["x"]}),
            {"structured_outputs": {"regex": "b"}},
        ):
            assert (await rig.post(plain | change, x_rungway_cache="exact")).headers["x-rungway-cache"] == "miss"
            hit = await rig.post(plain | change, x_rungway_cache="exact")
            assert hit.headers["x-rungway-cache"] == "hit-exact"
            seen.append(hit.json()["choices"][0]["message"]["content"])
        assert len(set(seen)) == 4


async def test_no_fixed_text_stands_for_a_constrained_answer(tmp_path: Path) -> None:
    """Even where a controller grants it."""
    async with running(tmp_path) as rig:
        rig.controller.decide = lambda ask, attempt, avoid: rig.controller.shaped(
            ask, attempt, "", Offer(kind=OfferKind.TEMPLATE, tier="small", version="", prompt_tokens=0, max_tokens=0)
        )
        assert (await rig.chat()).status_code == 200
        assert (await rig.post(BASE | formatted(POINT))).status_code == 500


async def test_a_degraded_answer_keeps_its_constraint(tmp_path: Path) -> None:
    async with running(tmp_path) as rig:
        rig.controller.decide = lambda ask, attempt, avoid: rig.controller.grant_on(
            ask, attempt, avoid, tier="small", rung=4, degraded=("small_tier",)
        )
        answer = await rig.post(BASE | formatted(POINT) | {"model": "large"})
        assert answer.headers["x-rungway-degraded"] == "small_tier"
        jsonschema.validate(json.loads(answer.json()["choices"][0]["message"]["content"]), POINT)


async def test_what_only_the_engine_finds_is_a_400_and_not_tried_again(tmp_path: Path) -> None:
    """[36] Text that the constraint forbids, or a constraint that passed here and not there."""
    async with running(tmp_path) as rig:
        for prompt in ("[[emit=nonsense]]", "[[calls=20]]"):
            ask = TOOLED | {
                "messages": [{"role": "user", "content": prompt}],
                "tool_choice": "required",
                "parallel_tool_calls": False,
            }
            error = await rig.post(ask)
            assert error.status_code == 400
            assert (error.json()["error"]["code"], error.json()["error"]["param"]) == ("invalid_schema", "tools")
        finishes = await rig.settled(2)
        assert [(finish.outcome, finish.attempts) for finish in finishes] == [("error", 1)] * 2
        assert rig.controller.retries == []


async def test_a_constrained_stream_survives_its_replica(tmp_path: Path) -> None:
    replicas = {"small-1": version("small", "v1"), "small-2": version("small", "v1"), "large-1": version("large", "v1")}
    async with running(tmp_path, platform(), replicas) as rig:
        text = call("weather", json.dumps({"city": "x" * 200}))
        ask = TOOLED | {
            "messages": [{"role": "user", "content": f"[[tpot_ms=5]] [[emit={quote(text)}]]"}],
            "stream": True,
        }
        stream = asyncio.create_task(rig.post(ask))
        await until(lambda: any(flight.progress.tokens > 40 for flight in rig.gateway.flights.values()))
        (flight,) = rig.gateway.flights.values()
        assert flight.grant is not None
        await rig.replicas[flight.grant.replica_id].stop()
        events = frames((await stream).text)
        pieces = [
            piece
            for event in events[:-1]
            for choice in event["choices"]
            for piece in choice["delta"].get("tool_calls", [])
        ]
        assert "".join(piece["function"]["arguments"] for piece in pieces) == json.dumps({"city": "x" * 200})
        assert sum("name" in piece["function"] for piece in pieces) == 1
        assert len(rig.controller.retries) == 1


async def test_checks_are_bounded_and_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    checks, calls = Checks(), list[Constraint]()
    monkeypatch.setattr(constrain, "check", calls.append)
    monkeypatch.setattr(constrain, "CHECKED_MAX", 2)
    demands = [Demand(Constraint("regex", "a" * size), "x") for size in (1, 2, 3)]
    for demand in (*demands, demands[2], demands[0]):
        await checks.check(demand, GatewaySpec())
    assert [len(constraint.text) for constraint in calls] == [1, 2, 3, 1]
    checks.close()


async def test_a_check_that_takes_too_long_is_a_400(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    monkeypatch.setattr(constrain, "check", lambda constraint: gate.wait(30))
    checks = Checks()
    with pytest.raises(RequestError, match="longer than"):
        await checks.check(Demand(Constraint("regex", "a"), "x"), GatewaySpec(constraint_check_s=0.05))
    gate.set()
    checks.close()
