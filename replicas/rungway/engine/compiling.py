"""Constraints on their way to a grammar, on a few threads beside the step loop: no step waits for a client's schema, and no
share (tenant) for another's. Each share has one constraint at a time in work, and they take turns, so that one that compiles
for seconds holds up its own share and one thread.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from rungway.engine.constraint import INVALID, TEXT_BYTES_MAX, ConstraintError
from rungway.engine.grammar import CACHED_MAX, Grammar, Grammars
from rungway.engine.protocol import Work
from rungway.engine.tokenizer import Vocabulary

BUSY = "constraints_full: too many requests wait for their constraint to be compiled"
_WAITS = 4  # times the limit of one compilation that a request may wait for its turn

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class GrammarLimits:
    """`waiting_max` requests may be here at a time. One compilation may take `timeout_s`, and `threads` go on at a time."""

    text_bytes_max: int = TEXT_BYTES_MAX
    timeout_s: float = 5.0
    waiting_max: int = 256
    cached_max: int = CACHED_MAX
    threads: int = 2


@dataclass(eq=False)
class _Order:
    """`future` None: it waits for its turn. `timer`: when it has taken too long, first to begin and then to compile."""

    work: Work
    timer: asyncio.TimerHandle
    future: Future[Grammar] | None = None


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
        self._orders: dict[str, _Order] = {}  # all that are here, by request
        self._lines: dict[str, deque[_Order]] = {}  # those that wait, by share, whose turn it is first
        self._working: set[str] = set()  # shares that have a thread, be it for one that was given up
        self._pool: ThreadPoolExecutor | None = None

    def __len__(self) -> int:
        return len(self._orders)

    def warm(self) -> None:
        """Takes the vocabulary in, on the caller's thread."""
        self._grammars.warm()

    def submit(self, work: Work) -> None:
        constraint = work.sampling.constraint
        assert constraint is not None, "nothing to compile"
        grammar = self._grammars.cached(constraint)
        if grammar is not None:
            self._ready(work, grammar)
        elif work.request_id in self._orders:
            self._refuse(work, f"request id {work.request_id} is in use")
        elif len(self._orders) >= self._limits.waiting_max and not self._make_room(work.share):
            self._refuse(work, BUSY)
        else:
            wait_s = _WAITS * self._limits.timeout_s
            timer = asyncio.get_running_loop().call_later(wait_s, self._give_up, work.request_id, BUSY)
            order = self._orders[work.request_id] = _Order(work, timer)
            self._lines.setdefault(work.share, deque()).append(order)
            self._begin()

    def cancel(self, request_id: str) -> Work | None:
        """Gives the work up; None where it is not here. A thread that is at it goes on to its end."""
        order = self._orders.pop(request_id, None)
        if order is None:
            return None
        order.timer.cancel()
        if order.future is None:
            line = self._lines[order.work.share]
            line.remove(order)
            if not line:
                del self._lines[order.work.share]
        return order.work

    def stop(self) -> list[Work]:
        """What was still waiting. What a thread is at goes on to its end, which the library's limits bound."""
        left = [work for request_id in list(self._orders) if (work := self.cancel(request_id)) is not None]
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool = None
        return left

    def _make_room(self, share: str) -> bool:
        """Refuses the newest of the longest line, where that is longer than the share's own."""
        longest = max(self._lines, key=lambda name: len(self._lines[name]), default=share)
        if len(self._lines.get(longest, ())) <= len(self._lines.get(share, ())) + 1:
            return False
        self._give_up(self._lines[longest][-1].work.request_id, BUSY)
        return True

    def _begin(self) -> None:
        """Threads that are free go to the shares that have none, in turn."""
        free = self._limits.threads - len(self._working)
        for share in [share for share in self._lines if share not in self._working][: max(0, free)]:
            self._compile(self._next(share))

    def _next(self, share: str) -> _Order:
        order = self._lines[share].popleft()
        if not self._lines[share]:
            del self._lines[share]
        return order

    def _compile(self, order: _Order) -> None:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._limits.threads, thread_name_prefix="grammar")
        work, limit_s = order.work, self._limits.timeout_s
        assert work.sampling.constraint is not None
        loop = asyncio.get_running_loop()
        order.timer.cancel()
        why = f"{INVALID}it takes longer than {limit_s:g} s to compile"
        order.timer = loop.call_later(limit_s, self._give_up, work.request_id, why)
        order.future = self._pool.submit(self._grammars.compile, work.sampling.constraint)
        self._working.add(work.share)

        def done(_: Future[Grammar]) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._done, order)

        order.future.add_done_callback(done)

    def _give_up(self, request_id: str, why: str) -> None:
        work = self.cancel(request_id)
        assert work is not None, "its timer goes with it"
        self._refuse(work, why)

    def _done(self, order: _Order) -> None:
        """A thread is free again. The grammar is there, or there is a reason why not, or nobody wants it any more."""
        share = order.work.share
        self._working.discard(share)
        if share in self._lines:
            self._lines[share] = self._lines.pop(share)  # behind the others
        if self._pool is None:
            return
        if self._orders.get(order.work.request_id) is order:
            self._answer(order)
        self._begin()

    def _answer(self, order: _Order) -> None:
        assert order.future is not None
        work = self.cancel(order.work.request_id)
        assert work is not None
        error = order.future.exception()
        if error is None:
            self._ready(work, order.future.result())
        elif isinstance(error, ConstraintError):
            self._refuse(work, f"{INVALID}{error}")
        else:  # the library is foreign code, and what it fails at is this client's text
            _log.error("a constraint of kind %s made the compiler fail: %r", _kind(work), error)
            self._refuse(work, f"{INVALID}it cannot be compiled")


def _kind(work: Work) -> str:
    return "none" if work.sampling.constraint is None else work.sampling.constraint.kind
