"""What the gateway takes and refuses before any engine works, and what its whole answers look like."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rungway.contracts import GatewaySpec
from rungway.engine.tokenizer import WordTokenizer
from rungway.gateway import call
from rungway.types import Action, Risk
from unit.gateway_rig import (
    BETA_KEY,
    EXPIRED_KEY,
    KEY,
    REVOKED_KEY,
    WAIT_S,
    api_key,
    frames,
    platform,
    running,
    said,
    tenant,
    until,
)

USER = [{"role": "user", "content": "hi [[tokens=3]]"}]
UNKNOWN_KEY = "sk-unknown-SECRET-fedcba98"


def leaks(secret: str, text: str) -> bool:
    return any(secret[i : i + 12] in text for i in range(len(secret) - 11))


@pytest.mark.parametrize(
    ("header", "code"),
    [
        (None, "invalid_api_key"),
        (f"Bearer {UNKNOWN_KEY}", "invalid_api_key"),
        (UNKNOWN_KEY, "invalid_api_key"),
        ("Bearer ", "invalid_api_key"),
        ("Basic " + KEY, "invalid_api_key"),
        ("Bearer " + "x" * 5000, "invalid_api_key"),
        (f"Bearer {EXPIRED_KEY}", "key_expired"),
        (f"Bearer {REVOKED_KEY}", "key_revoked"),
    ],
)
async def test_a_bad_key_gets_a_401_that_does_not_repeat_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, header: str | None, code: str
) -> None:
    caplog.set_level(logging.DEBUG)
    async with running(tmp_path) as rig:
        del rig.http.headers["authorization"]
        given = {"authorization": header} if header is not None else {}
        answers = [
            await rig.http.post("/v1/chat/completions", json={"model": "small", "messages": USER}, headers=given),
            await rig.http.post(
                "/v1/chat/completions", json={"model": "small", "messages": USER, "stream": True}, headers=given
            ),
            await rig.http.get("/v1/models", headers=given),
            await rig.http.get("/admin/usage", headers=given),
        ]
        for answer in answers:
            assert answer.status_code == 401
            assert answer.headers["content-type"] == "application/json"
            assert answer.json()["error"]["code"] == code
            assert answer.json()["error"]["type"] == "authentication_error"
            seen = answer.text + str(answer.headers)
            assert header is None or not leaks(header.removeprefix("Bearer "), seen) or len(header) < 12
        await until(lambda: ("refused_total", ("unknown", code)) in rig.controller.counts)
        assert rig.controller.asks == []
        own = "\n".join(r.getMessage() for r in caplog.records if r.name.startswith("rungway"))
        assert header is None or len(header) < 20 or not leaks(header.removeprefix("Bearer "), own)


BAD_CHAT: list[tuple[dict[str, Any], str, int]] = [
    ({"n": 0}, "n", 400),
    ({"n": 9}, "n", 400),
    ({"n": "2"}, "n", 400),
    ({"best_of": 1, "n": 2}, "best_of", 400),
    ({"max_tokens": 0}, "max_tokens", 400),
    ({"max_tokens": -1}, "max_tokens", 400),
    ({"max_tokens": 1.5}, "max_tokens", 400),
    ({"max_completion_tokens": 0}, "max_completion_tokens", 400),
    ({"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens", 400),
    ({"temperature": 5}, "temperature", 400),
    ({"temperature": -0.1}, "temperature", 400),
    ({"top_p": 1.5}, "top_p", 400),
    ({"top_p": 0}, "top_p", 400),
    ({"top_k": -2}, "top_k", 400),
    ({"min_p": 2}, "min_p", 400),
    ({"presence_penalty": 3}, "presence_penalty", 400),
    ({"frequency_penalty": -3}, "frequency_penalty", 400),
    ({"repetition_penalty": 0}, "repetition_penalty", 400),
    ({"seed": 2**70}, "seed", 400),
    ({"logit_bias": {"x": 1}}, "logit_bias", 400),
    ({"logit_bias": {"1": 101}}, "logit_bias", 400),
    ({"logit_bias": {"99999999": 1}}, "logit_bias", 400),
    ({"logit_bias": {str(i): 1 for i in range(301)}}, "logit_bias", 400),
    ({"stop": ["a"] * 100}, "stop", 400),
    ({"stop": ""}, "stop", 400),
    ({"stop": [1]}, "stop[0]", 400),
    ({"logprobs": 3}, "logprobs", 400),
    ({"top_logprobs": 3}, "top_logprobs", 400),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", 400),
    ({"messages": []}, "messages", 400),
    ({"messages": "hi"}, "messages", 400),
    ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role", 400),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id", 400),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content", 400),
    ({"messages": [*USER, {"role": "user"}]}, "messages[1].content", 400),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages[0].content[0].type",
        400,
    ),
    ({"messages": [{"role": "user", "content": "x", "zzz": 1}]}, "messages[0].zzz", 400),
    ({"model": "nope"}, "model", 404),
    ({"model": 'a"b\n' + "x" * 10_000}, "model", 404),
    ({"model": "secret"}, "model", 403),
    ({"model": None}, "model", 400),
    ({"tools": [{"type": "function"}]}, "tools[0]", 400),
    ({"tool_choice": "required"}, "tool_choice", 400),
    ({"functions": []}, "functions", 400),
    ({"response_format": {"type": "yaml"}}, "response_format.type", 400),
    ({"audio": {}}, "audio", 400),
    ({"modalities": ["text"]}, "modalities", 400),
    ({"parallel_tool_calls": False}, "parallel_tool_calls", 400),
    ({"guided_json": {}}, "guided_json", 400),
    ({"messages": [{"role": "user", "content": "word " * 600}]}, "messages", 400),
]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_bad_field_is_named_in_a_real_http_error_and_costs_no_engine_work(tmp_path: Path, stream: bool) -> None:
    async with running(tmp_path) as rig:
        for change, param, status in BAD_CHAT:
            body = {"model": "small", "messages": USER, "stream": stream} | change
            answer = await rig.post(body)
            assert (answer.status_code, answer.json()["error"]["param"]) == (status, param), (change, answer.text)
            assert answer.headers["content-type"] == "application/json"
            assert len(answer.text) < 1000
        answer = await rig.post({"messages": USER, "stream": stream})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "model")
        assert rig.controller.asks == []
        assert (await rig.chat(stream=stream)).status_code == 200


async def test_what_only_makes_sense_with_or_without_a_stream(tmp_path: Path) -> None:
    async with running(tmp_path) as rig:
        for body, param in [
            ({"stream": "yes"}, "stream"),
            ({"stream": 1}, "stream"),
            ({"stream": True, "best_of": 2}, "best_of"),
            ({"stream": False, "stream_options": {"include_usage": True}}, "stream_options"),
            ({"stream_options": {}}, "stream_options"),
            ({"stream": True, "stream_options": {"include_usage": "yes"}}, "stream_options.include_usage"),
            ({"stream": True, "stream_options": {"what": True}}, "stream_options.what"),
        ]:
            answer = await rig.post({"model": "small", "messages": USER} | body)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
        assert (await rig.chat(stream_options=None)).status_code == 200


@pytest.mark.parametrize(
    ("body", "kind", "status", "code"),
    [
        (b"{", "application/json", 400, "invalid_request"),
        (b"", "application/json", 400, "invalid_request"),
        (b"  ", "application/json", 400, "invalid_request"),
        (b"[]", "application/json", 400, "invalid_request"),
        (b'{"model":"\xff"}', "application/json", 400, "invalid_request"),
        (
            b'{"model":"small","messages":[{"role":"user","content":"\\ud800"}]}',
            "application/json",
            400,
            "invalid_request",
        ),
        (b'{"model":"small","temperature":NaN,"messages":[]}', "application/json", 400, "invalid_request"),
        (b'{"model":"small","metadata":' + b"[" * 90_000, "application/json", 400, "invalid_request"),
        (b"hello", "text/plain", 415, "unsupported_media_type"),
        (b"x" * 300_000, "application/json", 413, "body_too_large"),
    ],
)
async def test_a_body_that_is_not_json(tmp_path: Path, body: bytes, kind: str, status: int, code: str) -> None:
    async with running(tmp_path) as rig:
        answer = await rig.http.post("/v1/chat/completions", content=body, headers={"content-type": kind})
        assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
        assert answer.headers["content-type"] == "application/json"
        assert answer.headers["x-request-id"].startswith("req_")


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b'{"model": "small" "messages": []}', "byte 18"),
        (b'{"model": "small"', "truncated"),
        (b'{"model": "small", "messages": []}}', "trailing characters"),
        (b'{"user": "a\\ud800b"}', "half of a surrogate pair"),
    ],
)
async def test_what_is_wrong_with_json_is_said(tmp_path: Path, body: bytes, why: str) -> None:
    async with running(tmp_path) as rig:
        kind = {"content-type": "application/json"}
        answer = await rig.http.post("/v1/chat/completions", content=body, headers=kind)
        assert why in answer.json()["error"]["message"]


async def test_a_compressed_body_is_refused_as_such(tmp_path: Path) -> None:
    async with running(tmp_path) as rig:
        kind = {"content-type": "application/json", "content-encoding": "gzip"}
        answer = await rig.http.post("/v1/chat/completions", content=b"\x1f\x8b", headers=kind)
        assert (answer.status_code, answer.json()["error"]["code"]) == (415, "unsupported_media_type")


async def test_a_hopelessly_long_chat_is_refused_before_it_is_rendered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every turn has a token, so their number alone may be too large. One that is rendered is not trimmed as well."""
    rendered: list[int] = []
    whole = WordTokenizer.render_chat

    def counting(self: WordTokenizer, messages: list[dict[str, Any]], tools: Any = None) -> str:
        rendered.append(len(messages))
        return whole(self, messages, tools)

    monkeypatch.setattr(WordTokenizer, "render_chat", counting)
    async with running(tmp_path) as rig:
        context = max(rig.gateway.known().context_max.values())
        turn = {"role": "user", "content": "a b"}
        for turns, most in ((context + 1, 0), (context - 1, len(rig.gateway.known().tiers))):
            error = await rig.post({"model": "small", "messages": [turn] * turns})
            assert error.json()["error"]["code"] == "context_length_exceeded"
            assert len(rendered) <= most


