"""Retry budget: retries are load, and load is what failed, so only a share of the traffic may be retries."""

from __future__ import annotations


class RetryBudget:
    """At most max(`floor`, `ratio` x active requests) retries at a time.

    The floor lets a quiet tenant retry at all; the ratio holds amplification to 1 + ratio when everything fails.
    """

    __slots__ = ("_floor", "_ratio", "_running")

    def __init__(self, ratio: float, floor: int) -> None:
        assert ratio >= 0 and floor >= 0
        self._ratio = ratio
        self._floor = floor
        self._running = 0

    @property
    def running(self) -> int:
        """Retries that have begun and not ended."""
        return self._running

    def allows(self, active: int) -> bool:
        """Whether one more retry may begin while `active` requests (first tries and retries) are in flight."""
        return self._running < max(self._floor, int(self._ratio * active))

    def begin(self) -> None:
        self._running += 1

    def end(self) -> None:
        """A retry ended. One `end` too many (a replayed message) is ignored rather than lent out as a free slot."""
        if self._running > 0:
            self._running -= 1

    def resize(self, ratio: float, floor: int) -> None:
        """Take new terms after a reload; running retries stay counted."""
        assert ratio >= 0 and floor >= 0
        self._ratio = ratio
        self._floor = floor
