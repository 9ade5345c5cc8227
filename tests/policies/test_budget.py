from __future__ import annotations

from datetime import datetime
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rungway.contracts import Budget
from rungway.policies.budget import BudgetMeter, window

S = 1_000_000_000
DAY = 86_400 * S
ZONES = [
    "UTC",
    "Europe/Berlin",
    "America/New_York",
    "America/Havana",  # falls back from 1:00 to 0:00: midnight happens twice
    "America/St_Johns",  # until 2011 fell back at 0:01 into the day before
    "America/Sao_Paulo",  # until 2019 sprang forward at midnight: no 0:00
    "Pacific/Apia",  # skipped 2011-12-30 altogether
    "Asia/Kathmandu",
    "Africa/Cairo",
]


def ns(zone: str, *when: int) -> int:
    return int(datetime(*when, tzinfo=ZoneInfo(zone)).timestamp()) * S  # type: ignore[arg-type, misc]


@given(st.sampled_from(["day", "week", "month"]), st.sampled_from(ZONES), st.integers(0, 2_200_000_000 * S))
def test_windows_tile_time(per: str, zone: str, wall_ns: int) -> None:
    start, end = window(per, zone, wall_ns)
    assert start <= wall_ns < end
    assert window(per, zone, start) == (start, end)
    assert window(per, zone, end - 1) == (start, end)
    assert window(per, zone, end)[0] == end
    assert window(per, zone, start - 1)[1] == start if start > 0 else True


@pytest.mark.parametrize("zone", ["America/St_Johns", "America/Havana", "Pacific/Apia", "America/Sao_Paulo"])
def test_windows_tile_odd_years(zone: str) -> None:
    at = ns("UTC", 2010, 1, 1)
    while at < ns("UTC", 2012, 2, 1):
        start, end = window("day", zone, at)
        assert start <= at < end
        for inside in range(start, end, 1800 * S):
            assert window("day", zone, inside) == (start, end)
        at = end


def test_days_around_daylight_saving() -> None:
    start, end = window("day", "Europe/Berlin", ns("Europe/Berlin", 2026, 3, 29, 12))
    assert end - start == 23 * 3600 * S
    start, end = window("day", "Europe/Berlin", ns("Europe/Berlin", 2026, 10, 25, 12))
    assert end - start == 25 * 3600 * S


def test_weeks_start_on_monday_and_months_on_the_first() -> None:
    wednesday = ns("America/New_York", 2026, 1, 7, 9)
    assert window("week", "America/New_York", wednesday) == (
        ns("America/New_York", 2026, 1, 5),
        ns("America/New_York", 2026, 1, 12),
    )
    december = ns("UTC", 2026, 12, 31, 23, 59, 59)
    assert window("month", "UTC", december) == (ns("UTC", 2026, 12, 1), ns("UTC", 2027, 1, 1))


def meter(nusd: int | None, per: str = "day", at: int = DAY) -> BudgetMeter:
    return BudgetMeter(Budget(nusd=nusd, per=per), at)


def test_the_last_nano_dollar_fits_and_no_more() -> None:
    m = meter(100)
    m.hold(60, DAY)
    m.settle(60, 55, DAY)
    m.hold(20, DAY)
    assert (m.spent, m.held) == (55, 20)
    assert m.fits(25, DAY) and not m.fits(26, DAY)


def test_zero_blocks_even_what_is_free_and_a_spent_budget_does_not() -> None:
    assert not meter(0).fits(0, DAY) and not meter(0).fits(1, DAY)
    m = meter(10)
    m.settle(0, 12, DAY)
    assert m.fits(0, DAY) and not m.fits(1, DAY)
    assert meter(None).fits(10**18, DAY)


def test_a_cancelled_hold_comes_back_whole() -> None:
    m = meter(10)
    for _ in range(10):
        assert m.fits(10, DAY)
        m.hold(10, DAY)
        m.settle(10, 0, DAY)
    assert (m.spent, m.held) == (0, 0)


def test_rolls_over_with_its_holds() -> None:
    m = meter(10)
    m.hold(4, DAY)
    m.settle(0, 6, DAY)
    assert not m.fits(1, 2 * DAY - 1)
    assert m.fits(6, 2 * DAY) and not m.fits(7, 2 * DAY)
    m.settle(4, 5, 2 * DAY)
    assert (m.spent, m.held) == (5, 0)
    assert m.bounds == (2 * DAY, 3 * DAY)


def test_a_clock_that_steps_back_reopens_nothing() -> None:
    m = meter(10)
    m.settle(0, 10, 2 * DAY + 1)
    five_minutes_before = 2 * DAY + 1 - 300 * S
    assert not m.fits(1, five_minutes_before)
    assert m.reset_s(five_minutes_before) == pytest.approx((DAY + 300 * S - 1) / S)
    assert not m.fits(1, 2 * DAY + 2)  # and forward again: still the same window
    assert m.spent == 10


def test_reload_keeps_what_was_spent_and_restore_sets_it() -> None:
    m = meter(10)
    m.settle(0, 8, DAY)
    m.reload(Budget(nusd=20, per="day"), DAY)
    assert m.fits(12, DAY) and not m.fits(13, DAY)
    m.reload(Budget(nusd=20, per="month"), DAY)
    assert m.spent == 8 and m.bounds[1] == 31 * DAY
    m.restore(19, DAY)
    assert m.fits(1, DAY) and not m.fits(2, DAY)


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 60), st.integers(0, DAY // 2)), max_size=40))
def test_spent_equals_what_was_settled_in_the_window(steps: list[tuple[int, int, int]]) -> None:
    m, at, spent = meter(None), DAY, 0
    day = at // DAY
    for held, cost, step in steps:
        at += step
        if at // DAY != day:
            day, spent = at // DAY, 0
        m.hold(held, at)
        m.settle(held, cost, at)
        spent += cost
        assert (m.spent, m.held) == (spent, 0)


STEPS = st.lists(st.tuples(st.integers(0, 3 * 3600), st.integers(-300, 300), st.booleans()), max_size=60)


@given(STEPS)
def test_a_clock_that_steps_never_gives_a_window_twice(steps: list[tuple[int, int, bool]]) -> None:
    """Time passes, the clock is set by up to five minutes, the meter spends what it may, and now and then a new one takes its
    place from the rows: nobody spends more than the limit of each day that the clock has ever shown."""
    limit, wall = 100, ns("UTC", 2026, 3, 1, 23, 50)
    budget = Budget(nusd=limit, per="day")
    meter = BudgetMeter(budget, wall)
    rows: list[tuple[int, int]] = []
    newest, days = 0, {wall // DAY}
    for passed_s, step_s, restart in steps:
        wall += (passed_s + step_s) * S
        days.add(wall // DAY)
        if restart:
            meter = BudgetMeter(budget, wall)
            near = abs(newest - wall) <= 900 * S
            start, _ = meter.enter(max(newest, wall) if near else wall)
            meter.restore(sum(cost for at, cost in rows if at >= start), wall)
        while meter.fits(30, wall):
            meter.settle(0, 30, wall)
            rows.append((wall, 30))
            newest = max(newest, wall)
    assert sum(cost for _, cost in rows) <= limit * len(days)
