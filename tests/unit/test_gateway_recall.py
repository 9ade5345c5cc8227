"""Repeats: the exact cache must never answer another question, the idempotency join never runs twice."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rungway.contracts import CacheTerms, LadderTerms, Platform
from rungway.types import Ask, Grant, OfferKind, Refusal
from unit.gateway_rig import BETA_KEY, KEY, Rig, api_key, frames, platform, running, said, tenant, until, version

BASE: dict[str, Any] = {
    "model": "small",
    "temperature": 0,
    "max_tokens": 16,
    "messages": [{"role": "user", "content": "count"}],
}


def caching(**terms: Any) -> Platform:
    cache = CacheTerms(**({"mode": "exact"} | terms))
    return platform(
        tenants=(
            tenant("acme", api_key("acme-1", KEY), cache=cache),
            tenant("beta", api_key("beta-1", BETA_KEY), cache=cache),
        )
    )


def serving_hits(rig: Rig) -> None:
    """The controller's rule: an ask that has an answer and wants it is served from the cache."""

    def decide(ask: Ask, attempt: int, avoid: frozenset[str]) -> Grant | Refusal | None:
        grant = rig.controller.grant_on(ask, attempt, avoid)
        if ask.cached and ask.cache_wanted and isinstance(grant, Grant):
            offer = msgspec.structs.replace(grant.offer, kind=OfferKind.CACHE, version="", tier="")
            return rig.controller.shaped(ask, attempt, "", offer)
        return grant

    rig.controller.decide = decide


async def label(rig: Rig, body: dict[str, Any], **headers: str) -> str:
    answer = await rig.post(body, **headers)
    assert answer.status_code == 200, answer.text
    return answer.headers["x-rungway-cache"]


async def test_what_is_kept_is_bounded_with_its_logprobs_and_their_alternatives(tmp_path: Path) -> None:
    """21 entries a token are what takes the memory, not the text."""
    async with running(tmp_path, caching()) as rig:
        serving_hits(rig)
        asked = BASE | {"max_tokens": 250, "logprobs": True}
        assert [await label(rig, asked) for _ in range(2)] == ["miss", "hit-exact"]
        assert [await label(rig, asked | {"top_logprobs": 20}) for _ in range(2)] == ["miss", "miss"]


CHANGES: list[dict[str, Any]] = [
    {"max_tokens": 64},
    {"stop": ["3"]},
    {"top_p": 0.5},
    {"n": 2},
    {"seed": 7},
    {"presence_penalty": 1},
    {"frequency_penalty": 1},
    {"repetition_penalty": 1.5},
    {"logit_bias": {"1": 5}},
    {"logprobs": True},
    {"top_k": 5},
    {"min_p": 0.1},
    {"best_of": 2},
    {"ignore_eos": True},
    {"model": "large"},
    {"model": "auto"},
    {"messages": [{"role": "user", "content": "count "}]},
    {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "count"}]},
    {"messages": [{"role": "user", "content": "count", "name": "me"}]},
    {"temperature": 0.5, "seed": 1},
]


async def test_every_field_that_can_change_the_answer_is_in_the_key(tmp_path: Path) -> None:
    async with running(tmp_path, caching()) as rig:
        serving_hits(rig)
        assert await label(rig, BASE) == "miss"
        assert await label(rig, BASE) == "hit-exact"
        for change in CHANGES:
            assert await label(rig, BASE | change) == "miss", change
        longer = (await rig.post(BASE | {"max_tokens": 64, "top_k": 3})).json()
        assert longer["usage"]["completion_tokens"] == 64
        assert len((await rig.post(BASE | {"n": 2})).json()["choices"]) == 2
        for refused in ({"response_format": {"type": "yaml"}}, {"tools": []}, {"tool_choice": "required"}):
            assert (await rig.post(BASE | refused)).status_code == 400


async def test_order_spacing_and_harmless_fields_do_not_matter(tmp_path: Path) -> None:
    async with running(tmp_path, caching()) as rig:
        serving_hits(rig)
        assert await label(rig, BASE) == "miss"
        reordered = (
            b'{ "messages" : [ {"content":"c\\u006funt", "role":"user"} ],\n "max_tokens":16, "temperature":0.0,'
            b' "model":"small" }'
        )
        answer = await rig.http.post(
            "/v1/chat/completions", content=reordered, headers={"content-type": "application/json"}
        )
        assert answer.headers["x-rungway-cache"] == "hit-exact"
        for harmless in ({"user": "u"}, {"metadata": {"a": "b"}}, {"store": True}, {"stream": False}):
            assert await label(rig, BASE | harmless) == "hit-exact"