async def test_a_chunked_body_is_counted_while_it_comes(tmp_path: Path) -> None:
    async with running(tmp_path) as rig:
        given = 0

        async def chunks() -> Any:
            nonlocal given
            for _ in range(1000):
                given += 1
                yield b"x" * 10_000

        # The in-process transport reads everything before it calls the app, so drive the app by hand.
        source = chunks()

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": await anext(source), "more_body": True}

        sent: list[dict[str, Any]] = []

        async def send(message: Any) -> None:
            sent.append(message)

        headers = [(b"authorization", f"Bearer {KEY}".encode()), (b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": headers}
        await rig.app(scope, receive, send)
        assert sent[0]["status"] == 413
        assert given <= 21


async def test_a_body_that_never_comes_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call, "BODY_WAIT_S", 0.05)
    async with running(tmp_path) as rig:
        sent: list[dict[str, Any]] = []

        async def receive() -> dict[str, Any]:
            await asyncio.sleep(10 * WAIT_S)
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message)

        headers = [(b"authorization", f"Bearer {KEY}".encode()), (b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": headers}
        await asyncio.wait_for(rig.app(scope, receive, send), WAIT_S)
        assert sent[0]["status"] == 400


BAD_COMPLETIONS: list[tuple[dict[str, Any], str]] = [
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": 5}, "prompt"),
    ({"suffix": "x"}, "suffix"),
    ({"logprobs": 6}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"messages": USER}, "messages"),
]


async def test_completions_take_one_prompt_as_text_or_ids(tmp_path: Path) -> None:
    async with running(tmp_path) as rig:
        for change, param in BAD_COMPLETIONS:
            answer = await rig.post({"model": "small", "prompt": "hi"} | change, "/v1/completions")
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), change
        for prompt, length in [("a b c", 3), (["a b"], 2), ([5, 6, 7, 8], 4), ([[5, 6]], 2)]:
            answer = await rig.post({"model": "small", "prompt": prompt, "max_tokens": 3}, "/v1/completions")
            shape = answer.json()
            assert answer.status_code == 200, answer.text
            assert shape["object"] == "text_completion"
            assert shape["id"].startswith("cmpl-")
            assert shape["usage"]["prompt_tokens"] == length
            assert shape["usage"]["completion_tokens"] == 3
            assert shape["choices"][0]["finish_reason"] == "length"


