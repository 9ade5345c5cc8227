"""Speculative decoding: drafts for the sequences that decode, and what became of them.

Drafts exist within one step only: made, given room by the scheduler, computed as rows of the batch, judged, gone. Hence
preemption, cancellation and failure meet none.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Protocol

from rungway.engine.pace import Offer, Pace
from rungway.engine.sampler import Row
from rungway.engine.scheduler import Slice
from rungway.engine.sequence import Sequence

_LENGTH_FRESH = 0.05  # weight of a step

RowOf = Callable[[Sequence], Row]


class Drafter(Protocol):
    """Guesses how texts go on. Used from the engine's thread only. A guess costs time when it is wrong, never an answer."""

    costs: bool  # whether making drafts takes time that has to be counted

    def propose(self, asks: Seq[tuple[Sequence, Row]], counts: Seq[int]) -> list[Offer]:
        """At most so many tokens for each; all ids must be in the vocabulary. The row is that of the next token. Raises
        RuntimeError when the device fails."""
        ...

    def forget(self, seq: Sequence) -> None:
        """The sequence has ended; nothing where it is not known."""
        ...


class Speculation:
    """The drafter with its pace, for Core. `drafted` and `accepted` count tokens since the start; `length` is a moving average
    of the drafts that a decoding sequence has in a step."""

    def __init__(self, drafter: Drafter, pace: Pace, clock_ns: Callable[[], int]) -> None:
        self.drafted = 0
        self.accepted = 0
        self.length = 0.0
        self._drafter = drafter
        self._pace = pace
        self._clock_ns = clock_ns
        self._grades: dict[Sequence, int] = {}
        self._ready_ns = 0

    def draft(self, step: list[Slice], row_of: RowOf, budget: int) -> bool:
        """Sets `drafts` of the sequences of a step that only decodes; other steps are busy enough. `budget`: tokens that
        the step may still take. True where there are any."""
        self._grades.clear()
        if all(seq.wanted == 1 for seq, _ in step):
            offers = self._offers(step, row_of, budget // len(step))
            self._grades = {seq: offer.grade for seq, offer in offers.items()}
            for seq, offer in offers.items():
                seq.drafts = offer.tokens
        self._ready_ns = self._clock_ns()
        return bool(self._grades)

    def judge(self, seq: Sequence, right: int) -> None:
        """Of a sequence's drafts the first `right` were right; before they are cleared."""
        self.drafted += len(seq.drafts)
        self.accepted += right
        self._pace.judge(self._grades[seq], len(seq.drafts), right)

    def timed(self, rows: int, sequences: int) -> None:
        """A step that only decoded is done, and had so many rows."""
        self._pace.steps.learn(rows, self._clock_ns() - self._ready_ns)
        self.length += _LENGTH_FRESH * (rows / sequences - 1.0 - self.length)

    def forget(self, seq: Sequence) -> None:
        self._drafter.forget(seq)

    def _offers(self, step: list[Slice], row_of: RowOf, most: int) -> dict[Sequence, Offer]:
        """Offers of at least one draft, of as many as pay."""
        batch, pace = len(step), self._pace
        if batch > pace.batch_max:
            return {}
        # a step says one token more than its drafts, and none beyond the sequence's limit
        rooms = {seq: min(most, pace.tokens_max, seq.limit - len(seq.tokens) - 1) for seq, _ in step}
        rooms = {seq: room for seq, room in rooms.items() if room > 0}
        if not self._drafter.costs:
            offers = self._propose(rooms, row_of)
            shapes = [(offer.grade, len(offer.tokens)) for offer in offers.values()]
            count = pace.choose(batch, shapes, made=True)
            return {seq: Offer(offer.tokens[:count], offer.grade) for seq, offer in offers.items() if count}
        count = pace.choose(batch, [(0, room) for room in rooms.values()], made=False)
        if not count:
            return {}
        started = self._clock_ns()
        offers = self._propose({seq: min(room, count) for seq, room in rooms.items()}, row_of)
        spent_ns = self._clock_ns() - started
        if len(offers) == len(rooms):
            pace.drafts.learn(len(rooms), spent_ns // count)
        pace.prepared(0 if len(offers) == len(rooms) else spent_ns)
        return offers

    def _propose(self, rooms: dict[Sequence, int], row_of: RowOf) -> dict[Sequence, Offer]:
        offers = self._drafter.propose([(seq, row_of(seq)) for seq in rooms], list(rooms.values()))
        return {seq: offer for seq, offer in zip(rooms, offers, strict=True) if offer.tokens}
