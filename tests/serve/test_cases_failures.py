"""Engines that fail, hang or stop: bounded retries, no copies side by side, nothing billed twice, and the way back."""

from __future__ import annotations

import itertools
import os
import signal
import time

import httpx
import pytest

from rungway.chaos.faults import Role, holds, pids
from support.case_bursts import check_token_burst
from support.case_platform import DONE, CasePlatform, eventually, text_of, together

pytestmark = pytest.mark.serve

RETRIES = 2


def outcome_of(answer: httpx.Response) -> str:
    return "ok" if answer.status_code == 200 else str(answer.json()["error"]["code"])


def test_a_token_limit_holds_over_two_gateways(pair: CasePlatform) -> None:
    check_token_burst(pair, "tpm600", 600, max_tokens=50)


def test_a_request_that_always_fails_is_tried_a_bounded_number_of_times(pair: CasePlatform) -> None:
    answer = pair.chat("failing", "[[fail_after=0]] go")
    assert answer.status_code in (500, 502, 503), answer.text
    request_id = answer.headers["x-request-id"]
    row = pair.row(request_id)
    assert 1 <= len(pair.truth(request_id)) <= 1 + RETRIES
    assert row["attempts"] == len(pair.truth(request_id))
    assert (row["output_tokens"], row["cost_nusd"]) == (0, 0), "failed tries without a token cost nothing"


def test_a_wrong_request_is_not_retried(pair: CasePlatform) -> None:
    answer = pair.chat("failing", "[[tokens=none]] go")
    assert answer.status_code >= 400
    assert pair.row(answer.headers["x-request-id"])["attempts"] <= 1 + RETRIES


def test_retries_stay_within_the_tenants_budget_when_everything_fails(pair: CasePlatform) -> None:
    answers = [
        answer for _ in range(5) for answer in together([lambda: pair.chat("failing", "[[fail_after=0]] go")] * 10)
    ]
    assert all(answer.status_code >= 500 or answer.status_code == 429 for answer in answers)
    tries = [pair.row(answer.headers["x-request-id"])["attempts"] for answer in answers]
    # The floor allows three requests at a time to retry whatever the ratio says: 5 rounds x 3 x 2 tries.
    assert sum(tries) <= len(answers) * 1.2 + 5 * 3 * RETRIES
    time.sleep(2.5)  # the breaker's pause
    assert pair.chat("failing").status_code == 200, "back at once when the fault is over"


def test_a_hang_before_the_first_token_ends_in_time_and_never_runs_twice_at_once(pair: CasePlatform) -> None:
    started = time.monotonic()
    answer = pair.chat("hanging", "[[hang]] go", headers={"x-rungway-deadline-ms": "5000"})
    assert time.monotonic() - started < 30.0, "it did not wait for the request's own time-out"
    assert answer.status_code in (502, 503, 504), answer.text
    request_id = answer.headers["x-request-id"]
    assert pair.row(request_id)["output_tokens"] == 0
    attempts = sorted(pair.truth(request_id), key=lambda attempt: attempt["started_wall_ns"])
    assert 1 <= len(attempts) <= 1 + RETRIES
    for earlier, later in itertools.pairwise(attempts):
        assert earlier["ended_wall_ns"] <= later["started_wall_ns"] + 100_000_000
    eventually(lambda: pair.tenant("hanging")["running"] == 0, "no copy is left")


def test_a_hang_in_mid_stream_ends_in_an_error_frame(pair: CasePlatform) -> None:
    with pair.streaming("hanging", "[[hang=5]] go", max_tokens=20) as (answer, found):
        assert answer.status_code == 200
        got = list(found)
    assert DONE not in got
    assert "error" in got[-1] and set(got[-1]["error"]) >= {"message", "code"}
    request_id = got[0]["rungway"]["request_id"]
    row = pair.row(request_id)
    assert row["output_tokens"] == 5 == sum(attempt["output_tokens"] for attempt in pair.truth(request_id))


def replica_pids(pair: CasePlatform) -> list[int]:
    return pids(pair.process.mark, Role.REPLICA, "small")


def calls_for(pair: CasePlatform, seconds: float) -> list[httpx.Response]:
    """About 8 requests a second from two tenants, streamed or not; each with 10 s to end."""
    answers: list[httpx.Response] = []
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        batch = [
            lambda tenant=tenant, stream=stream: pair.chat(
                tenant, "[[tpot_ms=20]] go", stream=stream, headers={"x-rungway-deadline-ms": "10000"}
            )
            for tenant in ("acme", "beta")
            for stream in (False, True)
        ]
        answers += together(batch)
        time.sleep(0.25)
    return answers


def whole(answer: httpx.Response) -> bool:
    if answer.status_code != 200:
        return False
    if answer.headers["content-type"].startswith("text/event-stream"):
        return answer.text.rstrip().endswith("data: [DONE]")
    return len(answer.json()["choices"]) == 1


def test_a_stopped_replica_is_left_out_and_used_again_when_it_is_back(pair: CasePlatform) -> None:
    frozen, *others = replica_pids(pair)
    assert others
    os.kill(frozen, signal.SIGSTOP)
    try:
        answers = calls_for(pair, 6.0)
    finally:
        os.kill(frozen, signal.SIGCONT)
    failed = [answer for answer in answers if not whole(answer)]
    assert len(failed) <= 0.05 * len(answers), [outcome_of(answer) for answer in failed]
    for answer in answers:
        row = pair.row(answer.headers["x-request-id"])
        assert row["output_tokens"] == (8 if whole(answer) else row["output_tokens"])
    eventually(
        lambda: len([r for r in pair.admin("/pools")["small"]["replicas"] if r["state"] == "ready"]) == 2,
        "both replicas are ready",
        60.0,
    )

    def served() -> set[str]:
        answers = together([lambda: pair.chat("acme", "[[tpot_ms=20]] go")] * 8)
        return {attempt["replica_id"] for a in answers for attempt in pair.truth(a.headers["x-request-id"])}

    eventually(lambda: len(served()) == 2, "both replicas serve", 30.0)
    pair.settled(30.0)


def test_a_stream_whose_replica_fails_goes_on_elsewhere_without_a_seam(pair: CasePlatform) -> None:
    text = "[[tpot_ms=30]] [[tokens=60]] tell me"
    expected = text_of(pair.stream("acme", text, max_tokens=100))
    with pair.streaming("acme", text, max_tokens=100) as (answer, found):
        assert answer.status_code == 200
        got = [next(found) for _ in range(10)]
        request_id = got[0]["rungway"]["request_id"]
        running = {r["replica_id"]: r["running"] for r in pair.admin("/pools")["small"]["replicas"]}
        (busy,) = [replica_id for replica_id, count in running.items() if count]
        name = busy.rpartition("/")[2]
        (victim,) = [pid for pid in replica_pids(pair) if holds(pid, name)]
        os.kill(victim, signal.SIGKILL)
        got += list(found)
    assert got[-1] == DONE
    assert text_of(got[:-1]) == expected
    row = pair.row(request_id)
    assert row["output_tokens"] == 60 and row["attempts"] == 2
    pair.settled(60.0)
