"""Moving averages of a step's duration and of the rate of decoding."""

from __future__ import annotations

from collections.abc import Callable

_KEEP = 0.9  # weight of the past at each step


class Meter:
    """`start` before the model runs, `stop` after, or `give_up`. The rate is of the steps that decoded any."""

    def __init__(self, clock_ns: Callable[[], int]) -> None:
        self._clock_ns = clock_ns
        self._started_ns = 0
        self._running = False
        self.step_ms = 0.0
        self.decode_tokens_per_s = 0.0

    @property
    def running_s(self) -> float:
        """How long the present step has lasted; 0 between steps. Any thread may ask."""
        return (self._clock_ns() - self._started_ns) / 1e9 if self._running else 0.0

    def start(self) -> None:
        self._started_ns = self._clock_ns()
        self._running = True

    def give_up(self) -> None:
        """The step has failed: it counts for nothing."""
        self._running = False

    def stop(self, *, decoded: int) -> int:
        """The duration, ns."""
        self._running = False
        spent_ns = max(1, self._clock_ns() - self._started_ns)
        self.step_ms = _blend(self.step_ms, spent_ns / 1e6)
        if decoded:
            self.decode_tokens_per_s = _blend(self.decode_tokens_per_s, decoded * 1e9 / spent_ns)
        return spent_ns


def _blend(past: float, now: float) -> float:
    return now if past == 0.0 else _KEEP * past + (1.0 - _KEEP) * now
