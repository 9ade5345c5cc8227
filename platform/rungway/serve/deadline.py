"""A bound on a wait, measured on the monotonic clock."""

from __future__ import annotations

from rungway.clock import NS_PER_S, monotonic_ns


class Deadline:
    """Passes `limit_s` seconds after it is made."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._start_ns = monotonic_ns()

    @property
    def elapsed_s(self) -> float:
        return (monotonic_ns() - self._start_ns) / NS_PER_S

    @property
    def passed(self) -> bool:
        return self.elapsed_s >= self.limit_s
