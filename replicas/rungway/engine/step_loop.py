"""The step loop of an engine: a core in a worker thread, requests and deltas on the event loop.

The loop thread only appends to an inbox; the worker empties it between steps, so a cancellation takes effect before the
next step. The worker waits when the event loop has not taken the deltas of `DELIVERIES_MAX` steps.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from rungway.engine.answer import refused
from rungway.engine.protocol import Delta, OnDeltas, Work

DELIVERIES_MAX = 64
WAKE_S = 0.5  # the worker looks at its stop flag at least this often

T = TypeVar("T")


class Steps(Protocol):
    """What the loop needs of a core, beside the taking of a request."""

    @property
    def busy(self) -> bool: ...

    def cancel(self, request_id: str) -> list[Delta]: ...

    def end_all(self, error: str | None = None) -> list[Delta]: ...

    def step(self) -> list[Delta]: ...


class StepLoop(Generic[T]):
    """`T`: a request as the core takes it. `failure`: why the loop died, None while it lives and after `stop`."""

    def __init__(self, core: Steps, take: Callable[[T], list[Delta]], work_of: Callable[[T], Work]) -> None:
        self.failure: str | None = None
        self.stopping = False
        self._over = False  # the worker has looked into the inbox for the last time
        self._core = core
        self._take = take
        self._work_of = work_of
        self._inbox: deque[T | str] = deque()
        self._wake = threading.Condition()
        self._deliveries = threading.BoundedSemaphore(DELIVERIES_MAX)
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._on_deltas: OnDeltas | None = None

    @property
    def started(self) -> bool:
        return self._thread is not None

    def start(self, on_deltas: OnDeltas) -> None:
        """On the event loop that gets the deltas."""
        assert self._thread is None, "an engine starts once"
        self._loop = asyncio.get_running_loop()
        self._on_deltas = on_deltas
        self._thread = threading.Thread(target=self._work, name="engine", daemon=True)
        self._thread.start()

    async def stop(self) -> None:
        """Cancels what still runs, delivers the last deltas and ends the thread. A second call does nothing."""
        if self._thread is None or self.stopping:
            return
        with self._wake:
            self.stopping = True
            self._wake.notify()
        while self._thread.is_alive():
            await asyncio.to_thread(self._thread.join, WAKE_S)

    def post(self, item: T | str) -> None:
        """A request, or the id of one to cancel."""
        with self._wake:
            if not self._over:
                self._inbox.append(item)
                self._wake.notify()
                return
        if not isinstance(item, str):
            self.refuse(self._work_of(item), self.failure)

    def refuse(self, work: Work, why: str | None) -> None:
        """The end of a request that the core never sees, cancelled where there is no `why`."""
        assert self._loop is not None and self._on_deltas is not None
        self._loop.call_soon(self._on_deltas, refused(work, why))

    def _work(self) -> None:
        """The worker thread. Whatever ends it, every request gets its last delta first; what a failure ends is an error,
        for nobody asked to cancel it."""
        try:
            self._steps()
        finally:
            self._deliver(self._last_words(sys.exc_info()[1]))

    def _last_words(self, error: BaseException | None) -> list[Delta]:
        failure = None if error is None else f"engine failure: {type(error).__name__}: {error}"
        with self._wake:
            self.failure, self._over = failure, True  # from here on `post` answers for itself
            left, self._inbox = self._inbox, deque()
        ends = self._core.end_all(failure)
        told = {delta.request_id for delta in ends}
        works = [self._work_of(item) for item in left if not isinstance(item, str)]
        return ends + [delta for work in works if work.request_id not in told for delta in refused(work, failure)]

    def _steps(self) -> None:
        while not self.stopping:
            deltas = self._drain()
            try:
                if self._core.busy:
                    deltas += self._core.step()
            finally:
                self._deliver(deltas)
            with self._wake:
                if not (self._inbox or self._core.busy or self.stopping):
                    self._wake.wait(WAKE_S)

    def _drain(self) -> list[Delta]:
        deltas: list[Delta] = []
        while self._inbox:
            item = self._inbox[0]  # stays there until it is dealt with, for `_last_words`
            deltas += self._core.cancel(item) if isinstance(item, str) else self._take(item)
            self._inbox.popleft()
        return deltas

    def _deliver(self, deltas: list[Delta]) -> None:
        if not deltas:
            return
        assert self._loop is not None
        while not self._deliveries.acquire(timeout=WAKE_S):
            if self._loop.is_closed():
                return
        try:
            self._loop.call_soon_threadsafe(self._hand_over, deltas)
        except RuntimeError:  # the loop was closed without stop(): nobody is left to tell
            self.stopping = True

    def _hand_over(self, deltas: list[Delta]) -> None:
        self._deliveries.release()
        assert self._on_deltas is not None
        self._on_deltas(deltas)
