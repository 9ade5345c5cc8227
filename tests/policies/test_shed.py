"""Turning away between full and over-full: more with load, the lowest class first, the same for the same request."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rungway.contracts import CLASS_ORDER
from rungway.overload import Ramp, ShedSpec
from rungway.policies.shed import draw, probability, ramp_of, spread_s

SPEC = ShedSpec()
LOADS = st.floats(0, 100)


@given(LOADS, LOADS, st.booleans())
def test_more_load_turns_away_no_fewer_and_lower_classes_no_less(one: float, other: float, over: bool) -> None:
    low, high = sorted((one, other))
    for tenant_class in CLASS_ORDER:
        ramp = ramp_of(SPEC, tenant_class)
        assert 0.0 <= probability(low, ramp, over=over) <= probability(high, ramp, over=over) <= 1.0
    found = [probability(low, ramp_of(SPEC, tenant_class), over=over) for tenant_class in CLASS_ORDER]
    assert found == sorted(found)


@given(LOADS)
def test_a_tenant_inside_its_share_is_turned_away_only_where_one_over_it_surely_is(load: float) -> None:
    for tenant_class in CLASS_ORDER:
        ramp = ramp_of(SPEC, tenant_class)
        within, over = probability(load, ramp, over=False), probability(load, ramp, over=True)
        assert within <= over
        assert within == 0.0 or over == 1.0


def test_the_edges_of_a_ramp() -> None:
    ramp = Ramp(begin=1.0, full=3.0)
    assert [probability(load, ramp, over=True) for load in (0.0, 1.0, 2.0, 3.0, 9.0)] == [0.0, 0.0, 0.5, 1.0, 1.0]
    assert [probability(load, ramp, over=False) for load in (3.0, 4.0, 5.0)] == [0.0, 0.5, 1.0]


def test_draws_are_even_and_repeat() -> None:
    draws = sorted(draw(f"q{k}") for k in range(4000))
    assert all(abs(value - k / 4000) < 0.03 for k, value in enumerate(draws))
    assert draw("q17") == draw("q17")


@given(st.integers(1, 60), st.text(max_size=12))
def test_a_retry_after_is_never_too_short_nor_twice_too_long(seconds: int, name: str) -> None:
    assert seconds <= spread_s(seconds, name) <= min(60, 2 * seconds)


def test_those_turned_away_together_do_not_come_back_together() -> None:
    waits = [spread_s(10, f"q{k}") for k in range(1000)]
    assert set(waits) == set(range(10, 21))
    assert max(waits.count(wait) for wait in set(waits)) < 200
