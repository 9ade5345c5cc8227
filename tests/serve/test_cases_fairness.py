"""Shares are shares of work, nobody starves, idling earns nothing; a full tier hands on what may be handed on."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest

from support.case_platform import CALL_S, CasePlatform, eventually, together

pytestmark = pytest.mark.serve

WORK = 5000  # about 6 s of the large tier's four places
START_S = 60.0
PACE = "[[tpot_ms=10]]"


@contextmanager
def backlog(
    cases: CasePlatform, tenant: str, tokens: int, callers: int, headers: dict[str, str] | None = None
) -> Iterator[None]:
    """`callers` clients of a tenant that each ask large for `tokens` tokens, again and again."""
    over = threading.Event()

    def keep_asking() -> None:
        while not over.is_set():
            answer = cases.chat(
                tenant, f"{PACE} [[tokens={tokens}]] go", model="large", max_tokens=tokens, headers=headers
            )
            assert answer.status_code == 200, answer.text

    threads = [threading.Thread(target=keep_asking) for _ in range(callers)]
    for thread in threads:
        thread.start()
    try:
        eventually(lambda: cases.tenant(tenant)["waiting"] > 0, f"{tenant} waits", START_S)
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join(CALL_S)


def work_of(cases: CasePlatform, tenants: list[str]) -> dict[str, float]:
    """Share of the declared cost (input + 2 x output) that each tenant was served of the next WORK and a little more, as the
    engines counted it; progress of running attempts is left out on both ends alike."""
    start_ns = time.time_ns()
    cost: dict[str, int] = {}

    def enough() -> bool:
        time.sleep(0.5)
        attempts = cases.admin("/engine-truth", limit=10_000, since=start_ns // 10**9)["attempts"]
        inside = [a for a in attempts if a["ended_wall_ns"] >= start_ns]
        for tenant in tenants:
            own = [a for a in inside if a["tenant"] == tenant]
            cost[tenant] = sum(a["prompt_tokens"] + 2 * a["output_tokens"] for a in own)
        return sum(cost.values()) >= WORK

    eventually(enough, "so much work is done", 120.0)
    total = sum(cost.values())
    return {tenant: value / total for tenant, value in cost.items()}


def test_equal_weights_share_the_work_not_the_turns(cases: CasePlatform) -> None:
    shout = {"x-priority": "high", "x-rungway-priority": "0"}
    with backlog(cases, "big-jobs", 50, 12, shout), backlog(cases, "small-jobs", 10, 16):
        shares = work_of(cases, ["big-jobs", "small-jobs"])
    assert shares["big-jobs"] == pytest.approx(0.5, abs=0.1)


def test_weights_share_the_work_three_to_one(cases: CasePlatform) -> None:
    with backlog(cases, "heavy", 20, 12), backlog(cases, "light", 20, 12):
        shares = work_of(cases, ["heavy", "light"])
    assert shares["heavy"] == pytest.approx(0.75, abs=0.08)


def test_the_lowest_class_keeps_its_minimum_share(cases: CasePlatform) -> None:
    with backlog(cases, "big-jobs", 20, 12), backlog(cases, "nightly", 20, 8):
        shares = work_of(cases, ["big-jobs", "nightly"])
    assert shares["nightly"] >= 0.8 * 0.1


def test_idling_earns_no_credit(cases: CasePlatform) -> None:
    with backlog(cases, "big-jobs", 20, 12):
        time.sleep(3.0)
        with backlog(cases, "late", 20, 12):
            shares = work_of(cases, ["big-jobs", "late"])
    assert shares["late"] <= 0.5 + 0.1


# --- a full tier


@contextmanager
def full_large(cases: CasePlatform) -> Iterator[None]:
    """The large tier is full and its queue long, with the work of a tenant that must have large."""
    with backlog(cases, "firm", 60, 12):
        yield


def test_what_may_be_degraded_is_served_small_and_says_why(cases: CasePlatform) -> None:
    cases.calm()
    degraded: list[httpx.Response] = []

    def three_are() -> bool:
        answer = cases.chat("flexible", model="large")
        if answer.headers["x-rungway-degraded"] == "small_tier":
            degraded.append(answer)
        return len(degraded) == 3

    with full_large(cases):
        eventually(three_are, "large hands on to small", START_S)
    for answer in degraded:
        assert answer.headers["x-rungway-model-served"] == "small/fake"
        assert answer.headers["x-rungway-reason"] in ("queue_wait", "in_flight", "kv_use", "slo_burn", "load")
        found = cases.decision(answer.headers["x-request-id"])
        (entry,) = [entry for entry in found["audit"] if entry["kind"] == "downgrade"]
        assert entry["detail"]["cause"] == answer.headers["x-rungway-reason"]
        row = found["request"]
        assert row["tier"] == "small"
        assert row["cost_nusd"] == row["prompt_tokens"] * 1_000_000 + row["output_tokens"] * 2_000_000


def test_a_tenant_that_opted_out_waits_for_what_it_asked(cases: CasePlatform) -> None:
    cases.calm()
    with full_large(cases):
        answers = together([lambda: cases.chat("strict", model="large")] * 3)
    for answer in answers:
        assert answer.status_code in (200, 429, 503)
        if answer.status_code == 200:
            assert answer.headers["x-rungway-model-served"] == "large/fake"
            assert answer.headers["x-rungway-degraded"] == "none"


def test_degrading_is_no_way_round_ones_own_quota(cases: CasePlatform) -> None:
    cases.calm()
    with full_large(cases):
        answers = [cases.chat("flexible-rpm", model="large") for _ in range(8)]
    refused = [answer for answer in answers if answer.status_code != 200]
    assert refused
    for answer in refused:
        assert (answer.status_code, answer.json()["error"]["code"]) == (429, "requests_per_minute")
        kinds = [entry["kind"] for entry in cases.decision(answer.headers["x-request-id"])["audit"]]
        assert "downgrade" not in kinds
