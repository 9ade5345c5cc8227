"""How fast a pool drains its queue, in weighted tokens per second, learned from its own dispatches.

Only time during which somebody waited counts: an idle pool dispatches at the rate of arrivals, which says nothing
about how fast it could go. So the estimate is tokens dispatched over time backlogged, both forgotten exponentially.
"""

from __future__ import annotations

import math

_NS_PER_S = 1_000_000_000
RETRY_AFTER_MAX_S = 60
_MEMORY_S = 30.0
# Less observed time than this is no evidence: a burst into an empty pool would look like an infinite rate.
_EVIDENCE_MIN_S = 0.2


class DrainRate:
    """Drain rate of one pool. Without evidence it claims nothing: no expected wait, and a Retry-After of one second.

    What a pool can do does not change while nobody waits, so only time backlogged counts as time. With `fades` all time does:
    the rate of one class is what the others leave it, and what a crowd of theirs did to it goes with the crowd.
    """

    __slots__ = ("_busy_s", "_fades", "_last_ns", "_memory_s", "_tokens", "_waiting")

    def __init__(self, *, memory_s: float = _MEMORY_S, fades: bool = False) -> None:
        assert memory_s > 0
        self._fades = fades
        self._memory_s = memory_s
        self._tokens = 0.0
        self._busy_s = 0.0
        self._last_ns = 0
        self._waiting = False

    def observe(self, weighted_tokens: float, now_ns: int, waiting: bool = True) -> None:
        """Work of that cost left the queue; `waiting` = something is still queued for this pool after it. A caller that
        leaves `waiting` out counts idle time as slowness, and its estimates are too long at low load."""
        if self._waiting or self._fades:
            elapsed_s = self._silence_s(now_ns) if self._waiting else max(0, now_ns - self._last_ns) / _NS_PER_S
            keep = math.exp(-elapsed_s / self._memory_s)
            self._tokens *= keep
            self._busy_s *= keep
        if self._waiting:
            self._tokens += weighted_tokens
            self._busy_s += self._silence_s(now_ns)
        self._last_ns = now_ns
        self._waiting = waiting

    def rate(self, now_ns: int | None = None) -> float | None:
        """Weighted tokens per second, or None without evidence. With `now_ns`, the silence since the last dispatch
        counts too while work waits, so that a pool that has stopped is not believed fast."""
        busy_s = self._busy_s
        if now_ns is not None and self._waiting:
            busy_s += self._silence_s(now_ns)
        if busy_s < _EVIDENCE_MIN_S or self._tokens <= 0:
            return None
        return self._tokens / busy_s

    def wait_s(self, backlog_tokens: float, now_ns: int | None = None) -> float:
        """Expected seconds until a backlog of that many weighted tokens is dispatched; 0.0 without evidence, because a
        deadline is not refused on ignorance."""
        rate = self.rate(now_ns)
        if rate is None or backlog_tokens <= 0:
            return 0.0
        return backlog_tokens / rate

    def retry_after_s(self, backlog_tokens: float, now_ns: int) -> int:
        """The same as whole seconds for a Retry-After header: rounded up, 1 to 60."""
        wait_s = self.wait_s(backlog_tokens, now_ns)
        return RETRY_AFTER_MAX_S if wait_s >= RETRY_AFTER_MAX_S else max(1, math.ceil(wait_s))

    def _silence_s(self, now_ns: int) -> float:
        """Seconds since the last dispatch, at most one memory: whoever waited then may have left unserved, and an idle
        night must not make the pool look dead."""
        return min(self._memory_s, max(0, now_ns - self._last_ns) / _NS_PER_S)
