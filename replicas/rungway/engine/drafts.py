"""Speculative decoding: drafts for the sequences that decode, and what became of them.

Drafts exist within one step only: made, given room by the scheduler, computed as rows of the batch, judged, gone. Hence
preemption, cancellation and failure meet none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seq
from typing import Protocol

from rungway.engine.pace import Offer, Pace
from rungway.engine.sampler import Row
from rungway.engine.scheduler import Slice
from rungway.engine.sequence import Sequence


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
    """The drafter with its pace, for Core. `drafted` and `accepted` count tokens since the start."""

    def __init__(self, drafter: Drafter, pace: Pace, clock_ns: Callable[[], int]) -> None:
        self.drafted = 0
        self.accepted = 0
        self._drafter = drafter
        self._pace = pace
        self._clock_ns = clock_ns
        self._grades: dict[Sequence, int] = {}

    @property
    def length(self) -> int:
        """Drafts for each sequence, as decided last."""
        return self._pace.length

    def draft(self, step: list[Slice], row_of: Callable[[Sequence], Row], budget: int) -> None:
        """Sets `drafts` of the sequences of a step that only decodes; other steps are busy enough. `budget`: tokens that
        the step may still take."""
        self._grades.clear()
        asks = [seq for seq, _ in step if seq.wanted == 1]
        if len(asks) < len(step) or len(step) > self._pace.batch_max:
            return
        most = min(self._pace.tokens_max, budget // len(step))
        # a run may end a sequence at its limit, so one token less than that may be drafted
        rooms = {seq: room for seq in asks if (room := min(most, seq.limit - len(seq.tokens) - 1)) > 0}
        if not self._drafter.costs:
            offers = self._propose(rooms, row_of)
            count = self._pace.choose(len(step), [(offer.grade, len(offer.tokens)) for offer in offers], made=True)
        elif count := self._pace.choose(len(step), [(0, room) for room in rooms.values()], made=False):
            started = self._clock_ns()
            offers = self._propose({seq: min(room, count) for seq, room in rooms.items()}, row_of)
            self._pace.drafts.learn(len(rooms), (self._clock_ns() - started) // count)
        for seq, offer in zip(rooms, offers if count else (), strict=False):
            seq.drafts = offer.tokens[:count]
            self._grades[seq] = offer.grade

    def judge(self, seq: Sequence, right: int) -> None:
        """Of a sequence's drafts the first `right` were right; before they are cleared."""
        if seq.drafts:
            self.drafted += len(seq.drafts)
            self.accepted += right
            self._pace.judge(self._grades[seq], len(seq.drafts), right)

    def timed(self, step: list[Slice], spent_ns: int) -> None:
        """How long the model took for a step that only decoded."""
        self._pace.steps.learn(sum(item.size for item in step), spent_ns)

    def forget(self, seq: Sequence) -> None:
        self._drafter.forget(seq)

    def _propose(self, rooms: dict[Sequence, int], row_of: Callable[[Sequence], Row]) -> list[Offer]:
        asks = [(seq, row_of(seq)) for seq in rooms]
        return self._drafter.propose(asks, list(rooms.values())) if asks else []
