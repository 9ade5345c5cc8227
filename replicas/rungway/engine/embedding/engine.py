"""EmbeddingEngine: implements protocol.Engine for works of kind "embed", over any Encoder."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from rungway.engine.embedding.core import EmbedCore
from rungway.engine.embedding.encoder import Encoder
from rungway.engine.protocol import EngineStats, OnDeltas, Work
from rungway.engine.step_loop import StepLoop

WAITING_MAX = 65_536


class EmbeddingEngine:
    """`kv_tokens` = tokens of all inputs that requests may have here at a time; there is no cache, so it only bounds what
    the platform sends."""

    def __init__(
        self,
        encoder: Encoder,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        tokens_max: int,
        waiting_max: int = WAITING_MAX,
        clock_ns: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        """`max_num_seqs` requests share the engine; a step has `max_num_batched_tokens` tokens."""
        self.max_num_seqs = max_num_seqs
        self.kv_tokens = tokens_max
        self.dimensions = encoder.dimensions
        self._core = EmbedCore(
            encoder, max_num_batched_tokens=max_num_batched_tokens, waiting_max=waiting_max, clock_ns=clock_ns
        )
        self._steps: StepLoop[Work] = StepLoop(self._core, self._core.add, _itself)

    async def start(self, on_deltas: OnDeltas) -> None:
        self._steps.start(on_deltas)

    def submit(self, work: Work) -> None:
        self._steps.post(work)

    def cancel(self, request_id: str) -> None:
        self._steps.post(request_id)

    def stats(self) -> EngineStats:
        return self._core.stats()

    def check(self) -> list[str]:
        problems = self._core.check()
        if self._steps.failure is not None:
            problems.append(f"the engine's step loop has died: {self._steps.failure}")
        return problems

    async def stop(self) -> None:
        await self._steps.stop()
        await asyncio.sleep(0)  # the last delivery was queued before the thread ended


def _itself(work: Work) -> Work:
    return work
