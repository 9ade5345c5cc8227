"""NativeEngine: the step loop in a worker thread, requests and deltas on the event loop.

The loop thread only appends to an inbox; the worker empties it between steps, so a cancellation frees its blocks before
the next step is scheduled. The worker waits when the event loop has not taken the deltas of `DELIVERIES_MAX` steps.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from rungway.engine.answer import refused
from rungway.engine.assemble import Sizes, directory_parts, module_parts, pick_device
from rungway.engine.blocks import BlockPool
from rungway.engine.compiling import Compiling, GrammarLimits
from rungway.engine.core import Core
from rungway.engine.drafting import Drafting, make_speculation
from rungway.engine.drafts import Speculation
from rungway.engine.grammar import Grammar
from rungway.engine.protocol import Delta, EngineStats, OnDeltas, PrefixNews, Work
from rungway.engine.published import Published
from rungway.engine.rules import DEFAULT_RULES, Rules
from rungway.engine.runner import Runner, TorchRunner
from rungway.engine.scheduler import Scheduler
from rungway.engine.tokenizer import Vocabulary

DELIVERIES_MAX = 64
WAITING_MAX = 4096
_WAKE_S = 0.5  # the worker looks at its stop flag at least this often


class _Order(NamedTuple):
    work: Work
    grammar: Grammar | None


class NativeEngine:
    """Implements protocol.Engine. Make one with `from_dir`, `from_module` (a ready torch module) or from any Runner."""

    def __init__(
        self,
        runner: Runner,
        vocabulary: Vocabulary,
        sizes: Sizes,
        *,
        waiting_max: int = WAITING_MAX,
        prefix_cache: bool = True,
        rules: Rules = DEFAULT_RULES,
        grammar: GrammarLimits | None = None,
        clock_ns: Callable[[], int] = time.perf_counter_ns,
        speculation: Speculation | None = None,
    ) -> None:
        self.max_num_seqs = sizes.max_num_seqs
        self.kv_tokens = sizes.kv_tokens
        self.context = sizes.context
        scheduler = Scheduler(
            BlockPool(
                sizes.kv_blocks,
                sizes.block_tokens,
                published=Published(rules.prefix_keys_max, rules.prefix_key_blocks),
                soft_quota=rules.kv_soft_quota,
            ),
            max_num_seqs=sizes.max_num_seqs,
            max_num_batched_tokens=sizes.max_num_batched_tokens,
            prefix_cache=prefix_cache,
            rules=rules,
        )
        self._core = Core(
            runner,
            vocabulary,
            scheduler,
            context=sizes.context,
            waiting_max=waiting_max,
            clock_ns=clock_ns,
            speculation=speculation,
        )
        self._compiling = Compiling(vocabulary, grammar or GrammarLimits(), self._post, self._refuse)
        self._inbox: deque[_Order | str] = deque()
        self._wake = threading.Condition()
        self._deliveries = threading.BoundedSemaphore(DELIVERIES_MAX)
        self._stopping = False
        self._failure: str | None = None  # why the step loop died
        self._close = runner.close if isinstance(runner, TorchRunner) else None
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._on_deltas: OnDeltas | None = None

    @classmethod
    def from_dir(
        cls,
        path: Path,
        *,
        max_num_seqs: int,
        max_context: int,
        max_num_batched_tokens: int,
        kv_blocks: int | None,
        block_tokens: int,
        dtype: str = "auto",
        device: str = "auto",
        ranks: int = 1,
        ranks_timeout_s: float = 60.0,
        prefix_cache: bool = True,
        rules: Rules = DEFAULT_RULES,
        grammar: GrammarLimits | None = None,
        drafting: Drafting | None = None,
        graph_rows_max: int = 256,
    ) -> NativeEngine:
        """Loads a model directory (loader.py). `kv_blocks` None = what `max_num_seqs` full contexts need, within a
        memory bound. `dtype`: auto | float32 | bfloat16; auto takes what computes faster here (see
        precision.py). `ranks`: processes that the model is divided over (parallel/lead.py). `drafting` None = no
        speculative decoding. Raises ModelError."""
        wish = Sizes(max_num_seqs, max_context, max_num_batched_tokens, kv_blocks or 0, block_tokens, graph_rows_max)
        where = pick_device(device)
        parts = directory_parts(path, wish, dtype, where, ranks=ranks, ranks_timeout_s=ranks_timeout_s)
        speculation = make_speculation(drafting, *parts[1:], dtype, where)
        return cls(*parts, prefix_cache=prefix_cache, rules=rules, grammar=grammar, speculation=speculation)

    @classmethod
    def from_module(
        cls,
        module: Any,
        vocabulary: Vocabulary,
        *,
        max_num_seqs: int,
        max_context: int,
        max_num_batched_tokens: int,
        kv_blocks: int | None,
        block_tokens: int,
        dtype: str = "float32",
        device: str = "cpu",
        prefix_cache: bool = True,
        rules: Rules = DEFAULT_RULES,
        grammar: GrammarLimits | None = None,
    ) -> NativeEngine:
        """From a transformers causal language model in memory: its `config` and its tensors are read, not its code."""
        wish = Sizes(max_num_seqs, max_context, max_num_batched_tokens, kv_blocks or 0, block_tokens)
        parts = module_parts(module, vocabulary, wish, dtype, pick_device(device))
        return cls(*parts, prefix_cache=prefix_cache, rules=rules, grammar=grammar)

    async def start(self, on_deltas: OnDeltas) -> None:
        assert self._thread is None, "an engine starts once"
        self._loop = asyncio.get_running_loop()
        self._on_deltas = on_deltas
        await asyncio.to_thread(self._compiling.warm)
        self._thread = threading.Thread(target=self._work, name="engine", daemon=True)
        self._thread.start()

    def submit(self, work: Work) -> None:
        """A work with a constraint waits beside the step loop until that is compiled."""
        if work.sampling.constraint is None or self._stopping:
            self._post(work)
        else:
            self._compiling.submit(work)

    def cancel(self, request_id: str) -> None:
        work = self._compiling.cancel(request_id)
        if work is not None:
            self._refuse(work, None)
        else:
            self._post(request_id)

    def stats(self) -> EngineStats:
        stats = self._core.stats()
        return msgspec.structs.replace(stats, waiting=stats.waiting + len(self._compiling))

    def prefix_news(self, *, full: bool) -> PrefixNews:
        return self._core.prefix_news(full=full)

    def check(self) -> list[str]:
        problems = self._core.check()
        if self._failure is not None:
            problems.append(f"the engine's step loop has died: {self._failure}")
        return problems

    async def stop(self) -> None:
        """Cancels what still runs, delivers the last deltas and ends the thread. A second call does nothing."""
        if self._thread is None or self._stopping:
            return
        for work in self._compiling.stop():
            self._refuse(work, None)
        with self._wake:
            self._stopping = True
            self._wake.notify()
        while self._thread.is_alive():
            await asyncio.to_thread(self._thread.join, _WAKE_S)
        if self._close is not None:
            await asyncio.to_thread(self._close)
        await asyncio.sleep(0)  # the last delivery was queued before the thread ended

    def _post(self, item: Work | str, grammar: Grammar | None = None) -> None:
        order = item if isinstance(item, str) else _Order(item, grammar)
        with self._wake:
            if self._failure is None:
                self._inbox.append(order)
                self._wake.notify()
                return
        if isinstance(item, Work):
            self._refuse(item, self._failure)

    def _refuse(self, work: Work, why: str | None) -> None:
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
        if error is None:
            return self._drain() + self._core.end_all()
        failure = f"engine failure: {type(error).__name__}: {error}"
        with self._wake:
            self._failure = failure  # from here on `submit` answers for itself
            left, self._inbox = self._inbox, deque()
        ends = self._core.end_all(failure)
        told = {delta.request_id for delta in ends}
        unseen = [item.work for item in left if isinstance(item, _Order) and item.work.request_id not in told]
        return ends + [delta for work in unseen for delta in refused(work, failure)]

    def _steps(self) -> None:
        while not self._stopping:
            deltas = self._drain()
            try:
                if self._core.busy:
                    deltas += self._core.step()
            finally:
                self._deliver(deltas)
            with self._wake:
                if not (self._inbox or self._core.busy or self._stopping):
                    self._wake.wait(_WAKE_S)

    def _drain(self) -> list[Delta]:
        deltas: list[Delta] = []
        while self._inbox:
            item = self._inbox[0]  # stays there until it is dealt with, for `_last_words`
            deltas += self._core.cancel(item) if isinstance(item, str) else self._core.add(item.work, item.grammar)
            self._inbox.popleft()
        return deltas

    def _deliver(self, deltas: list[Delta]) -> None:
        if not deltas:
            return
        assert self._loop is not None
        while not self._deliveries.acquire(timeout=_WAKE_S):
            if self._loop.is_closed():
                return
        try:
            self._loop.call_soon_threadsafe(self._hand_over, deltas)
        except RuntimeError:  # the loop was closed without stop(): nobody is left to tell
            self._stopping = True

    def _hand_over(self, deltas: list[Delta]) -> None:
        self._deliveries.release()
        assert self._on_deltas is not None
        self._on_deltas(deltas)
