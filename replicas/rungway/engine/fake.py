"""The fake engine: no model, the same protocol as the native one, deterministic text at a scripted pace.

It serves tests, drills and simulation; see `fake_script.py` for what a prompt may direct. One timer drives all streams:
each step hands everything that is due to `on_deltas` in one call, so 600 streams at 5 ms a token cost one callback per
slot of 2.5 ms, not 600 tasks.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from rungway.engine.fake_core import FakeCore
from rungway.engine.fake_steps import SharedSteps
from rungway.engine.fake_stream import FakeProfile
from rungway.engine.protocol import EngineStats, OnDeltas, PrefixNews, Work


class FakeFailure(RuntimeError):
    """The profile says `fail: start`."""


class FakeEngine:
    """`Engine` over a `FakeCore`. `clock` gives monotonic nanoseconds."""

    def __init__(
        self,
        spec: FakeProfile,
        *,
        max_num_seqs: int,
        max_context: int,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        make = FakeCore if spec.step_tokens is None else SharedSteps
        self._core = make(spec, max_num_seqs=max_num_seqs, max_context=max_context)
        self._clock = clock
        self._on_deltas: OnDeltas | None = None
        self._timer: asyncio.TimerHandle | asyncio.Handle | None = None
        self._timer_ns = -1
        self.max_num_seqs = max_num_seqs
        self.kv_tokens = self._core.kv_tokens

    async def start(self, on_deltas: OnDeltas) -> None:
        """Raises FakeFailure where the profile says so."""
        if self._core.profile.fail == "start":
            raise FakeFailure("the fake engine is set to fail at start")
        self._on_deltas = on_deltas

    def submit(self, work: Work) -> None:
        assert self._on_deltas is not None, "submit before start or after stop"
        self._core.submit(work)
        self._arm()

    def cancel(self, request_id: str) -> None:
        self._core.cancel(request_id)
        self._arm()

    def stats(self) -> EngineStats:
        return self._core.stats()

    def prefix_news(self, *, full: bool) -> PrefixNews:
        return self._core.blocks.prefix_news(full=full)

    def check(self) -> list[str]:
        return self._core.check()

    async def stop(self) -> None:
        """Cancel whatever is open and deliver its last deltas. Stopping twice does nothing more."""
        if self._on_deltas is None:
            return
        for request_id in self._core.open_requests():
            self._core.cancel(request_id)
        self._step()
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._on_deltas = None

    def _arm(self) -> None:
        """Have `_step` called when the core next wants it; keeps an earlier appointment."""
        wake_ns = self._core.wake_ns()
        if wake_ns is None or self._on_deltas is None:
            return
        if self._timer is not None:
            if self._timer_ns <= wake_ns:
                return
            self._timer.cancel()
        self._timer_ns = wake_ns
        loop = asyncio.get_running_loop()
        delay_ns = wake_ns - self._clock() if wake_ns else 0
        self._timer = loop.call_later(delay_ns / 1e9, self._step) if delay_ns > 0 else loop.call_soon(self._step)

    def _step(self) -> None:
        self._timer = None
        deltas = self._core.step(self._clock())
        if deltas and self._on_deltas is not None:
            self._on_deltas(deltas)
        self._arm()
