"""A sequence's way through its grammar: guide.Guide over llguidance's matcher.

Where a text can only go on in one way, the library finds all of it before each mask, so that it is spelled as the model
would spell it. That takes as long as the text is, whenever one of its tokens is sampled: a client could make every step wait
for seconds by demanding `a{50000}`. From `FORCED_MAX` bytes on the sequence goes on under the same grammar without that.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

FORCED_MAX = 1024  # bytes; about a millisecond


def forces_too_much(matcher: LLMatcher) -> bool:
    """Of a matcher that has computed its mask: it knows by then what is forced."""
    return not matcher.is_error() and len(matcher.compute_ff_bytes()) > FORCED_MAX


class GrammarGuide:
    """`words` = 32-bit words of a mask. `unforced` gives a matcher at the beginning of the same grammar that looks no further
    than the next token; None where `matcher` is of that kind."""

    __slots__ = ("_accepted", "_matcher", "_unforced", "_words")

    def __init__(self, matcher: LLMatcher, words: int, unforced: Callable[[], LLMatcher] | None = None) -> None:
        self._matcher = matcher
        self._words = words
        self._unforced = unforced
        self._accepted: list[int] = []

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
        mask = self._matcher.compute_bitmask()
        if self._unforced is not None and forces_too_much(self._matcher):
            self._matcher, self._unforced = self._unforced(), None
            self._matcher.consume_tokens(self._accepted)
            mask = self._matcher.compute_bitmask()
        words = np.frombuffer(mask, dtype=np.uint32)[: self._words]
        return np.zeros(self._words, dtype=np.uint32) if self._matcher.is_error() else words

    def accept(self, token: int) -> bool:
        if self._matcher.try_consume_tokens([token]) != 1:
            return False
        self._accepted.append(token)
        return True

    def rollback(self, count: int) -> None:
        if count:
            done = self._matcher.rollback(count)
            assert done, "more tokens taken back than were accepted"
            del self._accepted[-count:]
