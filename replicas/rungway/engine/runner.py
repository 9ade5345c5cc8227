"""Turns a step of the scheduler into tensors, runs the model and returns the logits that are needed.

Block tables live in one array, a row per running sequence, and change only where a sequence has grown: the work per
step in Python does not depend on how long the sequences are.

A decoding sequence with drafts is several rows of the step, one for its last known token and one for each draft, that
see one key more each. On CPU each is a sequence of its own to the attention, so that a draft changes no answer beyond what a
neighbour in the batch does. On a GPU all rows of a sequence are queries of one tile, which reads the keys once for all of
them, and so is a chunk that is no longer; the longer chunks of a step are one launch as well.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Protocol

import numpy as np
import torch

from rungway.engine.blocks import NULL_BLOCK
from rungway.engine.cuda_graphs import DecodeGraphs, Recorder
from rungway.engine.model import Batch, Decoder
from rungway.engine.ops import Span
from rungway.engine.sampler import Peaks
from rungway.engine.scheduler import Slice
from rungway.engine.sequence import Sequence

_SMALL = 8  # blocks; decodes up to this length are never split into groups


class Read(NamedTuple):
    """Logits [rows, vocabulary] behind the tokens of a prompt from position `first` on. `log_sums` [rows], where the model has
    them already."""

    seq: Sequence
    first: int
    logits: torch.Tensor
    log_sums: torch.Tensor | None


def enter(device: torch.device) -> None:
    """Makes a CUDA device that was asked for by number the one of this thread: kernels start on the thread's own."""
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)


class Step(NamedTuple):
    """`logits`: [rows, vocabulary], for each sequence whose known tokens are now all computed one row, and one more for each
    of its drafts. `peaks`: of these rows, where the model has them already. `reads`: for the prompts' log-probabilities."""

    sequences: list[Sequence]
    logits: torch.Tensor
    peaks: Peaks | None = None
    reads: Iterable[Read] = ()


class Runner(Protocol):
    """Computes slices. Implementations: TorchRunner, and scripted ones in tests of the scheduler."""

    vocab_size: int

    def run(self, step: list[Slice]) -> Step: ...


