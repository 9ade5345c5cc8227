"""A sequence's way through its grammar: guide.Guide over llguidance's matcher."""

from __future__ import annotations

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray


class GrammarGuide:
    """`words` = 32-bit words of a mask."""

    __slots__ = ("_matcher", "_words")

    def __init__(self, matcher: LLMatcher, words: int) -> None:
        self._matcher = matcher
        self._words = words

    @property
    def complete(self) -> bool:
        """Nothing but the end may follow: the sequence ends with "stop"."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    @property
    def fits(self) -> bool:
        """What was accepted so far is a whole answer, though more may follow."""
        return self._matcher.is_accepting() and not self._matcher.is_error()

    def mask(self) -> NDArray[np.uint32]:
        """The library writes a word more than needed for some sizes; a grammar that outgrew its limits allows nothing."""
        mask = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint32)[: self._words]
        return np.zeros(self._words, dtype=np.uint32) if self._matcher.is_error() else mask

    def accept(self, token: int) -> bool:
        return self._matcher.try_consume_tokens([token]) == 1

    def rollback(self, count: int) -> None:
        if count:
            done = self._matcher.rollback(count)
            assert done, "more tokens taken back than were accepted"
