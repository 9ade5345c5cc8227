"""The exact cache: only a request that is the same in everything that can change the answer is a repeat."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from support.case_platform import CasePlatform, text_of

pytestmark = pytest.mark.serve

EXACT = {"x-rungway-cache": "exact"}
CHANGES: dict[str, dict[str, Any]] = {
    "max_tokens": {"max_tokens": 64},
    "stop": {"stop": ["3"]},
    "top_p": {"top_p": 0.5},
    "n": {"n": 2},
    "seed": {"seed": 7},
    "presence_penalty": {"presence_penalty": 1},
    "logit_bias": {"logit_bias": {"5": 3}},
    "logprobs": {"logprobs": True},
    "model": {"model": "large"},
    "system": {"messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "count"}]},
    "space": {"messages": [{"role": "user", "content": "count "}]},
}


def base(**change: Any) -> dict[str, Any]:
    return {
        "model": "small",
        "temperature": 0,
        "max_tokens": 16,
        "messages": [{"role": "user", "content": "count"}],
    } | change


def ask(cases: CasePlatform, body: dict[str, Any] | bytes, tenant: str = "cached") -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"content-type": "application/json"} | EXACT
    answer = cases.client(tenant).post("/v1/chat/completions", content=content, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer


def label(answer: httpx.Response) -> str:
    return answer.headers["x-rungway-cache"]


def test_the_same_request_hits_whatever_its_spacing_and_order(cases: CasePlatform) -> None:
    first = ask(cases, base())
    again = ask(cases, base())
    other = ask(cases, json.dumps(dict(reversed(base().items())), indent=3).encode())
    assert label(again) == label(other) == "hit-exact"
    texts = [answer.json()["choices"][0]["message"]["content"] for answer in (first, again, other)]
    assert len(set(texts)) == 1
    row = cases.row(again.headers["x-request-id"])
    assert (row["outcome"], row["output_tokens"], row["cost_nusd"]) == ("cache_hit", 0, 0)
    assert cases.truth(again.headers["x-request-id"]) == []


@pytest.mark.parametrize("name", CHANGES)
def test_a_request_that_differs_in_one_field_misses(cases: CasePlatform, name: str) -> None:
    ask(cases, base())
    answer = ask(cases, base(**CHANGES[name]))
    assert label(answer) == "miss"
    body = answer.json()
    assert len(body["choices"]) == (2 if name == "n" else 1)
    assert (body["usage"]["completion_tokens"] > 16) == (name in ("max_tokens", "n"))


def test_a_hit_streams_as_a_stream_with_the_same_text(cases: CasePlatform) -> None:
    whole = ask(cases, base())
    got = cases.stream("cached", headers=EXACT, **base())
    assert text_of(got) == whole.json()["choices"][0]["message"]["content"]


def test_an_absent_temperature_is_not_zero(cases: CasePlatform) -> None:
    body = base()
    del body["temperature"]
    assert [label(ask(cases, body)) for _ in range(2)] != ["miss", "hit-exact"]
    assert "hit" not in label(ask(cases, body))


def test_another_tenants_answer_is_never_a_hit(cases: CasePlatform) -> None:
    ask(cases, base())
    assert label(ask(cases, base(messages=[{"role": "user", "content": "mine"}]))) == "miss"
    assert label(ask(cases, base(messages=[{"role": "user", "content": "mine"}]), tenant="cached2")) == "miss"
