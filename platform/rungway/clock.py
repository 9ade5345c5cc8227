"""The one source of time. Everything else takes `now_ns` as a parameter.

Two clocks, both integer nanoseconds: `monotonic_ns` for durations, queues, buckets and timeouts (it never
jumps), `wall_ns` for calendar windows and for rows that people read.
"""

from __future__ import annotations

import time

NS_PER_S = 1_000_000_000
NS_PER_MS = 1_000_000


def monotonic_ns() -> int:
    """Nanoseconds since an arbitrary start; never goes back."""
    return time.monotonic_ns()


def wall_ns() -> int:
    """Nanoseconds since the Unix epoch; may jump when the machine's clock is set."""
    return time.time_ns()
