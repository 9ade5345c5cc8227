"""What a request may say and what comes back: usage frames, text that is not cut inside characters, errors before the
stream. Each test is a fault that users of such gateways met."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import quote

import httpx
import pytest

from support.case_platform import CasePlatform, text_of, together

pytestmark = pytest.mark.serve

HARD_TEXT = "ďábel 日本語 👩‍👩‍👧 🔥\r\n\u2028end"


# --- usage in streams


@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}, "absent"])
def test_nobody_who_did_not_ask_gets_usage_in_a_stream(cases: CasePlatform, options: Any) -> None:
    more = {} if options == "absent" else {"stream_options": options}
    for model in ("small", "auto"):
        got = cases.stream("plain", model=model, **more)
        assert all(frame["choices"] for frame in got)
        assert not any(frame.get("usage") for frame in got)


def test_usage_comes_once_last_and_is_the_engines_count(cases: CasePlatform) -> None:
    got = cases.stream("plain", stream_options={"include_usage": True})
    assert [bool(frame["choices"]) for frame in got] == [True] * (len(got) - 1) + [False]
    assert not any(frame.get("usage") for frame in got[:-1])
    usage = got[-1]["usage"]
    assert usage["prompt_tokens"] + usage["completion_tokens"] == usage["total_tokens"]
    request_id = got[0]["rungway"]["request_id"]
    row = cases.row(request_id)
    (attempt,) = cases.truth(request_id)
    assert usage["completion_tokens"] == attempt["output_tokens"] == row["output_tokens"] == 8
    whole = cases.chat("plain").json()["usage"]
    assert whole["completion_tokens"] == 8 and whole["prompt_tokens"] == usage["prompt_tokens"]


def test_a_cached_answer_streams_usage_only_on_request_too(cases: CasePlatform) -> None:
    same: dict[str, Any] = {"temperature": 0, "headers": {"x-rungway-cache": "exact"}}
    cases.stream("plain", "usage of a cached answer", **same)
    plain = cases.stream("plain", "usage of a cached answer", **same)
    asked = cases.stream("plain", "usage of a cached answer", stream_options={"include_usage": True}, **same)
    assert plain[0]["rungway"]["cache"] == "hit-exact"
    assert all(frame["choices"] and not frame.get("usage") for frame in plain)
    assert [bool(frame["choices"]) for frame in asked].count(False) == 1 and asked[-1]["usage"][
        "completion_tokens"
    ] == 8


def test_stream_options_without_a_stream_are_refused(cases: CasePlatform) -> None:
    answer = cases.chat("plain", stream_options={"include_usage": True})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "stream_options"


# --- characters


def emitting(text: str) -> str:
    return f"[[emit={quote(text)}]] please"


def test_characters_survive_an_engine_that_emits_single_bytes(cases: CasePlatform) -> None:
    whole = cases.chat("plain", emitting(HARD_TEXT), max_tokens=200).json()
    assert whole["choices"][0]["message"]["content"] == HARD_TEXT
    first, second = together([lambda: cases.stream("plain", emitting(HARD_TEXT), max_tokens=200)] * 2)
    assert text_of(first) == text_of(second) == HARD_TEXT
    assert whole["usage"]["completion_tokens"] == len(HARD_TEXT.encode())


def test_every_frame_is_one_line_of_plain_json(cases: CasePlatform) -> None:
    with cases.streaming("plain", emitting(HARD_TEXT), max_tokens=200) as (answer, _):
        raw = answer.read()
    assert raw.isascii(), "U+2028 and the like must be escaped: clients split lines there"
    for event in raw.split(b"\n\n")[:-1]:
        assert event.startswith(b"data: ") and b"\n" not in event and b"\r" not in event
        if event != b"data: [DONE]":
            json.loads(event[6:])


def test_an_answer_cut_inside_a_character_ends_the_same_in_both_modes(cases: CasePlatform) -> None:
    bound = len("🔥".encode()) - 2
    whole = cases.chat("plain", emitting("🔥"), max_tokens=bound).json()
    got = cases.stream("plain", emitting("🔥"), max_tokens=bound, stream_options={"include_usage": True})
    text = whole["choices"][0]["message"]["content"]
    assert text_of(got) == text and text in ("", "\ufffd")
    assert whole["choices"][0]["finish_reason"] == "length"
    assert [c["finish_reason"] for f in got for c in f["choices"] if c["finish_reason"]] == ["length"]
    assert whole["usage"]["completion_tokens"] == got[-1]["usage"]["completion_tokens"] == bound


# --- errors that are known before the first token

HELLO = [{"role": "user", "content": "hi"}]
WRONG: dict[str, tuple[dict[str, Any], int, str | None]] = {
    "n 0": ({"n": 0}, 400, "n"),
    "max_tokens 0": ({"max_tokens": 0}, 400, "max_tokens"),
    "max_tokens below 0": ({"max_tokens": -1}, 400, "max_tokens"),
    "temperature 5": ({"temperature": 5}, 400, "temperature"),
    "top_p 1.5": ({"top_p": 1.5}, 400, "top_p"),
    "no messages": ({"messages": []}, 400, "messages"),
    "messages as text": ({"messages": "hi"}, 400, "messages"),
    "unknown model": ({"model": "nope"}, 404, "model"),
    "no model": ({"model": None}, 400, "model"),
    "100 stops": ({"stop": [str(i) for i in range(100)]}, 400, "stop"),
    "unknown role": ({"messages": [{"role": "wizard", "content": "hi"}]}, 400, "messages[0].role"),
    "no content": ({"messages": [{"role": "user", "content": None}]}, 400, "messages[0].content"),
    "tools": ({"tools": []}, 400, "tools"),
    "tool_choice": ({"tool_choice": "required"}, 400, "tool_choice"),
    "format": ({"response_format": {"type": "yaml"}}, 400, "response_format.type"),
    "schema": (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}}},
        400,
        "response_format",
    ),
}


def post(cases: CasePlatform, body: Any, *, raw: bytes | None = None, kind: str = "application/json") -> httpx.Response:
    """As a tenant of which nothing else is asked, so that its books show what these requests cost."""
    content = raw if raw is not None else json.dumps(body).encode()
    return cases.client("wrong-asks").post(
        "/v1/chat/completions", content=content, headers={"content-type": kind}, timeout=60.0
    )


def assert_plain_error(answer: httpx.Response, status: int, param: str | None) -> None:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"].startswith("application/json")
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_request_is_a_plain_error_streamed_or_not(cases: CasePlatform, name: str) -> None:
    change, status, param = WRONG[name]
    body = {"model": "small", "max_tokens": 4, "messages": HELLO} | change
    body = {field: value for field, value in body.items() if value is not None}
    whole, streamed = post(cases, body), post(cases, body | {"stream": True})
    assert_plain_error(streamed, status, param)
    assert (whole.status_code, whole.json()) == (streamed.status_code, streamed.json())


@pytest.mark.parametrize(
    ("raw", "kind", "status"),
    [
        (b"{", "application/json", 400),
        (b"", "application/json", 400),
        (b'{"model": "small", "stream": "yes", "messages": []}', "application/json", 400),
        (b'{"model": "small", "stream": true, "messages": []}', "text/plain", 415),
        (b'{"model": "small", "messages": "' + b"x" * 1_100_000 + b'"}', "application/json", 413),
    ],
    ids=["broken", "empty", "stream as text", "text/plain", "too large"],
)
def test_a_body_that_cannot_be_read_is_refused_and_costs_nothing(
    cases: CasePlatform, raw: bytes, kind: str, status: int
) -> None:
    answer = post(cases, None, raw=raw, kind=kind)
    assert answer.status_code == status, answer.text
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    assert cases.usage("wrong-asks")["requests"] == 0
    assert cases.client("wrong-asks").get("/v1/models").status_code == 200, "the next request is served"
