"""A burst of requests against a token limit: what may be served, and what the refusals must say."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import httpx

from support.case_platform import CasePlatform, eventually, together

WORDS = " ".join(["word"] * 49)


def error_of(answer: httpx.Response) -> dict[str, Any]:
    error: dict[str, Any] = answer.json()["error"]
    return error


def total_tokens(answer: httpx.Response) -> int:
    if answer.headers["content-type"].startswith("text/event-stream"):
        row_tokens = [line for line in answer.text.splitlines() if '"usage":{' in line]
        assert len(row_tokens) == 1
        return int(row_tokens[0].split('"total_tokens":')[1].split(",")[0])
    return int(answer.json()["usage"]["total_tokens"])


def burst(cases: CasePlatform, tenant: str, **body: Any) -> list[httpx.Response]:
    """20 requests at once, half of them streams; each makes 50 tokens of 20 ms from a prompt of about 50."""
    text = f"[[tpot_ms=20]] [[tokens=50]] {WORDS}"

    def call(number: int) -> Callable[[], httpx.Response]:
        more = {"stream": True, "stream_options": {"include_usage": True}} if number % 2 else {}
        return lambda: cases.chat(tenant, text, **body, **more)

    return together([call(number) for number in range(20)])


def check_token_burst(cases: CasePlatform, tenant: str, limit: int, **body: Any) -> int:
    """A burst may not be served more than the limit, its refill meanwhile, and one request. Returns the tokens served."""
    started = time.monotonic()
    answers = burst(cases, tenant, **body)
    refill = limit / 60 * (time.monotonic() - started)
    served = sum(total_tokens(answer) for answer in answers if answer.status_code == 200)
    refused = [answer for answer in answers if answer.status_code != 200]
    assert refused
    assert served <= limit + refill + 105
    for answer in refused:
        assert (answer.status_code, error_of(answer)["code"]) == (429, "tokens_per_minute")
        assert int(answer.headers["retry-after"]) >= 1
        assert cases.truth(answer.headers["x-request-id"]) == [], "refused before any engine work"
    eventually(lambda: cases.tenant(tenant)["held_tokens"] == 0, "nothing held at rest")
    return served
