"""Token bucket for requests or tokens per minute, exact to the last fraction.

The level is an integer in units of 1/60e9 of a token, so that one nanosecond of refill at a limit of L per minute is
exactly L units: no float drift, however small the steps are.
"""

from __future__ import annotations

import math

MINUTE_NS = 60_000_000_000
_NS_PER_S = 1_000_000_000
UNITS_PER_TOKEN = MINUTE_NS


class TokenBucket:
    """Capacity `per_minute`, refilled at per_minute / 60 per second, full at the start.

    `None` = unlimited; `0` = nothing ever fits. A clock that steps back refills nothing: refill pauses until the old
    time is reached again, and for one minute at most, so that a large step cannot freeze a tenant.
    """

    __slots__ = ("_last_ns", "_level", "_limit")

    def __init__(self, per_minute: int | None, now_ns: int) -> None:
        assert per_minute is None or per_minute >= 0
        self._limit = per_minute
        self._level = (per_minute or 0) * UNITS_PER_TOKEN
        self._last_ns = now_ns

    @property
    def limit(self) -> int | None:
        """Tokens per minute; None = unlimited."""
        return self._limit

    def fits(self, n: int, now_ns: int) -> bool:
        """Whether `n` tokens can be taken now without going into debt."""
        limit = self._limit
        if limit is None:
            return True
        self._refill(limit, now_ns)
        return limit > 0 and self._level >= n * UNITS_PER_TOKEN

    def take(self, n: int, now_ns: int) -> None:
        """Take `n` tokens whether they fit or not; what is missing is debt that refill pays off first."""
        limit = self._limit
        if limit is None:
            return
        self._refill(limit, now_ns)
        self._level -= n * UNITS_PER_TOKEN

    def give_back(self, n: int, now_ns: int) -> None:
        """Return `n` unused tokens; never above the capacity."""
        limit = self._limit
        if limit is None:
            return
        self._refill(limit, now_ns)
        self._level = min(self._level + n * UNITS_PER_TOKEN, limit * UNITS_PER_TOKEN)

    def wait_s(self, n: int, now_ns: int) -> float:
        """Seconds until `n` tokens fit if nothing else happens; 0.0 when they fit now, inf when they never will."""
        limit = self._limit
        if limit is None:
            return 0.0
        self._refill(limit, now_ns)
        if limit == 0 or n > limit:
            return math.inf
        missing = n * UNITS_PER_TOKEN - self._level
        return self._until(missing, limit, now_ns)

    def remaining(self, now_ns: int) -> int | None:
        """Whole tokens left, never negative; None = unlimited."""
        limit = self._limit
        if limit is None:
            return None
        self._refill(limit, now_ns)
        return max(0, self._level // UNITS_PER_TOKEN)

    def reset_s(self, now_ns: int) -> float:
        """Seconds until the bucket is full again; 0.0 for an unlimited and for a zero limit, which never change."""
        limit = self._limit
        if not limit:
            return 0.0
        self._refill(limit, now_ns)
        return self._until(limit * UNITS_PER_TOKEN - self._level, limit, now_ns)

    def resize(self, per_minute: int | None, now_ns: int) -> None:
        """Change the limit and keep what was used. Use that was legal under the old limit never becomes debt, so a
        smaller limit is back within a minute. From unlimited, whose use was not counted, the bucket starts full.
        """
        assert per_minute is None or per_minute >= 0
        old = self._limit
        if old is not None:
            self._refill(old, now_ns)
        used = 0 if old is None else old * UNITS_PER_TOKEN - self._level
        debt = 0 if old is None else min(self._level, 0)
        self._limit = per_minute
        self._last_ns = now_ns
        self._level = max((per_minute or 0) * UNITS_PER_TOKEN - used, debt)
        if per_minute == 0:
            # A paused tenant's use has to survive the pause: the level goes below zero and comes back with the limit.
            self._level = -used

    def drain(self, n: int, now_ns: int) -> None:
        """Rebuild after a restart: `n` tokens were used in the last minute. Makes no debt, because a legal minute may
        hold a burst and its refill, twice the capacity."""
        limit = self._limit
        if limit is None:
            return
        self._refill(limit, now_ns)
        self._level = max(self._level - n * UNITS_PER_TOKEN, min(self._level, 0))

    def _refill(self, limit: int, now_ns: int) -> None:
        elapsed = now_ns - self._last_ns
        if elapsed > 0:
            self._level = min(self._level + elapsed * limit, limit * UNITS_PER_TOKEN)
            self._last_ns = now_ns
        elif elapsed < -MINUTE_NS:
            self._last_ns = now_ns + MINUTE_NS

    def _until(self, missing_units: int, limit: int, now_ns: int) -> float:
        if missing_units <= 0:
            return 0.0
        pause_ns = max(0, self._last_ns - now_ns)
        return (pause_ns - (-missing_units // limit)) / _NS_PER_S
