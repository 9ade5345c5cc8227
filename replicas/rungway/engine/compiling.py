"""Constraints on their way to a grammar, on a few threads beside the step loop: no step waits for a client's schema."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

from rungway.engine.constraint import INVALID, TEXT_BYTES_MAX, ConstraintError
from rungway.engine.grammar import CACHED_MAX, Grammar, Grammars
from rungway.engine.protocol import Constraint, Work
from rungway.engine.tokenizer import Vocabulary


@dataclass(frozen=True)
class GrammarLimits:
    """`waiting_max` requests may wait for their grammar at a time, each of them at most `timeout_s`."""

    text_bytes_max: int = TEXT_BYTES_MAX
    timeout_s: float = 5.0
    waiting_max: int = 256
    cached_max: int = CACHED_MAX
    threads: int = 1


class _Waiting(NamedTuple):
    work: Work
    future: Future[Grammar]
    timer: asyncio.TimerHandle


class Compiling:
    """Used on the event loop. Each work that `submit` takes comes back once: through `ready` with its grammar, through
    `refuse` with the reason, or from `cancel` or `stop`."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        limits: GrammarLimits,
        ready: Callable[[Work, Grammar], None],
        refuse: Callable[[Work, str], None],
    ) -> None:
        self._grammars = Grammars(vocabulary, cached_max=limits.cached_max, text_bytes_max=limits.text_bytes_max)
        self._limits = limits
        self._ready = ready
        self._refuse = refuse
        self._waiting: dict[str, _Waiting] = {}
        self._pool: ThreadPoolExecutor | None = None

    def __len__(self) -> int:
        return len(self._waiting)

    def warm(self) -> None:
        """Takes the vocabulary in, on the caller's thread."""
        self._grammars.warm()

    def submit(self, work: Work) -> None:
        constraint = work.sampling.constraint
        assert constraint is not None, "nothing to compile"
        grammar = self._grammars.cached(constraint)
        if grammar is not None:
            self._ready(work, grammar)
        elif work.request_id in self._waiting:
            self._refuse(work, f"request id {work.request_id} is in use")
        elif len(self._waiting) >= self._limits.waiting_max:
            self._refuse(work, "too many requests wait for their constraint to be compiled")
        else:
            self._begin(work, constraint, asyncio.get_running_loop())

    def cancel(self, request_id: str) -> Work | None:
        """Gives the work up; None where it is not here."""
        waiting = self._waiting.pop(request_id, None)
        if waiting is None:
            return None
        waiting.timer.cancel()
        waiting.future.cancel()
        return waiting.work

    def stop(self) -> list[Work]:
        """What was still waiting. What a thread is at goes on to its end, which the library's limits bound."""
        left = [work for request_id in list(self._waiting) if (work := self.cancel(request_id)) is not None]
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool = None
        return left

    def _begin(self, work: Work, constraint: Constraint, loop: asyncio.AbstractEventLoop) -> None:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._limits.threads, thread_name_prefix="grammar")
        future = self._pool.submit(self._grammars.compile, constraint)
        timer = loop.call_later(self._limits.timeout_s, self._end, work.request_id, future)
        self._waiting[work.request_id] = _Waiting(work, future, timer)

        def done(_: Future[Grammar]) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._end, work.request_id, future)

        future.add_done_callback(done)

    def _end(self, request_id: str, future: Future[Grammar]) -> None:
        """The grammar is there, or there is a reason why not, or the time is up."""
        waiting = self._waiting.get(request_id)
        if waiting is None or waiting.future is not future:
            return
        work = self.cancel(request_id)
        assert work is not None, "it was there"
        if not future.done() or future.cancelled():
            self._refuse(work, f"{INVALID}it takes longer than {self._limits.timeout_s:g} s to compile")
            return
        try:
            grammar = future.result()
        except ConstraintError as error:
            self._refuse(work, f"{INVALID}{error}")
        else:
            self._ready(work, grammar)
