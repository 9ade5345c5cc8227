"""Sequences that hold a row, sorted by what the next step does with them. Pure Python.

A step is meant to cost what changes, not what is there: a decoding sequence is touched once a step, looked at again only
where it fills a block (`Sequence.mark`), and its slice is made once.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from rungway.engine.sequence import Sequence


class Slice(NamedTuple):
    """`size` tokens of `seq` from position `seq.computed` on are computed in this step."""

    seq: Sequence
    size: int


class Running:
    """`rows` places. A sequence decodes when the one token that it wants was sampled by itself, else it prefills."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.decoding: dict[Sequence, Slice] = {}
        self.decoders: Counter[tuple[str, float]] = Counter()  # how many decode, by share and weight
        self.hungry: dict[Sequence, None] = {}  # have no block for their next token
        self.read = 0  # tokens computed of those that decode: what their attention reads in a step
        self._all: dict[Sequence, None] = {}  # in order of admission
        self._bands: Counter[int] = Counter()
        self._prefilling: list[tuple[int, int, Sequence]] = []  # by (priority, arrival)
        self._free = list(range(rows - 1, -1, -1))

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._all)

    @property
    def rows_free(self) -> int:
        return len(self._free)

    @property
    def least_urgent(self) -> int | None:
        """The last band of which something runs."""
        return max(self._bands, default=None)

    @property
    def prefills(self) -> int:
        return len(self._prefilling)

    def prefilling(self) -> Iterator[Sequence]:
        """Most urgent first, then by age."""
        return (seq for _, _, seq in self._prefilling)

    def enter(self, seq: Sequence) -> None:
        """Takes a row for a sequence that was admitted; its blocks are there."""
        seq.row = self._free.pop()
        seq.mark = 0
        self._all[seq] = None
        self._bands[seq.priority] += 1
        if _decodes(seq):
            self._start_decoding(seq)
        else:
            insort(self._prefilling, _place(seq))

    def leave(self, seq: Sequence) -> None:
        """Gives the row back."""
        self._free.append(seq.row)
        seq.row = -1
        del self._all[seq]
        self._bands[seq.priority] -= 1
        if not self._bands[seq.priority]:
            del self._bands[seq.priority]
        self.hungry.pop(seq, None)
        if self.decoding.pop(seq, None) is None:
            self._drop_prefill(seq)
            return
        self.read -= seq.computed
        seq.charged = max(seq.charged, seq.computed)  # while it decoded, it was charged with all others of its share
        who = (seq.share, seq.weight)
        self.decoders[who] -= 1
        if not self.decoders[who]:
            del self.decoders[who]

    def moved(self, seq: Sequence, room: int, block_tokens: int) -> None:
        """Tokens were computed. `room` = positions that its blocks hold. Call it for each prefill, and for a decoding
        sequence that has reached its mark."""
        if seq not in self.decoding:
            if not _decodes(seq):
                return
            self._drop_prefill(seq)
            self._start_decoding(seq)
        seq.mark = (seq.computed // block_tokens + 1) * block_tokens
        if seq.computed >= room:
            self.hungry[seq] = None

    def problems(self) -> Iterator[str]:
        """What is wrong, recounted."""
        rows = sorted([*self._free, *(seq.row for seq in self._all)])
        if rows != list(range(self.rows)):
            yield f"rows are lost or doubled: {rows}"
        if self._bands != Counter(seq.priority for seq in self._all):
            yield "the count of running bands is wrong"
        prefilling = [seq for _, _, seq in self._prefilling]
        if self._prefilling != sorted(map(_place, prefilling)):
            yield "prefills are out of order"
        if {*self.decoding, *prefilling} != set(self._all) or len(self.decoding) + len(prefilling) != len(self._all):
            yield "running sequences are not split into decoding and prefilling"
        if self.read != sum(seq.computed for seq in self.decoding):
            yield f"{self.read} is not what the decoding sequences have computed"
        if self.decoders != Counter((seq.share, seq.weight) for seq in self.decoding):
            yield "the count of decoding sequences by share is wrong"
        yield from (f"{seq.name} decodes and wants {seq.wanted} tokens" for seq in self.decoding if seq.wanted > 1)

    def _start_decoding(self, seq: Sequence) -> None:
        self.decoding[seq] = Slice(seq, 1)
        self.read += seq.computed
        self.decoders[seq.share, seq.weight] += 1

    def _drop_prefill(self, seq: Sequence) -> None:
        del self._prefilling[bisect_left(self._prefilling, _place(seq))]


def _place(seq: Sequence) -> tuple[int, int, Sequence]:
    return (seq.priority, seq.arrival, seq)  # arrivals are unique: sequences are never compared


def _decodes(seq: Sequence) -> bool:
    """Whether it wants one token, which it has sampled or is about to."""
    return seq.wanted <= 1 and seq.computed >= seq.context
