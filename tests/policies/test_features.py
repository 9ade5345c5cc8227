"""Prompt features: one finite number per name, and bounded work whatever the prompt."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rungway.policies.features import HEAD_CHARS, NAMES, TAIL_CHARS, features, window


def named(text: str, turns: int = 1, max_tokens: int | None = None) -> dict[str, float]:
    return dict(zip(NAMES, features(text, turns=turns, max_tokens=max_tokens), strict=True))


@given(st.text(max_size=4000), st.integers(0, 500), st.none() | st.integers(0, 100_000))
def test_always_finite_and_shares_are_shares(text: str, turns: int, max_tokens: int | None) -> None:
    values = named(text, turns, max_tokens)
    assert all(math.isfinite(value) for value in values.values())
    assert all(0.0 <= value <= 1.0 for name, value in values.items() if name.endswith("_share"))


def test_empty_and_unpaired_surrogates() -> None:
    assert named("")["digit_share"] == 0.0
    assert math.isfinite(sum(features("a\ud800b", turns=1, max_tokens=None)))


@pytest.mark.parametrize(
    ("text", "name", "expected"),
    [
        ("12ab", "digit_share", 0.5),
        ("a+b=c", "math_share", 0.4),
        ("f();", "code_share", 0.75),
        ("ABcd", "upper_share", 0.5),
        ("aé", "non_ascii_share", 2 / 3),
        ("a,b,", "comma_share", 0.5),
        ("ab cde", "mean_word_chars", 3.0),
        ("why? how?", "log_questions", math.log(3)),
        ("a\nb", "log_newlines", math.log(2)),
        ("Pick one.\nA. x\nB. y", "choice_marks", 2.0),
        ("Summarise and translate this", "light_task", 2.0),
        ("Prove it step by step", "heavy_task", 2.0),
        ("abc", "log_chars", math.log(4)),
    ],
)
def test_values(text: str, name: str, expected: float) -> None:
    assert named(text)[name] == pytest.approx(expected)


def test_turns_and_bound() -> None:
    values = named("hello", turns=3, max_tokens=99)
    assert (values["log_turns"], values["log_max_tokens"]) == (math.log(4), math.log(100))


def test_a_long_prompt_is_judged_by_its_two_ends() -> None:
    head, tail = "h" * HEAD_CHARS, "t" * TAIL_CHARS
    assert window(head + "x" * 1_000_000 + tail) == head + tail
    middle = named(head + "9" * 10_000 + tail)
    assert middle["digit_share"] == 0.0
    assert middle["log_chars"] == pytest.approx(math.log1p(HEAD_CHARS + 10_000 + TAIL_CHARS))