async def test_a_whole_chat_answer(tmp_path: Path) -> None:
    async with running(tmp_path) as rig:
        answer = await rig.chat(
            "tell me [[tokens=5]]", n=2, logprobs=True, top_logprobs=2, seed=3, user="u", store=True
        )
        shape = answer.json()
        assert shape["object"] == "chat.completion"
        assert shape["model"] == "small"
        assert [choice["index"] for choice in shape["choices"]] == [0, 1]
        for choice in shape["choices"]:
            assert choice["message"]["role"] == "assistant"
            assert choice["finish_reason"] == "stop"
            assert len(choice["logprobs"]["content"]) == 5
            assert "".join(token["token"] for token in choice["logprobs"]["content"]) == choice["message"]["content"]
            assert all(len(token["top_logprobs"]) == 2 for token in choice["logprobs"]["content"])
        assert shape["usage"]["completion_tokens"] == 10
        assert shape["usage"]["total_tokens"] == shape["usage"]["prompt_tokens"] + 10
        [ask] = rig.controller.asks
        assert (ask.tenant, ask.key_id, ask.n, ask.stream) == ("acme", "acme-1", 2, False)
        assert ask.prompt_tokens == {"small": 4}
        assert len(ask.features) > 0
        [finish] = await rig.settled()
        assert (finish.outcome, finish.delivered, finish.attempts) == ("completed", {1: 10}, 1)
        await until(lambda: rig.controller.ends)
        assert rig.controller.ends[0].billing.tenant == "acme"


