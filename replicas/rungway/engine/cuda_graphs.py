"""Decode steps replayed as CUDA graphs: one launch for a whole forward pass instead of some hundred.

A graph is captured for each of a list of batch sizes, over static inputs. A step of decodes alone is copied into these, padded
to the next size: padding rows have length 0 and write to the null block, so they read nothing and disturb nothing. Any other
step (prompts, more rows than the largest size) runs eagerly. Where sequences may have drafts there is a second graph of each
size, for sequences of several rows. How wide the static block table is does not matter to short
sequences: the attention kernel's programs past a sequence's end return at once, with the same result bit for bit.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Protocol

import torch

from rungway.engine.blocks import NULL_BLOCK
from rungway.engine.model import Batch, Decoder
from rungway.engine.ops import Span

GRAPH_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
GRAPH_BYTES_MAX = 2 << 30
_WARM_UPS = 2  # kernels are compiled and workspaces taken before anything is captured

_log = logging.getLogger(__name__)
Action = Callable[[], torch.Tensor]


class Recorder(Protocol):
    """Makes a replay of an action that reads and writes tensors which stay where they are."""

    def record(self, action: Action) -> Action:
        """A function that does the same again and returns the same tensor."""
        ...

    def held_bytes(self) -> int:
        """Device memory that the recordings hold for themselves."""
        ...


class CudaRecorder:
    """Captures CUDA graphs that share one memory pool. Not for several threads at once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._before = torch.cuda.memory_reserved(device)

    def record(self, action: Action) -> Action:
        """Raises RuntimeError (torch's) for an action that cannot be captured."""
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UPS):
                action()
        torch.cuda.current_stream(self._device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # other threads of the process may use the device meanwhile
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            result = action()

        def replay() -> torch.Tensor:
            graph.replay()
            return result

        return replay

    def held_bytes(self) -> int:
        return max(0, torch.cuda.memory_reserved(self._device) - self._before)


class DecodeGraphs:
    """Used from the thread that runs the model."""

    def __init__(
        self,
        model: Decoder,
        cache: list[torch.Tensor],
        *,
        sizes: Iterable[int],
        width: int,
        recorder: Recorder,
        bytes_max: int = GRAPH_BYTES_MAX,
        queries: int = 1,
    ) -> None:
        """Captures now. `width`: blocks of the longest sequence. `queries` over 1: each size also for sequences of several
        rows, up to so many. Sizes are taken from small to large until the recordings hold more than `bytes_max` or one
        cannot be made; larger batches run eagerly."""
        ordered = sorted({size for size in sizes if size > 0})
        most = ordered[-1] if ordered else 0
        self._ids, self._positions, self._slots, self._lengths = (
            torch.zeros(most, dtype=torch.int64, device=model.device) for _ in range(4)
        )
        self._blocks = torch.full((most, width), NULL_BLOCK, dtype=torch.int64, device=model.device)
        self._starts = torch.zeros(most + 1, dtype=torch.int64, device=model.device)
        self._outputs = torch.arange(most, device=model.device)
        self._queries = queries
        self._replays: dict[tuple[int, bool], Action] = {}  # by rows, and whether a sequence may have several
        for key in [(size, several) for size in ordered for several in (False, True)[: min(queries, 2)]]:
            batch = self._of(*key)
            try:
                self._replays[key] = recorder.record(lambda batch=batch: model.forward(batch, cache))  # type: ignore[misc]
            except RuntimeError as error:  # what torch raises for an operation that cannot be captured
                _log.warning("decode of %d rows cannot be recorded and runs eagerly: %s", key[0], error)
                break
            if recorder.held_bytes() > bytes_max:
                break
        self.sizes = tuple(size for size, several in self._replays if not several)
        _log.info("decode is recorded for batches of %s, %d bytes", self.sizes, recorder.held_bytes())

    def run(self, batch: Batch) -> torch.Tensor | None:
        """Logits [rows, vocabulary] of a step that is recorded, None for any other. They are overwritten by the next step of
        the same padded size: read them before."""
        rows = batch.ids.shape[0]
        if len(batch.spans) != 1 or batch.spans[0].chunk or batch.outputs.shape[0] != rows:
            return None
        span, several = batch.spans[0], batch.spans[0].starts is not None
        size = next((size for size in self.sizes if size >= rows), None)
        if size is None or (size, several) not in self._replays or span.most > self._queries:
            return None
        if span.blocks.shape[1] > self._blocks.shape[1]:
            return None
        self._fill(batch, rows, size)
        return self._replays[size, several]()[:rows]

    def _of(self, size: int, several: bool) -> Batch:
        """With `several`, any division of the rows among up to as many sequences: those that are not there have no rows."""
        starts, most = (self._starts[: size + 1], self._queries) if several else (None, 1)
        span = Span(0, size, self._blocks[:size], self._lengths[:size], None, chunk=False, starts=starts, most=most)
        return Batch(
            ids=self._ids[:size],
            positions=self._positions[:size],
            slots=self._slots[:size],
            outputs=self._outputs[:size],
            spans=[span],
        )

    def _fill(self, batch: Batch, rows: int, size: int) -> None:
        span = batch.spans[0]
        sequences, width = span.blocks.shape
        self._ids[:rows].copy_(batch.ids)
        self._positions[:rows].copy_(batch.positions)
        self._slots[:rows].copy_(batch.slots)
        self._lengths[:sequences].copy_(span.lengths)
        self._blocks[:sequences, :width].copy_(span.blocks)
        self._ids[rows:size].zero_()
        self._positions[rows:size].zero_()
        self._slots[rows:size].fill_(NULL_BLOCK)  # the first place of the null block, which is block 0
        self._lengths[sequences:size].zero_()
        self._blocks[sequences:size].fill_(NULL_BLOCK)
        if span.starts is not None:
            self._starts[: sequences + 1].copy_(span.starts)
            self._starts[sequences + 1 : size + 1].fill_(rows)
