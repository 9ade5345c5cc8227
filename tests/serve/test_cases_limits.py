"""Limits that count what is promised, not what is finished; refusals that say when to come back; zero that means none."""

from __future__ import annotations

import time
from typing import Any

import httpx
import pytest

from support.case_bursts import check_token_burst, error_of
from support.case_platform import CasePlatform, eventually, together

pytestmark = pytest.mark.serve


def test_tokens_are_reserved_before_they_are_made(cases: CasePlatform) -> None:
    assert check_token_burst(cases, "tpm600", 600, max_tokens=50) > 0


def test_without_a_bound_a_burst_is_admitted_less_never_more(cases: CasePlatform) -> None:
    check_token_burst(cases, "tpm600b", 600, max_tokens=None)


def test_unused_holds_are_given_back(cases: CasePlatform) -> None:
    answer = cases.chat("tpm600c", "[[tokens=5]] short", max_tokens=500)
    assert answer.status_code == 200
    used = answer.json()["usage"]["total_tokens"]
    eventually(lambda: cases.tenant("tpm600c")["held_tokens"] == 0, "the hold is settled")
    assert cases.tenant("tpm600c")["tokens_remaining"] >= 600 - used


# --- when to come back


def retry_after(answer: httpx.Response, code: str, status: int = 429) -> int:
    assert (answer.status_code, error_of(answer)["code"]) == (status, code), answer.text
    text = answer.headers["retry-after"]
    assert text.isdecimal() and 1 <= int(text) <= 60
    return int(text)


def test_after_the_time_it_named_a_request_limit_lets_one_in(cases: CasePlatform) -> None:
    served = 0
    while (answer := cases.chat("rpm30", max_tokens=1)).status_code == 200:
        served += 1
        assert served <= 300, "no machine is so slow that it never asks faster than the limit"
    assert served >= 30
    wait_s = retry_after(answer, "requests_per_minute")
    assert answer.headers["x-ratelimit-remaining-requests"] == "0"
    time.sleep(wait_s)
    assert cases.chat("rpm30", max_tokens=1).status_code == 200


def test_after_the_time_it_named_a_token_limit_lets_one_in(cases: CasePlatform) -> None:
    while (answer := cases.chat("tpm6000", "[[tokens=1000]] [[tpot_ms=0]] go", max_tokens=1000)).status_code == 200:
        pass
    wait_s = retry_after(answer, "tokens_per_minute")
    time.sleep(wait_s)
    again = cases.chat("tpm6000", "[[tokens=1000]] [[tpot_ms=0]] go", max_tokens=1000)
    assert again.status_code == 200


def test_full_concurrency_and_a_full_queue_say_when_to_come_back(cases: CasePlatform) -> None:
    with cases.streaming("single", "[[tpot_ms=50]] long", max_tokens=60) as (answer, frames):
        assert answer.status_code == 200
        next(frames)
        retry_after(cases.chat("single"), "concurrent_requests")
    slow = "[[tpot_ms=40]] [[tokens=30]] slow"
    answers = together([lambda: cases.chat("queue2", slow, model="large", max_tokens=30)] * 10)
    refused = [answer for answer in answers if answer.status_code != 200]
    assert refused
    for each in refused:
        retry_after(each, "queue_full")


def test_a_prompt_that_no_minute_could_admit_is_not_a_matter_of_waiting(cases: CasePlatform) -> None:
    answer = cases.chat("tpm600d", " ".join(["word"] * 700))
    assert 400 <= answer.status_code < 500 and answer.status_code != 429
    assert "retry-after" not in answer.headers


# --- money


COST = "[[tokens=20]] [[tpot_ms=1]] a b c d e f g h"  # a large answer to it costs about 0.5 dollars


def test_calls_without_a_bound_do_not_hold_the_whole_budget(cases: CasePlatform) -> None:
    answers = together([lambda: cases.chat("rich", COST, model="large", max_tokens=None)] * 8)
    assert [answer.status_code for answer in answers] == [200] * 8


def test_one_huge_bound_does_not_shut_out_the_rest(cases: CasePlatform) -> None:
    slow = COST.replace("tpot_ms=1]", "tpot_ms=60]")
    huge = lambda: cases.chat("rich2", slow, model="large", max_tokens=999_999_999)  # noqa: E731
    small = [lambda: cases.chat("rich2", COST, model="large", max_tokens=20)] * 5
    first, *rest = together([huge, *small])
    assert first.status_code in (200, 400)
    assert [answer.status_code for answer in rest] == [200] * 5


