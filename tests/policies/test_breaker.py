from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rungway.policies.breaker import TRANSITIONS, Breaker, Event, State

S = 1_000_000_000


def opened(failures: int = 3, open_s: float = 10.0) -> Breaker:
    breaker = Breaker(failures, open_s)
    for _ in range(failures):
        breaker.record(False, 0)
    assert breaker.state is State.OPEN
    return breaker


def test_only_failures_in_a_row_open_it() -> None:
    breaker = Breaker(3, 10.0)
    for ok in (False, False, True, False, False):
        breaker.record(ok, 0)
    assert breaker.allows(0)
    breaker.record(False, 0)
    assert breaker.state is State.OPEN and not breaker.allows(1)


def test_one_probe_and_its_success_closes() -> None:
    breaker = opened()
    assert not breaker.allows(10 * S - 1)
    assert breaker.retry_s(4 * S) == 6.0
    assert breaker.allows(10 * S)
    assert not breaker.allows(10 * S) and breaker.retry_s(11 * S) == 9.0
    breaker.record(True, 12 * S)
    assert breaker.state is State.CLOSED and breaker.allows(12 * S) and breaker.retry_s(12 * S) == 0.0
    breaker.record(False, 12 * S)
    assert breaker.state is State.CLOSED  # old failures do not count again


def test_a_failed_probe_opens_it_for_the_whole_time_again() -> None:
    breaker = opened()
    assert breaker.allows(10 * S)
    breaker.record(False, 11 * S)
    assert breaker.state is State.OPEN
    assert not breaker.allows(21 * S - 1) and breaker.allows(21 * S)


def test_ready_takes_no_probe_and_a_lost_or_abandoned_one_comes_back() -> None:
    breaker = opened()
    assert breaker.ready(10 * S) and breaker.ready(10 * S) and breaker.state is State.OPEN
    assert breaker.allows(10 * S) and not breaker.ready(10 * S)
    breaker.abandon()
    assert breaker.allows(11 * S)
    assert not breaker.allows(21 * S - 1) and breaker.allows(21 * S)


def test_late_results_do_not_move_an_open_breaker() -> None:
    breaker = opened()
    for ok in (True, False, False, False, False):
        breaker.record(ok, 5 * S)
    assert breaker.state is State.OPEN and breaker.allows(10 * S)


def test_the_table_is_complete() -> None:
    assert set(TRANSITIONS) == set(State)
    for state, row in TRANSITIONS.items():
        results = {Event.SUCCEEDED, Event.FAILED, Event.TRIPPED}
        assert set(row) == results | ({Event.COOLED} if state is State.OPEN else set())


@given(st.lists(st.tuples(st.sampled_from(["ok", "fail", "ask", "wait"]), st.integers(0, 7)), max_size=60))
def test_never_open_without_a_row_of_failures_and_never_for_ever(steps: list[tuple[str, int]]) -> None:
    breaker, now, row = Breaker(3, 5.0), 0, 0
    for what, amount in steps:
        before = breaker.state
        now += amount * S if what == "wait" else 0
        if what in ("ok", "fail"):
            row = row + 1 if what == "fail" else 0
            breaker.record(what == "ok", now)
        elif what == "ask":
            could = breaker.ready(now)
            assert breaker.allows(now) is could
        if before is State.CLOSED and breaker.state is State.OPEN:
            assert row >= 3
        assert 0.0 <= breaker.retry_s(now) <= 5.0
        assert breaker.ready(now + 5 * S)


def test_thresholds_are_checked() -> None:
    with pytest.raises(AssertionError):
        Breaker(0, 1.0)