class TorchRunner:
    """A decoder with its KV cache. Used from one thread."""

    def __init__(self, model: Decoder, *, rows: int, blocks: int, block_tokens: int, blocks_per_row: int) -> None:
        """`blocks` usable ones (the null block comes on top); `rows` sequences at once of up to `blocks_per_row`."""
        self.vocab_size = model.arch.vocab_size
        self.precision = model.precision.name
        self.model = model
        self._block_tokens = block_tokens
        self._cache = model.cache(blocks + 1, block_tokens)
        self.path = f"{model.path} {model.precision.name}"
        self._graphs: DecodeGraphs | None = None
        self._tables = np.full((rows, blocks_per_row), NULL_BLOCK, dtype=np.int64)
        self._keys = torch.arange(blocks_per_row * block_tokens, device=model.device)
        self._known: list[tuple[Sequence | None, int, int]] = [(None, 0, 0)] * rows

    @torch.inference_mode()
    def run(self, step: list[Slice]) -> Step:
        """Raises RuntimeError (torch's) when the device fails; the cache content of the step is then undefined."""
        enter(self.model.device)
        for seq, _ in step:
            self._update_table(seq)
        together: list[Slice] = []
        chunks: list[Slice] = []
        for item in step:
            decodes = item.size == 1 + len(item.seq.drafts)
            (together if self._together(item.size, decodes) else chunks).append(item)
        together.sort(key=lambda item: len(item.seq.blocks))
        batch, sequences, scored = self._batch(together, chunks)
        logits = None if self._graphs is None or scored else self._graphs.run(batch)
        if logits is not None:
            return Step(sequences, logits)
        logits, peaks = self.model.forward(batch, self._cache), self.model.peaks
        return _split(sequences, logits, peaks, scored) if scored else Step(sequences, logits, peaks)

    @torch.inference_mode()
    def record(self, sizes: Iterable[int], recorder: Recorder, drafts: int = 0) -> None:
        """Decode steps of up to so many rows are replayed from now on, where the model allows it; with `drafts` > 0 also
        those in which a sequence has up to so many."""
        if self.model.recordable:
            width, queries = self._tables.shape[1], min(1 + drafts, self.model.queries_max)
            self._graphs = DecodeGraphs(
                self.model, self._cache, sizes=sizes, width=width, recorder=recorder, queries=queries
            )

    def close(self) -> None:
        """Ends what the model keeps outside of this process; it computes no more."""
        self.model.close()

    def _together(self, size: int, decodes: bool) -> bool:
        """Whether so many rows of a sequence go through decode attention."""
        return size <= self.model.queries_max if self.model.packs else decodes

    def _update_table(self, seq: Sequence) -> None:
        count = len(seq.blocks)
        stay = seq.preemptions + seq.rounds
        owner, known_stay, written = self._known[seq.row]
        if owner is not seq or known_stay != stay:
            written = 0
        if written != count:
            self._tables[seq.row, written:count] = seq.blocks[written:]
            # blocks that only drafts need may be others the next time
            kept = -(-len(seq.tokens) // self._block_tokens) if seq.drafts else count
            self._known[seq.row] = (seq, stay, min(kept, count))

    def _batch(self, together: list[Slice], chunks: list[Slice]) -> tuple[Batch, list[Sequence], list[_Scored]]:
        """The rows to sample come first among the outputs, then those of `_Scored`, in order."""
        ids: list[int] = []
        outputs: list[int] = []
        sequences = []
        scored = []
        for seq, size in (*together, *chunks):
            known = size - len(seq.drafts)
            if seq.wanted == known:
                outputs += range(len(ids) + known - 1, len(ids) + size)
                sequences.append(seq)
            if due := _due(seq, known):
                scored.append(_Scored(seq, due[0], [len(ids) + position - seq.computed for position in due]))
            ids += seq.tokens[seq.computed : seq.computed + known]
            ids += seq.drafts
        outputs += [row for one in scored for row in one.rows]
        sizes = np.array([size for _, size in (*together, *chunks)], dtype=np.int64)
        firsts = np.array([seq.computed for seq, _ in (*together, *chunks)], dtype=np.int64)
        owners = np.array([seq.row for seq, _ in (*together, *chunks)], dtype=np.int64)
        starts = np.concatenate([[0], sizes.cumsum()])
        rows, positions = np.repeat(owners, sizes), np.arange(starts[-1]) + np.repeat(firsts - starts[:-1], sizes)
        slots = (
            self._tables[rows, positions // self._block_tokens] * self._block_tokens + positions % self._block_tokens
        )
        count = len(together)
        if self.model.packs:
            parts = [(slice(0, count), False), (slice(count, None), True)]
            spans = [
                self._packed_span(owners[part], starts[part.start :], firsts[part] + sizes[part], chunk)
                for part, chunk in parts
                if len(owners[part])
            ]
        else:
            held = [len(seq.blocks) for seq, size in together for _ in range(size)]
            spans = self._decode_spans(held, rows[: starts[count]], positions[: starts[count]])
            spans += [
                self._chunk_span(seq, int(start), size)
                for (seq, size), start in zip(chunks, starts[count:], strict=False)
            ]
        return (
            Batch(
                ids=self._to_device(np.array(ids, dtype=np.int64)),
                positions=self._to_device(positions),
                slots=self._to_device(slots),
                outputs=self._to_device(np.array(outputs, dtype=np.int64)),
                spans=spans,
            ),
            sequences,
            scored,
        )

    def _packed_span(self, owners: np.ndarray, starts: np.ndarray, lengths: np.ndarray, chunk: bool) -> Span:
        """All rows of some sequences. `starts` [sequences + 1] or longer, in rows of the step; `lengths`: keys at the end."""
        starts = starts[: len(owners) + 1]
        most = int(np.diff(starts).max())
        width = -(-int(lengths.max()) // self._block_tokens)
        return Span(
            int(starts[0]),
            int(starts[-1]),
            self._to_device(self._tables[owners, :width]),
            self._to_device(lengths),
            None,
            chunk=chunk,
            starts=self._to_device(starts - starts[0]) if chunk or most > 1 else None,
            most=most,
        )

    def _decode_spans(self, blocks_held: list[int], rows: np.ndarray, positions: np.ndarray) -> list[Span]:
        """Rows sorted by length, `blocks_held` of each; where padding costs work, cut where the length doubles, so that
        padding stays below the useful work."""
        spans = []
        start = 0
        while start < len(rows):
            stop = len(rows)
            if self.model.decode_masks:
                most = max(_SMALL, 2 * blocks_held[start])
                stop = next((at for at in range(start, stop) if blocks_held[at] > most), stop)
            width = int(positions[start:stop].max()) // self._block_tokens + 1
            blocks = self._to_device(np.ascontiguousarray(self._tables[rows[start:stop], :width]))
            lengths = self._to_device(positions[start:stop] + 1)
            mask = self._decode_mask(lengths, width) if self.model.decode_masks else None
            spans.append(Span(start, stop, blocks, lengths, mask, chunk=False))
            start = stop
        return spans

    def _decode_mask(self, lengths: torch.Tensor, width: int) -> torch.Tensor:
        hidden = self._keys[: width * self._block_tokens] >= lengths[:, None]
        mask = torch.zeros(hidden.shape, dtype=self.model.dtype, device=self.model.device)
        return mask.masked_fill_(hidden, float("-inf"))[:, None, None]

    def _chunk_span(self, seq: Sequence, start: int, count: int) -> Span:
        width = (seq.computed + count - 1) // self._block_tokens + 1
        mask = None
        if self.model.chunk_masks:
            shape = (1, 1, count, width * self._block_tokens)
            mask = torch.full(shape, float("-inf"), dtype=self.model.dtype, device=self.model.device)
            mask.triu_(seq.computed + 1)
        blocks = self._to_device(self._tables[seq.row : seq.row + 1, :width].copy())
        lengths = self._to_device(np.array([seq.computed + count]))
        return Span(start, start + count, blocks, lengths, mask, chunk=True)

    def _to_device(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self.model.device)


class _Scored(NamedTuple):
    """The batch's `rows` hold a prompt's tokens from position `first` on, whose logits are wanted."""

    seq: Sequence
    first: int
    rows: list[int]


def _due(seq: Sequence, count: int) -> range:
    """Positions of its next `count` whose logits its prompt's log-probabilities need."""
    return range(0) if seq.scores is None else seq.scores.due(seq.computed, count)


def _split(sequences: list[Sequence], logits: torch.Tensor, peaks: Peaks | None, scored: list[_Scored]) -> Step:
    start = logits.shape[0] - sum(len(one.rows) for one in scored)
    said = Step(sequences, logits[:start], None if peaks is None else Peaks(peaks.best[:start], peaks.log_sums[:start]))
    reads = []
    for one in scored:
        end = start + len(one.rows)
        sums = None if peaks is None else peaks.log_sums[start:end]
        reads.append(Read(one.seq, one.first, logits[start:end], sums))
        start = end
    return said._replace(reads=reads)