def test_cancelled_calls_give_their_holds_back(cases: CasePlatform) -> None:
    def cancelled() -> None:
        with cases.streaming("rich3", COST.replace("tpot_ms=1]", "tpot_ms=100]"), model="large", max_tokens=None) as (
            answer,
            found,
        ):
            assert answer.status_code == 200
            next(found)

    together([cancelled] * 4)
    eventually(lambda: cases.tenant("rich3")["budget"]["held_usd"] == 0, "no money held")
    answers = together([lambda: cases.chat("rich3", COST, model="large", max_tokens=20)] * 8)
    assert [answer.status_code for answer in answers] == [200] * 8


def test_a_budget_is_spent_to_its_end_and_not_beyond(cases: CasePlatform) -> None:
    served = 0
    while (answer := cases.chat("poor", COST, model="large", max_tokens=20)).status_code == 200:
        served += 1
        eventually(lambda: cases.tenant("poor")["budget"]["held_usd"] == 0, "settled")
        assert served <= 25
    assert served >= 18
    assert (answer.status_code, error_of(answer)["code"]) == (429, "budget_exhausted")
    assert error_of(answer)["type"] == "insufficient_quota"
    assert int(answer.headers.get("retry-after", "3600")) > 1, "the next month, not the next second"
    assert cases.truth(answer.headers["x-request-id"]) == []
    budget = cases.client("poor").get("/v1/usage").json()["budget"]
    assert budget["spent_usd"] <= budget["limit_usd"] == 10.0 and budget["held_usd"] == 0


# --- zero is not "no limit"


@pytest.mark.parametrize(
    ("tenant", "code"),
    [
        ("zero-rpm", "requests_per_minute"),
        ("zero-tpm", "tokens_per_minute"),
        ("zero-concurrent", "concurrent_requests"),
        ("zero-budget", "budget_exhausted"),
    ],
)
def test_zero_allows_nothing_and_promises_nothing(cases: CasePlatform, tenant: str, code: str) -> None:
    answer = cases.chat(tenant)
    assert (answer.status_code, error_of(answer)["code"]) == (429, code)
    assert "retry-after" not in answer.headers, "waiting does not help"
    assert cases.truth(answer.headers["x-request-id"]) == []


def test_absent_is_the_documented_default_and_shown(cases: CasePlatform) -> None:
    shown = cases.admin("/config")["tenants"]
    assert shown["plain"]["quotas"]["requests_per_minute"] == "unlimited", "the plan's value"
    assert shown["zero-rpm"]["quotas"]["requests_per_minute"] == 0
    assert cases.chat("plain").status_code == 200


REFUSED: dict[str, dict[str, Any]] = {
    "rpm with a fraction": {"quotas": {"requests_per_minute": 1.5}},
    "rpm null": {"quotas": {"requests_per_minute": None}},
    "rpm infinite": {"quotas": {"requests_per_minute": float("inf")}},
    "budget not a number": {"budget": {"usd": float("nan")}},
    "weight 0": {"weight": 0},
    "class misspelt": {"class": "interactiv"},
    "floor unknown": {"ladder": {"floor": "huge"}},
    "unknown field": {"quota": {"requests_per_minute": 5}},
    "name taken": {"tenant": "plain"},
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_wrong_file_is_named_and_changes_nothing(cases: CasePlatform, name: str) -> None:
    before = cases.admin("/config")
    path = cases.write_tenant("wrong", REFUSED[name])
    try:
        answer = cases.reload()
        assert answer.status_code == 400, answer.text
        assert "wrong.yaml" in error_of(answer)["message"] or "plain.yaml" in error_of(answer)["message"]
        assert cases.admin("/config") == before
        assert cases.chat("plain").status_code == 200
    finally:
        path.unlink()


def test_a_limit_set_to_zero_stops_new_calls_and_lets_running_ones_end(cases: CasePlatform) -> None:
    with cases.streaming("paused", "[[tpot_ms=50]] long", max_tokens=40) as (answer, found):
        assert answer.status_code == 200
        next(found)
        cases.write_tenant("paused", {"quotas": {"requests_per_minute": 0}})
        assert cases.reload().status_code == 200
        eventually(lambda: cases.chat("paused").status_code == 429, "new calls are refused")
        assert list(found)[-1] == {"done": True}, "the running stream ends whole"
