"""Tool calls and constrained answers at the gateway. Numbers in brackets are those of known faults of other servers that a
test stands for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from rungway.engine.protocol import Constraint, Delta, TokenLogprob
from rungway.gateway.answer import Facts
from rungway.gateway.conform import conforms
from rungway.gateway.tool_calls import OPEN, Argued, Began, Call, Event, Reader, Said, call_id, finish_of, read_calls
from rungway.gateway.tool_frames import CallFrames
from unit.gateway_rig import Rig, frames, running

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "How it is.", "parameters": CITY}}
STOP = {"type": "function", "function": {"name": "stop"}}
USER = {"role": "user", "content": "hi"}
BASE: dict[str, Any] = {"model": "small", "messages": [USER], "max_tokens": 400, "tools": [WEATHER, STOP]}


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


PARIS = call("weather", '{"city": "Paris"}')
STRANGE = call("weather", '{"city": "a}\\"]{<tool_call> \\\\", "n": [{"x": {}}, "ü"]}')

# Recorded streams: text and what it holds.
RECORDED: list[tuple[str, str, list[tuple[str, str]]]] = [
    ("just words, 1 < 2", "just words, 1 < 2", []),
    ("", "", []),
    ("  \n", "  \n", []),
    (PARIS, "", [("weather", '{"city": "Paris"}')]),
    ("Let me see.\n" + PARIS, "Let me see.", [("weather", '{"city": "Paris"}')]),
    (PARIS + "\n" + call("stop", "{}"), "", [("weather", '{"city": "Paris"}'), ("stop", "{}")]),
    (STRANGE + "\n", "", [("weather", '{"city": "a}\\"]{<tool_call> \\\\", "n": [{"x": {}}, "ü"]}')]),
    ("<tool_cal", "<tool_cal", []),
    ("a <tool_call>no call</tool_call> b", "a<tool_call>no call</tool_call> b", []),
    ('<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', "", [("f", '{"a": 1}')]),
    ('<tool_call>{"name":"f","arguments":{"a":', "", [("f", '{"a":')]),
    ('<tool_call>\n{"name": "f", "arg', '<tool_call>\n{"name": "f", "arg', []),
    (
        '<tool_call>{"name": "f", "arguments": 3}</tool_call>',
        '<tool_call>{"name": "f", "arguments": 3}</tool_call>',
        [],
    ),
    (PARIS + " and more", " and more", [("weather", '{"city": "Paris"}')]),
]


def gathered(pieces: list[str]) -> tuple[str, list[Call]]:
    reader = Reader()
    events: list[Event] = [event for piece in pieces for event in reader.push(piece)] + reader.end()
    content, calls = "", list[Call]()
    for event in events:
        if isinstance(event, Said):
            content += event.text
        elif isinstance(event, Began):
            assert event.call == len(calls), "calls are numbered in order [42]"
            calls.append(Call(event.name, ""))
        else:
            assert isinstance(event, Argued) and event.call == len(calls) - 1
            calls[-1] = Call(calls[-1].name, calls[-1].arguments + event.text)
    return content, calls


@pytest.mark.parametrize(("text", "content", "calls"), RECORDED, ids=[text[:30] for text, _, _ in RECORDED])
def test_calls_do_not_depend_on_how_the_text_was_cut(text: str, content: str, calls: list[tuple[str, str]]) -> None:
    """[41] Every split in two, and one character at a time."""
    expected = (content, [Call(*one) for one in calls])
    assert read_calls(text)[:2] == expected
    for at in range(len(text) + 1):
        assert gathered([text[:at], text[at:]]) == expected
    assert gathered(list(text)) == expected


def test_text_is_held_back_only_while_it_may_belong_to_a_call() -> None:
    reader = Reader()
    assert [reader.push(piece) for piece in ("ab", " <", "b", " <tool", "_", "x")] == [
        [Said("ab")],
        [],
        [Said(" <b")],
        [],
        [],
        [Said(" <tool_x")],
    ]
    assert reader.push(OPEN + '{"name": "f", "arguments": {') == [Began(0, "f"), Argued(0, "{")]
    assert reader.push('"a') == [Argued(0, '"a')]


def test_finish_reasons() -> None:
    ends = [("stop", 0, False), ("stop", 2, False), ("length", 2, False), ("stop", 1, True), ("length", 1, True)]
    assert [finish_of(*end) for end in ends] == ["stop", "tool_calls", "length", "stop", "length"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_that_a_stop_string_cut_is_not_one_to_run(tmp_path: Path, stream: bool) -> None:
    async with running(tmp_path) as rig:
        ask = BASE | {"tool_choice": "required", "stop": ["ity"], "stream": stream}
        answer = await rig.post(ask)
        choice = frames(answer.text)[-2]["choices"][0] if stream else answer.json()["choices"][0]
        assert choice["finish_reason"] == "stop"
        assert '"tool_calls":[{' in answer.text and '"city' not in answer.text


def test_logprobs_of_held_back_text_are_not_lost() -> None:
    made = CallFrames(Facts("req_1"), 1)
    one = TokenLogprob("x", b"x", -0.5, [])
    pieces = ["<tool", '_call>{"name": "f", "arguments": {', "}}</tool_call>"]
    deltas = [Delta("req_1", 1, 0, text, [1], [one], "stop" if at == 2 else None) for at, text in enumerate(pieces)]
    events = frames("".join(made.frame(delta) for delta in deltas))
    told = [choice["logprobs"]["content"] for event in events for choice in event["choices"] if choice["logprobs"]]
    assert [len(content) for content in told] == [1, 1, 1]
    assert events[-1]["choices"][0] == {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "tool_calls"}


def test_conforming() -> None:
    schema = Constraint("json_schema", json.dumps({"type": "array", "items": {"type": "integer"}, "uniqueItems": True}))
    assert (
        conforms(schema, "[1, 2]")
        and not conforms(schema, "[1, 1]")
        and not conforms(schema, "[1")
        and not conforms(schema, '["x"]')
    )
    assert conforms(Constraint("json_object"), "{}") and not conforms(Constraint("json_object"), "[]")
    assert conforms(Constraint("choice", '["a"]'), "a") and not conforms(Constraint("choice", '["a"]'), "b")
    slow = Constraint("json_schema", json.dumps({"type": "string", "pattern": "^(a+)+$"}))
    assert conforms(slow, '"' + "a" * 60 + '!"'), "the client's expressions are not run here"
    far = Constraint("json_schema", '{"$ref": "http://127.0.0.1:9/schema"}')
    assert not conforms(far, "1"), "nothing is fetched"
    tools = Constraint("tools", json.dumps({"tools": [{"name": "f", "parameters": CITY}], "must": True}))
    good = call("f", '{"city": "x"}')
    assert [conforms(tools, text) for text in (good, "hi", "hi" + good, call("g", "{}"), call("f", "{}"))] == [
        True,
        *[False] * 4,
    ]


# --- through the gateway and the fake engine


def merged(text: str) -> dict[str, Any]:
    """The choice 0 that a client puts together from a stream."""
    events = frames(text)
    assert events.pop() == "[DONE]"
    content, calls, finish = None, list[dict[str, Any]](), None
    for event in events:
        for choice in event["choices"]:
            delta = choice["delta"]
            finish = choice["finish_reason"] or finish
            if delta.get("content") is not None:
                content = (content or "") + delta["content"]
            for piece in delta.get("tool_calls", []):
                if piece["index"] == len(calls):
                    assert piece["function"]["name"] and piece["function"]["arguments"] == "", "the name comes first"
                    calls.append({"id": piece["id"], "type": piece["type"], "function": dict(piece["function"])})
                else:
                    assert piece["index"] == len(calls) - 1 and set(piece) == {"index", "function"}
                    calls[-1]["function"]["arguments"] += piece["function"]["arguments"]
    message = {"content": content} | ({"tool_calls": calls} if calls else {})
    return {"message": message, "finish_reason": finish}


async def both(rig: Rig, **body: Any) -> dict[str, Any]:
    """The choice of a whole answer, after a look that a stream says the same."""
    whole = await rig.post(BASE | body)
    assert whole.status_code == 200, whole.text
    choice: dict[str, Any] = whole.json()["choices"][0]
    streamed = merged((await rig.post(BASE | body | {"stream": True})).text)
    message = {name: value for name, value in choice["message"].items() if name in ("content", "tool_calls")}
    for one in (*message.get("tool_calls", []), *streamed["message"].get("tool_calls", [])):
        assert one.pop("id").startswith("call_")
    assert streamed["message"] == message or (streamed["message"], message["content"]) == ({"content": None}, "")
    assert streamed["finish_reason"] == choice["finish_reason"]
    return choice


async def test_required_named_none_and_auto(tmp_path: Path) -> None:
    async with running(tmp_path) as rig:
        made = await both(rig, tool_choice="required")
        assert made["finish_reason"] == "tool_calls" and made["message"]["content"] is None
        assert made["message"]["tool_calls"] == [
            {"type": "function", "function": {"name": "weather", "arguments": '{"city": ""}'}}
        ]
        named = await both(rig, tool_choice={"type": "function", "function": {"name": "stop"}})
        assert [one["function"]["name"] for one in named["message"]["tool_calls"]] == ["stop"]
        for free in ({"tool_choice": "none"}, {"tool_choice": "auto", "max_tokens": 7}, {"max_tokens": 7}):
            said = await both(rig, **free)
            assert "tool_calls" not in said["message"] and said["message"]["content"]
        assert [ask.constrained for ask in rig.controller.asks] == [True] * 4 + [False] * 2 + [True] * 4


async def test_a_call_is_not_read_where_none_was_offered(tmp_path: Path) -> None:
    async with running(tmp_path) as rig:
        ask = {"messages": [{"role": "user", "content": f"[[emit={quote(PARIS)}]]"}]}
        assert (await both(rig, **ask, tool_choice="none"))["message"]["content"] == PARIS
        assert (await both(rig, **ask))["message"]["tool_calls"][0]["function"]["name"] == "weather"


async def test_parallel_calls(tmp_path: Path) -> None:
    """[42] Each has its own number and id."""
    async with running(tmp_path) as rig:
        ask = {"messages": [{"role": "user", "content": "[[calls=3]]"}]}
        made = await both(rig, **ask)
        assert [one["function"]["name"] for one in made["message"]["tool_calls"]] == ["weather"] * 3
        whole = (await rig.post(BASE | ask)).json()["choices"][0]["message"]["tool_calls"]
        assert len({one["id"] for one in whole}) == 3
        assert (await rig.post(BASE | ask | {"parallel_tool_calls": False})).status_code == 400
        both_ = (await rig.post(BASE | ask | {"n": 2})).json()
        assert len({one["id"] for choice in both_["choices"] for one in choice["message"]["tool_calls"]}) == 6
        assert both_["usage"]["completion_tokens"] == sum(end.usage.output_tokens for end in rig.controller.ends[-1:])


async def test_text_before_a_call(tmp_path: Path) -> None:
    async with running(tmp_path) as rig:
        text = "I look it up.\n" + PARIS
        made = await both(rig, messages=[{"role": "user", "content": f"[[emit={quote(text)}]]"}])
        assert made["message"]["content"] == "I look it up." and made["finish_reason"] == "tool_calls"
        cut = await both(rig, messages=[{"role": "user", "content": f"[[emit={quote(text)}]]"}], max_tokens=70)
        assert (
            cut["finish_reason"] == "length"
            and cut["message"]["tool_calls"][0]["function"]["arguments"] == '{"city": "P'
        )


async def test_a_conversation_with_calls_and_results(tmp_path: Path) -> None:
    async with running(tmp_path) as rig:
        first = (await rig.post(BASE | {"tool_choice": "required"})).json()["choices"][0]["message"]
        result = {"role": "tool", "tool_call_id": first["tool_calls"][0]["id"], "content": "rain"}
        answer = await rig.post(BASE | {"messages": [USER, first, result], "max_tokens": 5})
        assert answer.status_code == 200 and answer.json()["choices"][0]["finish_reason"] == "length"
        assert rig.controller.asks[1].prompt_tokens["small"] > rig.controller.asks[0].prompt_tokens["small"]


async def test_a_repeat_has_the_same_ids(tmp_path: Path) -> None:
    async with running(tmp_path) as rig:
        ask = BASE | {"tool_choice": "required"}
        first = (await rig.post(ask, idempotency_key="k")).json()
        again = merged((await rig.post(ask | {"stream": True}, idempotency_key="k")).text)
        assert again["message"]["tool_calls"] == first["choices"][0]["message"]["tool_calls"]
        assert again["message"]["tool_calls"][0]["id"] == call_id(first["rungway"]["request_id"], 0, 0)
