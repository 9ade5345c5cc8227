from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rungway.policies.retry import RetryBudget


def test_the_floor_serves_a_quiet_tenant_and_the_ratio_a_busy_one() -> None:
    budget = RetryBudget(0.2, 3)
    for _ in range(3):
        assert budget.allows(1)
        budget.begin()
    assert not budget.allows(1) and not budget.allows(15) and budget.allows(20)
    budget.end()
    assert budget.allows(1)


def test_nothing_allowed_is_nothing() -> None:
    assert not RetryBudget(0.0, 0).allows(10_000)


def test_reload_keeps_running_retries() -> None:
    budget = RetryBudget(0.2, 3)
    budget.begin()
    budget.resize(0.0, 1)
    assert budget.running == 1 and not budget.allows(100)


@given(st.lists(st.booleans(), max_size=200), st.integers(0, 100))
def test_never_negative_and_never_over(steps: list[bool], active: int) -> None:
    budget = RetryBudget(0.2, 2)
    for begin in steps:
        if not begin:
            budget.end()
        elif budget.allows(active):
            budget.begin()
        assert 0 <= budget.running <= max(2, int(0.2 * active))
    for _ in range(300):
        budget.end()
    assert budget.running == 0


def test_amplification_under_full_failure() -> None:
    """100 requests in flight that all fail, retried as often as the budget lets: engine calls stay within 1.2x."""
    budget, calls = RetryBudget(0.2, 3), 100
    for _ in range(100):
        if budget.allows(100):
            budget.begin()
            calls += 1
    assert calls == 120
