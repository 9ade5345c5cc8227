"""POST /v1/embeddings through the gateway and real replicas over the fake encoder: shapes, refusals, cache, failures."""

from __future__ import annotations

import asyncio
import base64
from array import array
from pathlib import Path
from typing import Any

import pytest

from rungway.contracts import GatewaySpec, ModelAlias, Platform, Tier, TierKind, Version
from rungway.engine.embedding.fake import FAKE_DIMENSIONS, unit_vector
from unit.gateway_rig import KEY, PRICE, Rig, api_key, platform, running, tenant, until, version

PATH = "/v1/embeddings"


def embedder(**changes: Any) -> Version:
    return version("embed", "e1", kind=TierKind.EMBEDDING, max_context=8, max_num_batched_tokens=4, **changes)


def configured(**gateway: Any) -> Platform:
    base = platform(gateway=GatewaySpec(body_bytes_max=200_000, **gateway))
    tier = Tier(name="embed", rank=0, price=PRICE, versions=(embedder(),), kind=TierKind.EMBEDDING)
    known = tenant("acme", api_key("acme-1", KEY), models=("auto", "small", "large", "embed", "vectors"))
    changes = {"tiers": (*base.tiers, tier), "tenants": (known,)}
    changes |= {"models": (*base.models, ModelAlias(name="vectors", tiers=("embed",)))}
    return platform(gateway=base.gateway, **changes)


def running_embed(folder: Path, *names: str, **gateway: Any) -> Any:
    replicas = {name: embedder() for name in names or ("embed-1",)}
    return running(
        folder,
        configured(**gateway),
        replicas | {"small-1": version("small", "v1"), "large-1": version("large", "v1")},
    )


async def embed(rig: Rig, given: Any, headers: dict[str, str] | None = None, **body: Any) -> Any:
    return await rig.http.post(PATH, json={"model": "embed", "input": given, **body}, headers=headers)


async def test_texts_become_vectors_in_their_order(tmp_path: Path) -> None:
    async with running_embed(tmp_path) as rig:
        answer = await embed(rig, ["one two", "three", "one two"], user="somebody")
        assert answer.status_code == 200
        body = answer.json()
        assert (body["object"], body["model"]) == ("list", "embed")
        assert body["usage"] == {"prompt_tokens": 5, "total_tokens": 5}
        assert [(one["object"], one["index"]) for one in body["data"]] == [("embedding", i) for i in range(3)]
        expected = [array("f", unit_vector(text)).tolist() for text in ("one two", "three", "one two")]
        assert [one["embedding"] for one in body["data"]] == expected and len(expected[0]) == FAKE_DIMENSIONS
        assert body["rungway"]["model_served"] == answer.headers["x-rungway-model-served"] == "embed/e1"
        assert answer.headers["x-rungway-rung"] == "0" and answer.headers["x-rungway-degraded"] == "none"
        (ask,) = rig.controller.asks
        assert (ask.kind, ask.endpoint, ask.prompt_tokens, ask.output_bound) == (
            "embedding",
            "embeddings",
            {"embed": 5},
            0,
        )
        (finish,) = await rig.settled()
        assert (finish.outcome, finish.delivered, finish.tpot_ms) == ("completed", {1: 0}, None)
        await until(lambda: rig.controller.ends)
        (end,) = rig.controller.ends
        assert (end.usage.prompt_tokens, end.usage.output_tokens, end.finish) == (5, 0, "stop")


async def test_base64_and_token_ids_and_an_alias(tmp_path: Path) -> None:
    async with running_embed(tmp_path) as rig:
        answer = (await embed(rig, [[7, 8], [9]], model="vectors", encoding_format="base64")).json()
        assert [base64.b64decode(one["embedding"]) for one in answer["data"]] == [unit_vector("7 8"), unit_vector("9")]
        assert answer["usage"]["prompt_tokens"] == 3 and answer["model"] == "vectors"
        assert len((await embed(rig, [7, 8, 9])).json()["data"]) == 1
        assert (await embed(rig, "x", dimensions=FAKE_DIMENSIONS)).status_code == 200


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": ""}, "input[0]"),
        ({"input": []}, "input"),
        ({"input": ["x", ""]}, "input[1]"),
        ({"input": [[]]}, "input[0]"),
        ({"input": ["x", [1]]}, "input"),
        ({"input": ["x", 1]}, "input"),
        ({"input": {"text": "x"}}, "input"),
        ({"input": ["x"] * 5}, "input"),
        ({"input": [-1]}, "input[0]"),
        ({"input": [1 << 16]}, "input[0]"),
        ({}, "input"),
        ({"input": "x", "encoding_format": "bytes"}, "encoding_format"),
        ({"input": "x", "dimensions": 8}, "dimensions"),
        ({"input": "x", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"input": "x", "truncate_prompt_tokens": 9}, "truncate_prompt_tokens"),
        ({"input": "x", "truncation_side": "left"}, "truncation_side"),
        ({"input": "x", "temperature": 1}, "temperature"),
        ({"input": "x", "model": "small"}, "model"),
    ],
)
async def test_bad_requests_name_their_field(tmp_path: Path, body: dict[str, Any], param: str) -> None:
    async with running_embed(tmp_path, embedding_inputs_max=4) as rig:
        answer = await rig.http.post(PATH, json={"model": "embed", **body})
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert (error["param"], error["code"]) == (param, "invalid_request")
        assert rig.controller.asks == []


