"""Drafts from the text itself, against a search without an index."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from rungway.engine.ngram import LOOKS_MAX, MATCH_MAX, Index


def searched(tokens: list[int]) -> tuple[int, int]:
    """The latest place with the longest match, from all places; (place, length)."""
    best = (-1, 0)
    for place in range(1, len(tokens)):
        length = 0
        while length < min(place, MATCH_MAX) and tokens[place - 1 - length] == tokens[-1 - length]:
            length += 1
        if length and length >= best[1]:
            best = (place, length)
    return best


@given(st.lists(st.integers(0, 3), min_size=1, max_size=14), st.integers(1, 6))
def test_the_longest_match_that_a_search_finds(tokens: list[int], count: int) -> None:
    assert len(tokens) <= LOOKS_MAX, "every place is looked at"
    offer = Index().continued(tokens, count)
    place, length = searched(tokens)
    assert (offer.grade if offer.tokens else 0) == length
    if length:
        text = [*tokens]
        for _ in range(count):
            text.append(text[place + len(text) - len(tokens)])
        assert offer.tokens == text[len(tokens) :]


def test_growing_step_by_step_gives_what_a_new_index_gives() -> None:
    rng = random.Random(3)
    tokens = [rng.randrange(6) for _ in range(5)]
    index = Index()
    for _ in range(200):
        assert index.continued(tokens, 4) == Index().continued(tokens, 4)
        tokens += [rng.randrange(6) for _ in range(rng.randint(1, 4))]


def test_a_text_without_repetition_has_no_drafts() -> None:
    assert Index().continued(list(range(50)), 5).tokens == []
    assert Index().continued([1], 5).tokens == []
