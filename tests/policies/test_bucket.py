from __future__ import annotations

import math
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from rungway.policies.bucket import TokenBucket

S = 1_000_000_000
MINUTE = 60 * S


class BucketMachine(RuleBasedStateMachine):
    """The bucket against a model in exact fractions of a token."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 10**12
        self.limit: int | None = 60
        self.level = Fraction(60)
        self.last = self.now
        self.bucket = TokenBucket(60, self.now)

    def refill(self) -> None:
        if self.limit is None:
            return
        if self.now > self.last:
            gain = Fraction((self.now - self.last) * self.limit, MINUTE)
            self.level = min(Fraction(self.limit), self.level + gain)
            self.last = self.now
        elif self.last - self.now > MINUTE:
            self.last = self.now + MINUTE

    @rule(step=st.one_of(st.integers(0, 5 * S), st.integers(0, 3), st.just(5 * MINUTE)))
    def forward(self, step: int) -> None:
        self.now += step

    @rule(step=st.one_of(st.integers(1, S), st.just(5 * MINUTE)))
    def clock_steps_back(self, step: int) -> None:
        before = self.bucket.remaining(self.now)
        self.refill()
        self.now -= step
        assert self.bucket.remaining(self.now) == before
        self.refill()

    @rule(n=st.integers(0, 200))
    def take_if_it_fits(self, n: int) -> None:
        self.refill()
        expected = self.limit is None or (self.limit > 0 and self.level >= n)
        assert self.bucket.fits(n, self.now) is expected
        if expected:
            self.bucket.take(n, self.now)
            self.level -= n

    @rule(n=st.integers(0, 100))
    def top_up(self, n: int) -> None:
        self.refill()
        self.bucket.take(n, self.now)
        self.level -= n

    @rule(n=st.integers(0, 100))
    def give_back(self, n: int) -> None:
        self.refill()
        self.bucket.give_back(n, self.now)
        if self.limit is not None:
            self.level = min(Fraction(self.limit), self.level + n)

    @rule(n=st.integers(0, 300))
    def drain(self, n: int) -> None:
        self.refill()
        self.bucket.drain(n, self.now)
        self.level = max(self.level - n, min(self.level, Fraction(0)))

    @rule(limit=st.one_of(st.none(), st.integers(0, 120)))
    def reload(self, limit: int | None) -> None:
        self.refill()
        used = Fraction(0) if self.limit is None else self.limit - self.level
        debt = Fraction(0) if self.limit is None else min(self.level, Fraction(0))
        self.level = -used if limit == 0 else max((limit or 0) - used, debt)
        self.limit, self.last = limit, self.now
        self.bucket.resize(limit, self.now)

    @invariant()
    def agrees(self) -> None:
        self.refill()
        left = self.bucket.remaining(self.now)
        if self.limit is None:
            assert left is None
            assert self.bucket.reset_s(self.now) == 0.0
            return
        assert left == max(0, math.floor(self.level)) <= self.limit
        wait = self.bucket.wait_s(5, self.now)
        if self.limit < 5:
            assert wait == math.inf
            return
        missing = max(Fraction(0), 5 - self.level) * 60 / self.limit
        paused = max(0, self.last - self.now) if missing else 0
        assert wait == pytest.approx(float(missing + Fraction(paused, S)), abs=2e-9)


BucketMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestBucket = BucketMachine.TestCase


def test_zero_allows_nothing_and_none_everything() -> None:
    zero, free = TokenBucket(0, 0), TokenBucket(None, 0)
    assert not zero.fits(0, MINUTE) and not zero.fits(1, 10 * MINUTE)
    assert zero.wait_s(1, 0) == math.inf and zero.remaining(MINUTE) == 0
    free.take(10**9, 0)
    assert free.fits(10**12, 0) and free.remaining(0) is None and free.wait_s(5, 0) == 0.0


def test_more_than_the_capacity_never_fits() -> None:
    bucket = TokenBucket(100, 0)
    assert bucket.wait_s(101, 0) == math.inf
    assert bucket.wait_s(100, 0) == 0.0


def test_tiny_steps_lose_nothing() -> None:
    bucket = TokenBucket(7, 0)
    bucket.take(7, 0)
    step = MINUTE // 100_000
    for k in range(1, 100_001):
        bucket.remaining(k * step)
    assert bucket.fits(7, MINUTE) and bucket.reset_s(MINUTE) == 0.0


@pytest.mark.parametrize("limit", [1, 7, 60, 6000, 199_999])
def test_waiting_the_whole_seconds_told_is_enough(limit: int) -> None:
    bucket = TokenBucket(limit, 0)
    bucket.take(limit, 0)
    wait_s = math.ceil(bucket.wait_s(1, 123))
    assert not bucket.fits(1, 123)
    assert bucket.fits(1, 123 + wait_s * S)


def test_a_burst_and_its_refill_bound_what_a_window_admits() -> None:
    bucket, admitted = TokenBucket(600, 0), 0
    for k in range(61):
        while bucket.fits(100, k * S):
            bucket.take(100, k * S)
            admitted += 100
    assert admitted <= 600 + 600


def test_oscillating_clock_gives_no_more_than_a_burst() -> None:
    bucket = TokenBucket(60, 10 * MINUTE)
    bucket.take(60, 10 * MINUTE)
    now = 10 * MINUTE
    for _ in range(50):  # jitter of less than a minute must not refill the same second twice
        assert not bucket.fits(1, now)
        now = 10 * MINUTE if now != 10 * MINUTE else 10 * MINUTE - 30 * S
    assert not bucket.fits(1, 5 * MINUTE)
    assert bucket.fits(1, 5 * MINUTE + MINUTE + S)  # a large step back pauses the refill for a minute at most


def test_a_pause_keeps_what_was_used() -> None:
    bucket = TokenBucket(60, 0)
    bucket.take(50, 0)
    bucket.resize(0, 0)
    assert not bucket.fits(1, 0) and bucket.remaining(0) == 0
    bucket.resize(60, 0)
    assert bucket.remaining(0) == 10


def test_a_smaller_limit_is_back_within_a_minute() -> None:
    bucket = TokenBucket(6000, 0)
    bucket.take(6000, 0)
    bucket.resize(60, 0)
    assert bucket.remaining(0) == 0
    assert bucket.reset_s(0) == 60.0


@given(st.lists(st.tuples(st.integers(0, 20 * 10**9), st.integers(-300, 300)), max_size=60), st.integers(1, 600))
def test_a_stepped_clock_gives_no_more_than_a_burst_and_what_time_gives(
    steps: list[tuple[int, int]], per_minute: int
) -> None:
    """The bucket is fed the monotonic clock; were it ever fed one that steps, forth and back again, then what a step forth
    gives is one burst at most."""
    now = 10**15
    bucket = TokenBucket(per_minute, now)
    taken, passed, forth = 0, 0, 0
    for passed_ns, step_s in steps:
        passed += passed_ns
        now += passed_ns + step_s * 10**9
        forth += step_s > 0
        while bucket.fits(1, now):
            bucket.take(1, now)
            taken += 1
    assert taken <= per_minute * (1 + forth) + per_minute * passed / 60e9 + 1