async def test_models_answer_in_their_own_kind_only(tmp_path: Path) -> None:
    async with running_embed(tmp_path) as rig:
        answer = await rig.chat(model="embed")
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "model")
        assert "/v1/embeddings" in answer.json()["error"]["message"]
        assert (await rig.post({"model": "embed", "prompt": "x"}, "/v1/completions")).status_code == 400
        assert (await embed(rig, "x", model="nothing")).json()["error"]["code"] == "model_not_found"
        listed = {one["id"]: one["kind"] for one in (await rig.http.get("/v1/models")).json()["data"]}
        assert listed == {
            "auto": "text",
            "small": "text",
            "large": "text",
            "embed": "embedding",
            "vectors": "embedding",
        }


async def test_too_long_is_said_unless_it_may_be_cut(tmp_path: Path) -> None:
    async with running_embed(tmp_path) as rig:
        nine = "a b c d e f g h i"
        answer = await embed(rig, ["x", nine])
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
        assert "input 1 has 9 tokens" in answer.json()["error"]["message"]
        assert (await embed(rig, "a b c d e f g h")).status_code == 200  # exactly the context
        cut = (await embed(rig, nine, truncate_prompt_tokens=2, encoding_format="base64")).json()
        assert cut["usage"]["prompt_tokens"] == 2
        assert base64.b64decode(cut["data"][0]["embedding"]) == unit_vector("a b")
        assert (await embed(rig, nine, truncate_prompt_tokens=-1)).json()["usage"]["prompt_tokens"] == 8
        many = await embed(rig, ["a b c d e f g h"] * 33)  # 264 tokens; a replica takes 64 steps of 4
        assert many.json()["error"]["code"] == "context_length_exceeded" and "256" in many.json()["error"]["message"]


async def test_a_repeat_comes_from_memory_where_it_was_asked_for(tmp_path: Path) -> None:
    async with running_embed(tmp_path) as rig:
        exact = {"x-rungway-cache": "exact"}
        first = await embed(rig, "same text", exact)
        assert first.headers["x-rungway-cache"] == "miss"
        await embed(rig, "same text", exact, encoding_format="base64")
        assert [ask.cached for ask in rig.controller.asks] == [
            False,
            False,
        ]  # another form of answer is another request
        await embed(rig, "same text", exact)
        assert rig.controller.asks[-1].cached and rig.controller.asks[-1].cache_wanted
        key = {"idempotency-key": "k1"}
        one, two = await embed(rig, "idempotent", key), await embed(rig, "idempotent", key)
        assert one.json()["data"] == two.json()["data"] and two.headers["x-request-id"] == one.headers["x-request-id"]
        assert (await embed(rig, "other", key)).status_code == 422
        await embed(rig, "not asked for")
        assert not rig.controller.asks[-1].cache_wanted


async def test_a_lost_replica_does_not_show(tmp_path: Path) -> None:
    """Some vectors were there already; the second try makes all of them, and its usage is the whole bill."""
    async with running_embed(tmp_path, "embed-1", "embed-2") as rig:
        texts = ["done one", "[[hang]] two three four"]
        call = asyncio.create_task(embed(rig, texts))
        await until(lambda: rig.controller.asks and rig.running("embed-1") + rig.running("embed-2"))
        (request_id,) = (ask.request_id for ask in rig.controller.asks)
        flight = rig.gateway.flights[request_id]
        await until(lambda: flight.progress.first_ns)  # the first vector is here
        assert flight.grant is not None
        rig.controller.decide = lambda ask, attempt, avoid: rig.controller.refusal(ask, "no_capacity")  # type: ignore[arg-type,return-value]
        lost = flight.grant.replica_id
        await rig.replicas[lost].stop()
        answer = await call
        assert answer.status_code in (502, 503) and len(rig.controller.retries) == 1
        await until(lambda: rig.controller.ends)
        (end,) = rig.controller.ends
        assert (end.finish, end.usage.prompt_tokens) == ("cancelled", 2)


async def test_the_second_try_makes_all_vectors(tmp_path: Path) -> None:
    async with running_embed(tmp_path, "embed-1", "embed-2") as rig:
        slow = ["fine one", "[[ttft_ms=400]] two three four"]
        call = asyncio.create_task(embed(rig, slow))
        await until(lambda: rig.controller.asks)
        (request_id,) = (ask.request_id for ask in rig.controller.asks)
        flight = rig.gateway.flights[request_id]
        await until(lambda: flight.progress.first_ns)
        assert flight.grant is not None
        rig.gateway._on_replica_lost(flight.grant.replica_id, None)
        answer = await call
        assert answer.status_code == 200 and answer.json()["usage"]["prompt_tokens"] == 6
        expected = [array("f", unit_vector(text)).tolist() for text in slow]
        assert [one["embedding"] for one in answer.json()["data"]] == expected
        (finish,) = await rig.settled()
        assert finish.attempts == 2


async def test_a_cancelled_request_frees_the_engine(tmp_path: Path) -> None:
    async with running_embed(tmp_path) as rig:
        call = asyncio.create_task(embed(rig, ["quick one", "[[hang]]"]))
        await until(lambda: rig.controller.asks and rig.running("embed-1"))
        assert rig.gateway.cancel(rig.controller.asks[0].request_id, "acme")
        assert (await call).status_code == 499
        await until(lambda: rig.controller.ends and not rig.running("embed-1"))
        assert rig.controller.ends[0].finish == "cancelled"


async def test_an_engine_error_is_a_500_after_its_tries(tmp_path: Path) -> None:
    async with running_embed(tmp_path, "embed-1", "embed-2", retries_max=1) as rig:
        answer = await embed(rig, "[[fail_after=0]]")
        assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal")
