"""Several prompts in one completion request: what one by one would give, and one end for all."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rungway.contracts import GatewaySpec
from rungway.outcomes import Code
from rungway.types import Ask, Grant, Refusal
from unit.gateway_rig import KEY, Rig, listening, platform, running, until

PATH = "/v1/completions"
SLOW = "[[tokens=400]] [[tpot_ms=100]]"  # 40 s: only a cancellation ends it


async def complete(rig: Rig, prompt: Any, **body: Any) -> Any:
    return await rig.post({"model": "small", "max_tokens": 4, "prompt": prompt, **body}, PATH)


@pytest.mark.parametrize(
    ("prompts", "body"),
    [
        (["one two", "three", "one two"], {}),
        ([[7, 8, 9], [10]], {"n": 2, "user": "somebody", "metadata": {"a": [1]}}),
        (["a b", "c"], {"n": 2, "best_of": 3, "seed": 1 << 40, "stop": ["q"]}),
        (["a b", "c d e"], {"echo": True, "logprobs": 2, "max_tokens": 0}),
        (["a \u2028 \U0001f600", "c"], {"prompt_logprobs": 1, "logprobs": 1}),
        (["a", "b"], {"structured_outputs": {"regex": "[0-9]{2}"}, "stream": False}),
    ],
)
async def test_the_answer_is_what_one_by_one_gives(tmp_path: Path, prompts: list[Any], body: dict[str, Any]) -> None:
    async with running(tmp_path) as rig:
        singles = [(await complete(rig, prompt, **body)).json() for prompt in prompts]
        before = len(rig.controller.asks)
        answer = await complete(rig, prompts, **body)
        assert answer.status_code == 200, answer.text
        shape = answer.json()
        asks = rig.controller.asks[before:]
        expected = [choice for single in singles for choice in single["choices"]]
        assert shape["choices"] == [choice | {"index": index} for index, choice in enumerate(expected)]
        for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
            assert shape["usage"][name] == sum(single["usage"][name] for single in singles)
        assert (shape["object"], shape["model"]) == ("text_completion", "small")
        own = shape["rungway"].pop("prompts")
        assert [one["request_id"] for one in own] == [ask.request_id for ask in asks]
        assert len({ask.request_id for ask in rig.controller.asks} | {shape["rungway"]["request_id"]}) == 2 * before + 1
        assert answer.headers["x-request-id"] == shape["rungway"]["request_id"]
        assert answer.headers["x-rungway-model-served"] == "small/v1" == own[0]["model_served"]
        finishes = await rig.settled(2 * before)
        assert all(finish.outcome in ("completed", "length") for finish in finishes)


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"prompt": ["a"] * 5}, "prompt"),
        ({"prompt": ["a", [1]]}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": ["a", ""]}, "prompt[1]"),
        ({"prompt": [[1], []]}, "prompt[1]"),
        ({"stream": True}, "stream"),
        ({"stop": ["x" * 60_000]}, "prompt"),
        ({"temperature": 3}, "temperature"),
        ({"prompt_logprobs": 99}, "prompt_logprobs"),
    ],
)
async def test_what_they_cannot_have_is_named(tmp_path: Path, change: dict[str, Any], param: str) -> None:
    spec = GatewaySpec(completion_prompts_max=4, body_bytes_max=100_000)
    async with running(tmp_path, platform(gateway=spec)) as rig:
        error = await complete(rig, **({"prompt": ["a", "b"]} | change))
        assert (error.status_code, error.json()["error"]["param"]) == (400, param)
        assert rig.controller.asks == []
        error = await rig.post({"model": "small", "prompt": ["a", "b"]}, PATH, idempotency_key="k")
        assert (error.status_code, error.json()["error"]["param"]) == (400, "idempotency-key")


async def test_a_failure_is_the_answer_and_ends_the_rest(tmp_path: Path) -> None:
    """By the engine, by the gateway, by the controller; the code, the place and the wait are those of the one that failed."""
    async with running(tmp_path) as rig:
        decide = rig.controller.decide

        def refuse_nine_words(ask: Ask, attempt: int, avoid: frozenset[str]) -> Grant | Refusal | None:
            if ask.prompt_tokens["small"] == 9:
                return rig.controller.refusal(ask, Code.TOKENS_PER_MINUTE, retry_after_s=7)
            return decide(ask, attempt, avoid)

        rig.controller.decide = refuse_nine_words
        for last, status, code, param in [
            ("b [[tokens=many]]", 500, "internal", None),
            ("b " * 600, 400, "context_length_exceeded", "prompt[2]"),
            ("b " * 9, 429, "tokens_per_minute", None),
        ]:
            before = len(rig.controller.asks)
            error = await complete(rig, [f"a {SLOW}", f"a a {SLOW}", last], max_tokens=400)
            shape = error.json()["error"]
            assert (error.status_code, shape["code"], shape["param"]) == (status, code, param)
            assert ("retry-after" in error.headers) == (status == 429)
            await until(lambda: rig.running() == 0 and not rig.gateway.flights)
            begun = [ask.request_id for ask in rig.controller.asks[before:]][:2]

            def ends() -> dict[str, str]:  # a Withdraw where it ended before its grant came
                told = [*rig.controller.finishes, *rig.controller.withdrawn]
                return {one.request_id: one.outcome for one in told}

            await until(lambda: ends().keys() >= set(begun))  # noqa: B023
            assert {ends()[request_id] for request_id in begun} == {"client_cancelled"}
        assert error.headers["retry-after"] == "7" and error.headers["x-rungway-reason"] == "tokens_per_minute"
        assert (await complete(rig, ["a", "b"])).status_code == 200


async def test_a_closed_connection_ends_all(tmp_path: Path) -> None:
    async with running(tmp_path) as rig, listening(rig) as port:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        raw = json.dumps({"model": "small", "prompt": [f"a {SLOW}", f"b {SLOW}", f"c {SLOW}"], "max_tokens": 400})
        head = f"POST {PATH} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\ncontent-length: {len(raw)}\r\n\r\n"
        writer.write((head + raw).encode())
        await until(lambda: rig.running() == 3)
        writer.close()
        await until(lambda: rig.running() == 0)
        assert [finish.outcome for finish in await rig.settled(3)] == ["client_cancelled"] * 3
        assert rig.gateway.flights == {}


async def test_a_client_that_does_not_read_is_let_go(tmp_path: Path) -> None:
    async with running(tmp_path, platform(gateway=GatewaySpec(request_timeout_s=2.0))) as rig:
        told = [{"type": "http.request", "body": json.dumps({"model": "small", "prompt": ["a", "b"]}).encode()}]
        sent = []

        async def receive() -> dict[str, Any]:
            return told.pop() if told else await asyncio.Future()

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)
            await asyncio.Future()

        scope = {
            "type": "http",
            "method": "POST",
            "path": PATH,
            "headers": [(b"authorization", f"Bearer {KEY}".encode())],
        }
        await asyncio.wait_for(rig.app(scope, receive, send), 20)
        assert [message.get("status") for message in sent] == [200]
        assert len(await rig.settled(2)) == 2 and rig.gateway.flights == {}


async def test_the_answer_says_what_was_worse_about_any(tmp_path: Path) -> None:
    async with running(tmp_path) as rig:
        decide = rig.controller.decide

        def lower_two_words(ask: Ask, attempt: int, avoid: frozenset[str]) -> Grant | Refusal | None:
            grant = decide(ask, attempt, avoid)
            if not isinstance(grant, Grant) or ask.prompt_tokens["small"] != 2:
                return grant
            offer = msgspec.structs.replace(grant.offer, rung=4, degraded=("small_tier",))
            return msgspec.structs.replace(grant, offer=offer, reason="queue_wait")

        rig.controller.decide = lower_two_words
        answer = await complete(rig, ["a", "b b", "c"], temperature=0)
        headers, shape = answer.headers, answer.json()["rungway"]
        assert (headers["x-rungway-rung"], headers["x-rungway-degraded"]) == ("4", "small_tier")
        assert headers["x-rungway-reason"] == shape["reason"] == "queue_wait"
        assert [one["rung"] for one in shape["prompts"]] == [0, 4, 0]
        assert headers["x-ratelimit-limit-requests"] == "60"


async def test_a_stranger_is_refused_before_anything(tmp_path: Path) -> None:
    async with running(tmp_path) as rig:
        answer = await rig.post({"model": "small", "prompt": ["a", "b"]}, PATH, authorization="Bearer rw_acme_x")
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