async def test_without_a_given_temperature_nothing_is_cached(tmp_path: Path) -> None:
    async with running(tmp_path, caching()) as rig:
        serving_hits(rig)
        body = {name: value for name, value in BASE.items() if name != "temperature"}
        for variant in (body, body | {"seed": 1}, body | {"temperature": 0.7}):
            assert [await label(rig, variant) for _ in range(2)] == ["off", "off"]
        assert rig.gateway.cache.size("acme") == 0


async def test_a_hit_is_the_same_answer_in_either_form(tmp_path: Path) -> None:
    async with running(tmp_path, caching()) as rig:
        serving_hits(rig)
        body = BASE | {"logprobs": True, "n": 2}
        first = (await rig.post(body)).json()
        again = (await rig.post(body)).json()
        assert again["choices"] == first["choices"]
        assert again["usage"] == first["usage"]
        assert again["id"] != first["id"]
        assert again["rungway"]["cache"] == "hit-exact"
        assert again["rungway"]["model_served"] == first["rungway"]["model_served"] == "small/v1"
        for options in ({}, {"stream_options": {"include_usage": True}}, {"stream_options": {"include_usage": False}}):
            answer = await rig.post(body | {"stream": True} | options)
            events = frames(answer.text)
            assert answer.headers["x-rungway-cache"] == "hit-exact"
            assert events.pop() == "[DONE]"
            if options.get("stream_options") == {"include_usage": True}:
                assert events.pop()["usage"] == first["usage"]
            assert all(event["choices"] and "usage" not in event for event in events)
            for index in range(2):
                assert said(events, index) == first["choices"][index]["message"]["content"]
        outcomes = [f.outcome for f in await rig.settled(5)]
        assert outcomes == ["length"] + ["cache_hit"] * 4
        assert len(rig.controller.ends) == 1
        await until(lambda: rig.controller.counts.get(("cache_total", ("acme", "exact", "hit"))) == 4)


async def test_a_stream_fills_the_cache(tmp_path: Path) -> None:
    async with running(tmp_path, caching()) as rig:
        serving_hits(rig)
        streamed = await rig.post(BASE | {"stream": True})
        assert streamed.headers["x-rungway-cache"] == "miss"
        whole = await rig.post(BASE)
        assert whole.headers["x-rungway-cache"] == "hit-exact"
        assert whole.json()["choices"][0]["message"]["content"] == said(frames(streamed.text))


async def test_partitions_and_the_clients_and_tenants_switches(tmp_path: Path) -> None:
    async with running(tmp_path, caching(mode="off", ladder=False)) as rig:
        serving_hits(rig)
        beta = {"authorization": f"Bearer {BETA_KEY}"}
        assert [await label(rig, BASE) for _ in range(2)] == ["off", "off"]
        assert rig.gateway.cache.size("acme") == 0
        wanted = {"x_rungway_cache": "exact"}
        assert [await label(rig, BASE, **wanted) for _ in range(2)] == ["miss", "hit-exact"]
        assert await label(rig, BASE, **wanted, **beta) == "miss"
        assert await label(rig, BASE, x_rungway_cache="off") == "off"
        assert not rig.controller.asks[-1].cached
        assert await label(rig, BASE, **wanted, x_rungway_risk="high") == "off"
        assert await label(rig, BASE, **wanted, x_rungway_action="non_idempotent_write") == "off"
        assert await label(rig, BASE, **wanted, x_rungway_action="pure") == "hit-exact"


async def test_the_ladder_is_told_of_an_answer_that_the_client_did_not_ask_for(tmp_path: Path) -> None:
    async with running(tmp_path, caching(mode="off")) as rig:
        assert [await label(rig, BASE) for _ in range(2)] == ["off", "off"]
        assert [(ask.cached, ask.cache_wanted) for ask in rig.controller.asks] == [(False, False), (True, False)]
        rig.controller.decide = lambda ask, attempt, avoid: rig.controller.shaped(
            ask,
            attempt,
            "",
            msgspec.structs.replace(
                rig.controller.grant(ask, 1, frozenset()).offer,
                kind=OfferKind.CACHE,
                rung=5,
                degraded=("cached_answer",),
            ),
        )
        assert await label(rig, BASE) == "hit-exact"


async def test_no_cache_refreshes_and_no_store_keeps_nothing(tmp_path: Path) -> None:
    async with running(tmp_path, caching()) as rig:
        serving_hits(rig)
        assert await label(rig, BASE, cache_control="no-store") == "miss"
        assert await label(rig, BASE) == "miss"
        assert await label(rig, BASE, cache_control="no-cache") == "miss"
        assert await label(rig, BASE, cache_control="no-store") == "hit-exact"
        assert len(rig.controller.asks) == 4


