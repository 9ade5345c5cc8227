"""Turns a step of the scheduler into tensors, runs the model and returns the logits that are needed.

Block tables live in one array, a row per running sequence, and change only where a sequence has grown: the work per
step in Python does not depend on how long the sequences are.

A decoding sequence with drafts is several rows of the step, one for its last known token and one for each draft, that
share a block table and see one key more each. Verifying goes through the same operations as decoding, so that a draft
changes no answer beyond what a neighbour in the batch does.
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
        for seq, _ in step:
            self._update_table(seq)
        singles = [item.seq for item in step if item.size == 1 + len(item.seq.drafts)]
        singles.sort(key=lambda seq: len(seq.blocks))
        chunks = [item for item in step if item.size > 1 and not item.seq.drafts]
        batch, sequences, scored = self._batch(singles, chunks)
        logits = None if self._graphs is None or scored else self._graphs.run(batch)
        if logits is not None:
            return Step(sequences, logits)
        logits, peaks = self.model.forward(batch, self._cache), self.model.peaks
        return _split(sequences, logits, peaks, scored) if scored else Step(sequences, logits, peaks)

    @torch.inference_mode()
    def record(self, sizes: Iterable[int], recorder: Recorder) -> None:
        """Decode steps of up to so many rows are replayed from now on, where the model allows it."""
        if self.model.recordable:
            width = self._tables.shape[1]
            self._graphs = DecodeGraphs(self.model, self._cache, sizes=sizes, width=width, recorder=recorder)

    def close(self) -> None:
        """Ends what the model keeps outside of this process; it computes no more."""
        self.model.close()

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

    def _batch(self, singles: list[Sequence], chunks: list[Slice]) -> tuple[Batch, list[Sequence], list[_Scored]]:
        """The rows to sample come first among the outputs, then those of `_Scored`, in order."""
        places = [(seq, ahead) for seq in singles for ahead in range(1 + len(seq.drafts))]
        ids = [seq.drafts[ahead - 1] if ahead else seq.tokens[seq.computed] for seq, ahead in places]
        rows = np.array([seq.row for seq, _ in places], dtype=np.int64)
        positions = np.array([seq.computed + ahead for seq, ahead in places], dtype=np.int64)
        spans = self._decode_spans([len(seq.blocks) for seq, _ in places], rows, positions)
        outputs = [at for at, (seq, _) in enumerate(places) if seq.wanted == 1]
        sequences = [seq for seq in singles if seq.wanted == 1]
        all_rows, all_positions = [rows], [positions]
        scored = [
            _Scored(seq, seq.computed, [at]) for at, (seq, ahead) in enumerate(places) if not ahead and _due(seq, 1)
        ]
        for seq, count in chunks:
            start, first = len(ids), seq.computed
            ids += seq.tokens[first : first + count]
            all_rows.append(np.full(count, seq.row, dtype=np.int64))
            all_positions.append(np.arange(first, first + count, dtype=np.int64))
            spans.append(self._chunk_span(seq, start, count))
            if seq.wanted == count:
                outputs.append(start + count - 1)
                sequences.append(seq)
            if due := _due(seq, count):
                scored.append(_Scored(seq, due[0], [start + position - first for position in due]))
        outputs += [row for one in scored for row in one.rows]
        rows, positions = np.concatenate(all_rows), np.concatenate(all_positions)
        slots = (
            self._tables[rows, positions // self._block_tokens] * self._block_tokens + positions % self._block_tokens
        )
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
