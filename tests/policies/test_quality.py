"""P(ok): monotone in rank, safe on strange features; and the scores that its training reports."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rungway.policies.features import NAMES, features
from rungway.policies.quality import load_default, p_of
from rungway.simulate import train_quality as training

MODEL = load_default()
numbers = st.floats(allow_nan=True, allow_infinity=True)


@given(st.lists(numbers, max_size=len(NAMES) + 1), st.integers(0, 4))
def test_monotone_in_rank_and_a_probability(values: list[float], top: int) -> None:
    scores = [MODEL.p_ok(rank, top, values) for rank in range(top + 1)]
    assert all(0.0 <= score <= 1.0 for score in scores)
    assert scores == sorted(scores)


@given(st.lists(numbers, min_size=len(NAMES), max_size=len(NAMES)))
def test_any_numbers_of_the_right_width(values: list[float]) -> None:
    weak, gap = MODEL.heads(values)
    assert 0.0 < weak < 1.0 and 0.0 < gap < 1.0


def test_prior_without_features() -> None:
    data = MODEL.data
    assert MODEL.p_ok(0, 1, ()) == data.prior_weak
    assert MODEL.p_ok(1, 1, (1.0,)) == pytest.approx(data.prior_weak + (1 - data.prior_weak) * data.prior_gap)
    assert MODEL.heads([math.nan] * len(NAMES)) == (data.prior_weak, data.prior_gap)


def test_a_lone_tier_is_the_top_and_middle_ranks_share_the_gap() -> None:
    assert p_of(0.5, 0.4, 0, 0) == pytest.approx(0.7)
    assert [p_of(0.5, 0.4, rank, 2) for rank in range(3)] == pytest.approx([0.5, 0.6, 0.7])
    assert p_of(0.5, 0.4, 9, 2) == pytest.approx(0.7)


def test_the_folded_form_equals_the_definition() -> None:
    values = features("What is 3 * 4? Calculate it.\nA. 7\nB. 12", turns=1, max_tokens=8)
    data = MODEL.data
    z = [
        max(-4.0, min(4.0, (value - mean) / deviation))
        for value, mean, deviation in zip(values, data.means, data.deviations, strict=True)
    ]
    for head, got in zip((data.weak, data.gap), MODEL.heads(values), strict=True):
        score = head.bias + sum(weight * part for weight, part in zip(head.weights, z, strict=True))
        assert got == pytest.approx(1 / (1 + math.exp(-(head.platt_slope * score + head.platt_offset))))


def test_the_shipped_file_says_how_it_was_made_and_beats_length_at_random_folds() -> None:
    made = MODEL.data.made
    held, base = made["held_out"], made["baselines"]
    assert isinstance(held, dict) and isinstance(base, dict)
    for name in ("mmlu", "gsm8k"):
        assert held["random_folds"][name]["apgr"] > base[name]["length_apgr"]
    assert held["random_folds"]["ece_weak"] <= 0.05 and held["random_folds"]["ece_top"] <= 0.05
    assert held["subject_left_out"]["ece_weak"] <= 0.05 and held["subject_left_out"]["ece_top"] <= 0.05
    page = (Path(__file__).parents[2] / "docs/router.md").read_text("utf-8")
    for figures in (held["random_folds"], held["subject_left_out"]):
        for name in ("mmlu", "gsm8k"):
            assert f"{figures[name]['apgr']:.3f}" in page


# -- the scores ---------------------------------------------------------------------------------------------------------


def outcomes(weak: list[int], strong: list[int]) -> training.Outcomes:
    x = np.zeros((len(weak), len(NAMES)))
    return training.Outcomes(x, np.array(weak, float), np.array(strong, float), np.array(["s"] * len(weak)))


def test_apgr_and_cpt_by_hand() -> None:
    data = outcomes([0, 1, 1, 0], [1, 1, 1, 0])  # one prompt of four gains
    gain = np.array([1.0, 0.0, 0.0, 0.0])
    assert training.apgr(gain, data) == pytest.approx((0.5 + 1 + 1 + 1) / 4)
    assert training.apgr(-gain, data) == pytest.approx(0.5 / 4)
    assert training.cpt(gain, data, 0.5) == 0.25
    assert training.cpt(-gain, data, 0.5) == 1.0


def test_a_random_order_recovers_half_the_gap() -> None:
    rng = np.random.default_rng(1)
    weak = (rng.random(20_000) < 0.6).astype(int)
    data = outcomes(list(weak), list(np.maximum(weak, rng.random(20_000) < 0.5).astype(int)))
    assert training.apgr(rng.random(20_000), data) == pytest.approx(0.5, abs=0.02)


def test_ece_by_hand() -> None:
    assert training.ece(np.full(100, 0.5), np.array([0.0, 1.0] * 50)) == pytest.approx(0.0)
    assert training.ece(np.full(100, 0.9), np.array([0.0, 1.0] * 50)) == pytest.approx(0.4)


def test_training_finds_a_planted_rule_and_calibrates_it() -> None:
    rng = np.random.default_rng(2)
    x = rng.normal(size=(4000, len(NAMES)))
    weak_p = 1 / (1 + np.exp(-(0.5 + x[:, 0])))
    weak = (rng.random(4000) < weak_p).astype(float)
    top_p = weak_p + (1 - weak_p) / (1 + np.exp(-2 * x[:, 1]))
    strong = (rng.random(4000) < top_p).astype(float)
    data = training.Outcomes(x, weak, strong, np.array(["s"] * 4000))
    p_weak, p_top = training.cross_calibrated(data, rng.integers(0, 5, 4000))
    assert np.corrcoef(p_weak, weak_p)[0, 1] > 0.97 and np.corrcoef(p_top, top_p)[0, 1] > 0.97
    assert training.ece(p_top, strong) < 0.04
    assert training.apgr(p_top - p_weak, data) > 0.6


def test_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert training.main([]) == 2
    assert "usage" in capsys.readouterr().err
