"""Who is next: strict priority bands, inside a band the share (tenant) that got least for its weight, then age.

Shares are compared by virtual token counters (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024): an
input token costs 1, an output token 2, both divided by the share's weight. A share that returns from idle is lifted to
the least counter among the active ones, so that idling earns no credit.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Container, Iterable, Iterator, Set
from typing import Protocol

from rungway.engine.sequence import Sequence

INPUT_COST, OUTPUT_COST = 1.0, 2.0
SHARES_MAX = 4096  # counters kept for shares that are idle
_FEW = 64
_NOTHING = 1e-6  # of a token


class LineOrder(Protocol):
    """Who of one share's line goes next; None where all are held back for a moment."""

    def pick(self, line: deque[Sequence]) -> Sequence | None: ...


class FairQueue:
    """Waiting sequences, in each share's line by age; those that come back from running stand where they stood."""

    def __init__(self, order: LineOrder | None = None) -> None:
        """`order` None: by age inside a share."""
        self._order = order
        self._bands: dict[int, dict[str, deque[Sequence]]] = {}
        self._spent: dict[str, float] = {}
        self._owed: dict[str, float] = {}
        self._floor = 0.0
        self._size = 0
        self._forget_above = _FEW

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Sequence]:
        for band in self._bands.values():
            for line in band.values():
                yield from line

    def push(self, seq: Sequence) -> None:
        """At its place by arrival: at the end for a new one, in front for most that were preempted."""
        work = seq.group.work
        line = self._bands.setdefault(work.priority, {}).setdefault(work.share, deque())
        if not line or line[-1].arrival < seq.arrival:
            line.append(seq)
        else:
            at = next(at for at, other in enumerate(line) if other.arrival > seq.arrival)
            line.insert(at, seq)
        self._size += 1

    @property
    def band(self) -> int | None:
        """The most urgent priority that waits."""
        return min(self._bands, default=None)

    def arrive(self, share: str) -> None:
        """A share has become active: no credit for the time that it was idle."""
        self._spent[share] = max(self._spent.get(share, 0.0), self._floor)

    def head(self) -> Sequence | None:
        """The sequence to admit next, left in place: of the most urgent band the share that got least, counting what its
        admitted sequences are about to get. Where all of that share are held back (lpm.py), others may go as if its oldest
        had been admitted: as far, and no further."""
        if not self._bands:
            return None
        band = self._bands[min(self._bands)]
        if self._order is None:
            return band[self._least(band)][0]
        passed: set[str] = set()
        limit = math.inf
        while len(passed) < len(band):
            share = self._least(band, passed)
            if self.got(share) > limit:
                return None
            chosen = self._order.pick(band[share])
            if chosen is not None:
                return chosen
            limit = min(limit, self.got(share) + self._due(band[share][0]))
            passed.add(share)
        return None

    def _least(self, band: dict[str, deque[Sequence]], passed: Container[str] = ()) -> str:
        spent, owed, floor = self._spent, self._owed, self._floor
        best: tuple[float, int] | None = None
        for share, line in band.items():
            got = spent.get(share, floor) + owed.get(share, 0.0)
            if best is not None and (got > best[0] or (got == best[0] and line[0].arrival > best[1])):
                continue
            if share not in passed:
                best, chosen = (got, line[0].arrival), share
        return chosen

    def admitted(self, seq: Sequence) -> None:
        """`seq`, which `head` chose, leaves the queue to run."""
        oldest = self._bands[seq.priority][seq.share][0]
        if oldest is not seq:
            oldest.skips += 1
        self.remove(seq)
        seq.owed = self._due(seq)
        self._owed[seq.share] = self._owed.get(seq.share, 0.0) + seq.owed

    @staticmethod
    def _due(seq: Sequence) -> float:
        """What a sequence costs its share from its admission on: its tokens count for the order at once and are charged
        when computed."""
        return INPUT_COST * max(0, len(seq.tokens) - max(seq.charged, seq.computed)) / seq.weight

    def got(self, share: str) -> float:
        """A share's counter with what it owes."""
        return self._spent.get(share, self._floor) + self._owed.get(share, 0.0)

    def paid(self, seq: Sequence, tokens: int) -> None:
        """So many of the tokens that an admitted sequence owes are computed."""
        if seq.owed:
            self._settle_debt(seq, min(seq.owed, INPUT_COST * tokens / seq.weight))

    def forgive(self, seq: Sequence) -> None:
        """A sequence no longer runs: what was not computed is not owed."""
        if seq.owed:
            self._settle_debt(seq, seq.owed)

    def _settle_debt(self, seq: Sequence, part: float) -> None:
        # sums of fractions do not end at zero by themselves
        seq.owed = seq.owed - part if seq.owed - part > _NOTHING else 0.0
        left = self._owed.pop(seq.share, 0.0) - part
        if left > _NOTHING:
            self._owed[seq.share] = left

    def remove(self, seq: Sequence) -> None:
        work = seq.group.work
        band = self._bands[work.priority]
        line = band[work.share]
        if line[0] is seq:
            line.popleft()
        else:
            line.remove(seq)
        self._size -= 1
        if not line:
            del band[work.share]
        if not band:
            del self._bands[work.priority]

    def charge(self, share: str, *, inputs: float = 0.0, outputs: float = 0.0) -> None:
        """Tokens given to a share, already divided by weight. A preempted sequence is not charged again for what it
        computes twice."""
        self._spent[share] = self._spent.get(share, self._floor) + INPUT_COST * inputs + OUTPUT_COST * outputs

    def settle(self, active: Set[str]) -> None:
        """Once per step: raises the floor to the least active counter; when many have gathered, forgets idle shares at or
        below it, which would begin there anyway."""
        if active:
            self._floor = max(self._floor, min(self._spent.get(share, self._floor) for share in active))
        if len(self._spent) <= self._forget_above:
            return
        for share in [share for share in self._spent if share not in active]:
            if self._spent[share] <= self._floor or len(self._spent) > SHARES_MAX:
                del self._spent[share]
        self._forget_above = min(SHARES_MAX, 2 * len(self._spent) + _FEW)

    def problems(self, running: Iterable[Sequence]) -> list[str]:
        """What is wrong with the counters, given all that run."""
        owed: dict[str, float] = {}
        for seq in running:
            owed[seq.share] = owed.get(seq.share, 0.0) + seq.owed
        wrong = [share for share in owed | self._owed if abs(owed.get(share, 0.0) - self._owed.get(share, 0.0)) > 1e-3]
        return [f"what {share!r} owes is not what its running sequences owe" for share in wrong]