@pytest.mark.parametrize(
    "offer",
    [{"rung": 4, "degraded": ("small_tier",)}, {"rung": 3, "degraded": ("context_trim",)}, {"max_tokens": 8}],
)
async def test_degraded_or_shortened_answers_are_not_kept(tmp_path: Path, offer: dict[str, Any]) -> None:
    async with running(tmp_path, caching()) as rig:
        rig.controller.decide = lambda ask, attempt, avoid: rig.controller.grant_on(ask, attempt, avoid, **offer)
        assert [await label(rig, BASE) for _ in range(2)] == ["miss", "miss"]
        assert rig.gateway.cache.size("acme") == 0


async def test_failed_and_unbounded_cut_answers_are_not_kept(tmp_path: Path) -> None:
    async with running(tmp_path, caching()) as rig:
        failing = BASE | {"messages": [{"role": "user", "content": "x [[fail_after=2]]"}]}
        assert (await rig.post(failing)).status_code >= 500
        unbounded = {name: value for name, value in BASE.items() if name != "max_tokens"}
        assert [await label(rig, unbounded) for _ in range(2)] == ["miss", "miss"]
        assert rig.gateway.cache.size("acme") == 0


async def test_a_change_of_models_versions_ladder_or_terms_forgets_but_a_new_key_does_not(tmp_path: Path) -> None:
    before = caching()
    acme, beta = before.tenants
    tiers = before.tiers
    async with running(tmp_path, before) as rig:
        serving_hits(rig)
        assert [await label(rig, BASE) for _ in range(2)] == ["miss", "hit-exact"]
        renewed = msgspec.structs.replace(acme, keys=(*acme.keys, api_key("new", "rw_new")))
        bigger = msgspec.structs.replace(tiers[0], versions=(version("small", "v1", weight=0.5),))
        shallower = msgspec.structs.replace(acme, ladder=LadderTerms(floor="best_of_1"))
        for change, expected in [
            ({"tenants": (renewed, beta)}, "hit-exact"),
            ({"tiers": (bigger, tiers[1])}, "miss"),
            ({"ladder": msgspec.structs.replace(before.ladder, digest="l2")}, "miss"),
            ({"tenants": (shallower, beta)}, "miss"),
        ]:
            rig.controller.reload(msgspec.structs.replace(before, **change))
            await until(lambda: rig.gateway.known().version == rig.controller.version)
            assert await label(rig, BASE) == expected, change


async def test_an_idempotent_repeat_replays_the_first_answer(tmp_path: Path) -> None:
    async with running(tmp_path) as rig:
        body = {"model": "small", "messages": [{"role": "user", "content": "once [[tokens=4]]"}], "n": 2}
        first = await rig.post(body, idempotency_key="k")
        again = await rig.post(body, idempotency_key="k")
        assert again.json() == first.json()
        assert again.headers["x-request-id"] == first.headers["x-request-id"]
        assert again.headers["x-rungway-idempotent-replay"] == "true"
        streamed = await rig.post(body | {"stream": True}, idempotency_key="k")
        events = frames(streamed.text)
        assert events[-1] == "[DONE]"
        assert events[0]["id"] == first.json()["id"]
        assert said(events, 1) == first.json()["choices"][1]["message"]["content"]
        assert len(rig.controller.asks) == 1
        other = await rig.post(body | {"n": 1}, idempotency_key="k")
        assert (other.status_code, other.json()["error"]["code"]) == (422, "idempotency_mismatch")
        elsewhere = await rig.post(
            {"model": "small", "messages": body["messages"]},
            idempotency_key="k",
            authorization=f"Bearer {BETA_KEY}",
        )
        assert elsewhere.status_code == 200
        assert len(rig.controller.asks) == 2


async def test_a_running_idempotent_request_is_not_run_again(tmp_path: Path) -> None:
    async with running(tmp_path) as rig:
        body = {"model": "small", "messages": [{"role": "user", "content": "x [[hang=1]]"}], "stream": True}
        task = asyncio.create_task(rig.post(body, idempotency_key="k"))
        await until(lambda: rig.running() == 1)
        second = await rig.post(body, idempotency_key="k")
        assert (second.status_code, second.json()["error"]["code"]) == (409, "idempotency_in_progress")
        assert int(second.headers["retry-after"]) >= 1
        rig.gateway.cancel(rig.controller.asks[0].request_id, "acme")
        await task
        # No whole answer came of it, so the key is free and nothing is replayed.
        assert rig.gateway.idempotency.size("acme") == 0


async def test_an_error_frees_the_key(tmp_path: Path) -> None:
    async with running(tmp_path) as rig:
        good, rig.controller.decide = (
            rig.controller.decide,
            lambda ask, attempt, avoid: rig.controller.refusal(ask, "overloaded", retry_after_s=1),
        )
        body = {"model": "small", "messages": [{"role": "user", "content": "x [[tokens=2]]"}]}
        assert (await rig.post(body, idempotency_key="k")).status_code == 503
        rig.controller.decide = good
        assert (await rig.post(body, idempotency_key="k")).status_code == 200
