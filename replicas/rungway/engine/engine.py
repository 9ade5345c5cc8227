"""NativeEngine: a Core in a step loop (step_loop.py), with constraints compiled beside it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from rungway.engine.assemble import Sizes, directory_parts, module_parts, pick_device
from rungway.engine.blocks import BlockPool
from rungway.engine.compiling import Compiling, GrammarLimits
from rungway.engine.core import Core
from rungway.engine.drafting import Drafting, make_speculation
from rungway.engine.drafts import Speculation
from rungway.engine.grammar import Grammar
from rungway.engine.protocol import EngineStats, OnDeltas, PrefixNews, Work
from rungway.engine.published import Published
from rungway.engine.rules import DEFAULT_RULES, Rules
from rungway.engine.runner import Runner, TorchRunner
from rungway.engine.scheduler import Scheduler
from rungway.engine.scoring import rows_max
from rungway.engine.step_loop import StepLoop
from rungway.engine.tokenizer import Vocabulary

WAITING_MAX = 4096


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
            score_rows_max=rows_max(runner.vocab_size),
        )
        self._core = Core(
            runner,
            vocabulary,
            scheduler,
            context=sizes.context,
            waiting_max=waiting_max,
            clock_ns=clock_ns,
            speculation=speculation,
            step_timeout_s=rules.step_timeout_s,
        )
        self._steps: StepLoop[_Order] = StepLoop(
            self._core, lambda order: self._core.add(order.work, order.grammar), _work_of
        )
        self._compiling = Compiling(vocabulary, grammar or GrammarLimits(), self._post, self._steps.refuse)
        self._close = runner.close if isinstance(runner, TorchRunner) else None

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
        drafts_max = 0 if drafting is None else drafting.tokens_max
        wish = Sizes(
            max_num_seqs, max_context, max_num_batched_tokens, kv_blocks or 0, block_tokens, graph_rows_max, drafts_max
        )
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
        await asyncio.to_thread(self._compiling.warm)
        self._steps.start(on_deltas)

    def submit(self, work: Work) -> None:
        """A work with a constraint waits beside the step loop until that is compiled."""
        if work.sampling.constraint is None or self._steps.stopping:
            self._post(work, None)
        else:
            self._compiling.submit(work)

    def cancel(self, request_id: str) -> None:
        work = self._compiling.cancel(request_id)
        if work is not None:
            self._steps.refuse(work, None)
        else:
            self._steps.post(request_id)

    def stats(self) -> EngineStats:
        stats = self._core.stats()
        return msgspec.structs.replace(stats, waiting=stats.waiting + len(self._compiling))

    def prefix_news(self, *, full: bool) -> PrefixNews:
        return self._core.prefix_news(full=full)

    def check(self) -> list[str]:
        problems = self._core.check()
        if self._steps.failure is not None:
            problems.append(f"the engine's step loop has died: {self._steps.failure}")
        return problems

    async def stop(self) -> None:
        """Cancels what still runs, delivers the last deltas and ends the thread. A second call does nothing."""
        if not self._steps.started or self._steps.stopping:
            return
        for work in self._compiling.stop():
            self._steps.refuse(work, None)
        await self._steps.stop()
        if self._close is not None:
            await asyncio.to_thread(self._close)
        await asyncio.sleep(0)  # the last delivery was queued before the thread ended

    def _post(self, work: Work, grammar: Grammar | None) -> None:
        self._steps.post(_Order(work, grammar))


def _work_of(order: _Order) -> Work:
    return order.work