async def test_best_of_answers_with_the_sequences_of_the_highest_mean_logprob(tmp_path: Path) -> None:
    async with running(tmp_path) as rig:
        every = (await rig.chat("pick [[tokens=4]]", n=4, logprobs=True)).json()["choices"]

        def mean(choice: Any) -> float:
            return sum(token["logprob"] for token in choice["logprobs"]["content"]) / 4

        best = sorted(every, key=mean, reverse=True)[:2]
        picked = (await rig.chat("pick [[tokens=4]]", n=2, best_of=4, logprobs=True)).json()
        assert [c["message"]["content"] for c in picked["choices"]] == [c["message"]["content"] for c in best]
        assert [c["index"] for c in picked["choices"]] == [0, 1]
        assert picked["usage"]["completion_tokens"] == 16


async def test_every_answer_names_the_decision_in_headers_and_body(tmp_path: Path) -> None:
    async with running(tmp_path) as rig:
        rig.controller.decide = lambda ask, attempt, avoid: rig.controller.grant_on(
            ask, attempt, tier="small", rung=4, degraded=("best_of_1", "small_tier")
        )
        answer = await rig.post({"model": "large", "messages": USER}, x_request_id="mine", x_tenant_id="beta")
        headers, shape = answer.headers, answer.json()["rungway"]
        assert headers["x-request-id"].startswith("req_")
        assert headers["x-rungway-model-requested"] == shape["model_requested"] == "large"
        assert headers["x-rungway-model-served"] == shape["model_served"] == "small/v1"
        assert headers["x-rungway-rung"] == str(shape["rung"]) == "4"
        assert headers["x-rungway-degraded"] == shape["degraded"] == "best_of_1,small_tier"
        assert headers["x-rungway-reason"] == shape["reason"] == "best_offer"
        assert headers["x-rungway-cache"] == shape["cache"] == "off"
        assert headers["x-request-id"] == shape["request_id"]
        assert headers["x-ratelimit-limit-requests"] == "60"
        assert headers["x-ratelimit-reset-requests"] == "2s"
        streamed = await rig.post({"model": "large", "messages": USER, "stream": True})
        first, second = frames(streamed.text)[:2]
        assert first["rungway"]["model_served"] == streamed.headers["x-rungway-model-served"] == "small/v1"
        assert "rungway" not in second
        assert rig.controller.asks[0].tenant == "acme"


