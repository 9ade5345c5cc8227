from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rungway.policies.drain import DrainRate

S = 1_000_000_000


def test_claims_nothing_before_it_has_seen_anything() -> None:
    drain = DrainRate()
    assert drain.rate() is None
    assert drain.wait_s(10_000.0) == 0.0
    assert drain.retry_after_s(10_000.0, 0) == 1


def test_learns_the_service_rate_and_follows_it() -> None:
    drain = DrainRate()
    now = 0
    for _ in range(100):
        drain.observe(100.0, now, True)
        now += S // 10
    assert drain.rate() == pytest.approx(1000.0, rel=0.02)
    assert drain.wait_s(5000.0) == pytest.approx(5.0, rel=0.02)
    assert drain.retry_after_s(4500.0, now) in (5, 6)
    for _ in range(2000):
        drain.observe(50.0, now, True)
        now += S // 10
    assert drain.rate() == pytest.approx(500.0, rel=0.05)


def test_an_idle_pool_is_not_a_slow_pool() -> None:
    drain = DrainRate()
    now = 0
    for k in range(50):
        drain.observe(100.0, now, k < 49)
        now += S // 10
    for _ in range(100):  # one request a minute, served at once
        now += 60 * S
        drain.observe(100.0, now, False)
    assert drain.rate() == pytest.approx(1000.0, rel=0.2)


def test_a_burst_into_an_empty_pool_is_no_evidence() -> None:
    drain = DrainRate()
    for _ in range(50):
        drain.observe(1000.0, 0, True)
    assert drain.rate() is None and drain.retry_after_s(1e9, 0) == 1


def crowded_then_calm(drain: DrainRate) -> float:
    """The expected wait for 1,000 tokens of a class that had a tenth of 1,000 tokens a second for half a minute and has had
    all of them for 20 s, in which it waited for half a second now and then."""
    now = 0
    for _ in range(30):
        drain.observe(100.0, now, True)
        now += S
    for _ in range(8):
        drain.observe(250.0, now + 2 * S, True)
        now += 5 * S // 2
        drain.observe(500.0, now, False)
    return drain.wait_s(1000.0, now)


def test_what_a_crowd_did_to_a_class_goes_with_the_crowd() -> None:
    assert crowded_then_calm(DrainRate(memory_s=10.0, fades=True)) < 2.0
    assert crowded_then_calm(DrainRate()) > 3.5


@pytest.mark.parametrize("fades", [False, True])
def test_a_wait_that_ended_in_a_cancellation_does_not_make_the_pool_look_dead(fades: bool) -> None:
    drain = DrainRate(fades=fades)
    now = 0
    for _ in range(600):
        drain.observe(100.0, now, True)
        now += S // 10
    now += 3600 * S
    drain.observe(100.0, now, True)
    rate = drain.rate()
    assert rate is not None and rate > 200.0


def test_a_pool_that_stopped_is_not_believed_fast() -> None:
    drain = DrainRate()
    now = 0
    for _ in range(50):
        drain.observe(100.0, now, True)
        now += S // 10
    assert drain.wait_s(1000.0, now + 60 * S) > 5 * drain.wait_s(1000.0)
    assert drain.retry_after_s(1e6, now) == 60


@given(st.lists(st.tuples(st.floats(0, 1e6), st.integers(-S, 100 * S), st.booleans()), max_size=50), st.floats(0, 1e12))
def test_retry_after_is_always_whole_seconds_of_a_minute(steps: list[tuple[float, int, bool]], backlog: float) -> None:
    drain, now = DrainRate(), 0
    for tokens, step, waiting in steps:
        now += step
        drain.observe(tokens, now, waiting)
        assert 1 <= drain.retry_after_s(backlog, now) <= 60
        assert drain.wait_s(backlog) >= 0.0
