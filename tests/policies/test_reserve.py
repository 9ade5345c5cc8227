from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rungway.policies.reserve import SAMPLES_MAX, SAMPLES_MIN, OutputPredictor


def taught(values: list[int]) -> OutputPredictor:
    predictor = OutputPredictor()
    for value in values:
        predictor.observe("acme", "small", value)
    return predictor


def test_holds_the_bound_or_the_default_until_it_knows_better() -> None:
    predictor = taught([5] * (SAMPLES_MIN - 1))
    assert predictor.predict("acme", "small", 50, 256) == 50
    assert predictor.predict("acme", "small", None, 256) == 256
    predictor.observe("acme", "small", 5)
    assert predictor.predict("acme", "small", 50, 256) == 5
    assert predictor.predict("acme", "small", None, 256) == 5
    assert predictor.predict("acme", "large", 50, 256) == 50
    assert predictor.predict("globex", "small", 50, 256) == 50


def test_a_huge_bound_is_not_held_once_answers_are_known() -> None:
    assert taught([20] * 30).predict("acme", "small", 999_999, 256) == 20


def test_a_burst_of_requests_like_those_seen_holds_what_they_use() -> None:
    predictor = taught([50] * 40)
    held = sum(50 + predictor.predict("acme", "small", 50, 256) for _ in range(6))
    assert held == 6 * 100


def test_forgets_old_answers() -> None:
    predictor = taught([1000] * SAMPLES_MAX + [10] * SAMPLES_MAX)
    assert predictor.predict("acme", "small", None, 4096) == 10


def test_keys_are_bounded_and_the_least_recently_used_goes() -> None:
    predictor = OutputPredictor(keys_max=3)
    for _ in range(SAMPLES_MIN):
        for tenant in ("a", "b"):
            predictor.observe(tenant, "small", 7)
    predictor.observe("c", "small", 1)
    predictor.observe("a", "small", 7)
    predictor.observe("d", "small", 1)
    assert len(predictor) == 3
    assert predictor.predict("a", "small", None, 99) == 7
    assert predictor.predict("b", "small", None, 99) == 99


@given(st.lists(st.integers(0, 5000), min_size=1, max_size=300), st.integers(1, 5000))
def test_is_the_90th_percentile_of_the_last_answers_within_the_bound(values: list[int], bound: int) -> None:
    predictor = taught(values)
    got = predictor.predict("acme", "small", bound, 256)
    assert got <= bound
    last = sorted(values[-SAMPLES_MAX:])
    if len(last) >= SAMPLES_MIN and got < bound:
        assert sum(value <= got for value in last) * 10 >= 9 * len(last)
        assert sum(value < got for value in last) * 10 < 9 * len(last)