async def test_candidates_are_the_asked_tiers_and_the_lower_ones_of_the_contract(tmp_path: Path) -> None:
    async with running(tmp_path) as rig:
        for model, tiers, candidates in [
            ("large", ("large",), {"small", "large"}),
            ("auto", ("small", "large"), {"small", "large"}),
            ("small", ("small",), {"small"}),
        ]:
            assert (await rig.post({"model": model, "messages": USER})).status_code == 200
            ask = rig.controller.asks[-1]
            assert ask.tiers == tiers
            assert set(ask.prompt_tokens) == candidates


async def test_high_risk_needs_a_model_that_its_contract_lets_answer(tmp_path: Path) -> None:
    """A contradiction of model and contract is the caller's mistake, not a state of the platform that waiting mends."""
    terms = platform(tenants=(tenant("acme", api_key("acme-1", KEY), risk_high_tier_min="large"),))
    async with running(tmp_path, terms) as rig:
        for path, said in [("/v1/chat/completions", {"messages": USER}), ("/v1/completions", {"prompt": "hi"})]:
            refused = await rig.post({"model": "small"} | said, path, x_rungway_risk="high")
            error = refused.json()["error"]
            assert (refused.status_code, error["code"], error["param"]) == (403, "model_not_allowed", "model")
            assert "large" in error["message"] and "retry-after" not in refused.headers
            assert not rig.controller.asks
        for model, headers in [
            ("small", {}),
            ("small", {"x_rungway_risk": "normal"}),
            ("auto", {"x_rungway_risk": "high"}),
        ]:
            assert (await rig.post({"model": model, "messages": USER}, **headers)).status_code == 200


async def test_headers_lower_the_class_and_name_risk_action_session_and_deadline(tmp_path: Path) -> None:
    async with running(tmp_path) as rig:
        body = {"model": "small", "messages": USER}
        answer = await rig.post(
            body,
            x_rungway_class="batch",
            x_rungway_risk="high",
            x_rungway_action="idempotent_write",
            idempotency_key="k1",
            x_rungway_session="s-1",
            x_rungway_deadline_ms="5000",
        )
        assert answer.status_code == 200
        ask = rig.controller.asks[-1]
        assert (ask.tenant_class, ask.risk, ask.action) == ("batch", Risk.HIGH, Action.IDEMPOTENT_WRITE)
        assert ask.session == "s-1"
        assert ask.deadline_ms is not None and 0 < ask.deadline_ms <= 5000
        for name, value in [
            ("x-rungway-class", "interactive"),
            ("x-rungway-class", "urgent"),
            ("x-rungway-risk", "low"),
            ("x-rungway-action", "delete"),
            ("x-rungway-deadline-ms", "0"),
            ("x-rungway-deadline-ms", "-5"),
            ("x-rungway-deadline-ms", "nan"),
            ("x-rungway-session", ""),
            ("x-rungway-session", "a b"),
            ("x-rungway-session", "x" * 129),
            ("x-rungway-cache", "semantic"),
            ("x-rungway-cache", "on"),
            ("idempotency-key", "x" * 129),
        ]:
            refused = await rig.http.post("/v1/chat/completions", json=body, headers={name: value})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, name), (name, value)
        refused = await rig.post(body, x_rungway_action="idempotent_write")
        assert refused.json()["error"]["param"] == "idempotency-key"


async def test_a_refusal_has_the_controllers_status_limits_and_honest_retry_after(tmp_path: Path) -> None:
    async with running(tmp_path) as rig:
        for code, status, retry in [
            ("requests_per_minute", 429, 7),
            ("budget_exhausted", 429, None),
            ("budget_exhausted", 429, 4000),
            ("tenant_suspended", 429, None),
            ("tenant_suspended", 429, 2),
            ("overloaded", 503, 2),
            ("no_capacity", 503, 0),
        ]:
            rig.controller.decide = lambda ask, attempt, avoid, code=code, retry=retry: rig.controller.refusal(
                ask, code, retry_after_s=retry, rung=3
            )
            for stream in (False, True):
                answer = await rig.chat(stream=stream)
                assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
                assert answer.headers["content-type"] == "application/json"
                assert answer.headers.get("retry-after") == (None if retry is None else str(max(1, retry)))
                assert answer.headers["x-rungway-rung"] == "3"
                assert answer.headers["x-ratelimit-remaining-requests"] == "59"
                assert answer.headers["x-rungway-model-requested"] == "small"
                final = code == "budget_exhausted" or (code, retry) == ("tenant_suspended", None)
                assert answer.headers.get("x-should-retry") == ("false" if final else None), "a pause ends by itself"
        # The controller wrote these rows itself.
        assert rig.controller.finishes == []
        assert rig.controller.withdrawn == []


async def test_a_template_grant_is_an_ordinary_completion_without_usage(tmp_path: Path) -> None:
    async with running(tmp_path) as rig:
        rig.controller.decide = lambda ask, attempt, avoid: msgspec.structs.replace(
            rig.controller.grant_on(ask, attempt, kind="template", version="", rung=6, degraded=("template",)),
            replica_id="",
        )
        answer = (await rig.chat()).json()
        assert answer["rungway"]["model_served"] == "template"
        assert answer["choices"][0]["message"]["content"] == platform().ladder.template
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert answer["usage"]["completion_tokens"] == 0
        events = frames((await rig.chat(stream=True)).text)
        assert said(events) == platform().ladder.template
        assert events[-1] == "[DONE]"
        finishes = await rig.settled(2)
        assert [(f.outcome, f.attempts) for f in finishes] == [("template", 0)] * 2


async def test_context_trim_drops_the_oldest_turns_but_never_system_or_the_last(tmp_path: Path) -> None:
    async with running(tmp_path) as rig:
        messages = [{"role": "system", "content": "be brief"}]
        for i in range(6):
            messages += [
                {"role": "user", "content": f"question {i} with some more words"},
                {"role": "assistant", "content": f"answer {i} with some more words"},
            ]
        messages.append({"role": "user", "content": "last one [[tokens=2]]"})
        rig.controller.decide = lambda ask, attempt, avoid: rig.controller.grant_on(
            ask, attempt, context_limit=30, rung=3, degraded=("context_trim",)
        )
        answer = await rig.post({"model": "small", "messages": messages})
        ask = rig.controller.asks[-1]
        assert ask.prompt_tokens["small"] == 91
        assert ask.trimmed_tokens["small"] == answer.json()["usage"]["prompt_tokens"] == 21


async def test_the_flights_of_a_gateway_are_bounded(tmp_path: Path) -> None:
    configuration = platform(gateway=GatewaySpec(flights_max=0))
    async with running(tmp_path, configuration) as rig:
        answer = await rig.chat()
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "overloaded")
        assert answer.headers["retry-after"] == "1"


async def test_junk_adds_no_label_values(tmp_path: Path) -> None:
    async with running(tmp_path) as rig:
        for i in range(30):
            await rig.post({"model": f'junk-{i}\n"', "messages": USER, "user": f"u{i}"})
            await rig.http.get(f"/x/{i}.php")
            await rig.http.get("/v1/models", headers={"authorization": f"Bearer junk-{i}"})
        await until(lambda: rig.controller.counts.get(("refused_total", ("unknown", "invalid_api_key"))) == 30)
        assert set(rig.controller.counts) == {
            ("refused_total", ("acme", "model_not_found")),
            ("refused_total", ("unknown", "not_found")),
            ("refused_total", ("unknown", "invalid_api_key")),
        }


async def test_a_tenant_sees_only_its_models(tmp_path: Path) -> None:
    async with running(tmp_path) as rig:
        beta = {"authorization": f"Bearer {BETA_KEY}"}
        answer = await rig.http.get("/v1/models", headers=beta)
        assert [model["id"] for model in answer.json()["data"]] == ["small"]
        assert (await rig.http.get("/v1/models/small", headers=beta)).json()["id"] == "small"
        assert (await rig.http.get("/v1/models/large", headers=beta)).status_code == 404
