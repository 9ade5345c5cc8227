"""Who is next: strict priority bands, inside a band the share (tenant) that got least for its weight, then age.

Shares are compared by virtual token counters (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024): an
input token costs 1, an output token 2, both divided by the share's weight. A share that returns from idle is lifted to
the least counter among the active ones, so that idling earns no credit.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Set

from rungway.engine.sequence import Sequence

INPUT_COST, OUTPUT_COST = 1.0, 2.0
SHARES_MAX = 4096  # counters kept for shares that are idle


class FairQueue:
    """Waiting sequences, in each share's line by age; those that come back from running stand where they stood."""

    def __init__(self) -> None:
        self._bands: dict[int, dict[str, deque[Sequence]]] = {}
        self._spent: dict[str, float] = {}
        self._owed: dict[str, float] = {}
        self._floor = 0.0
        self._size = 0

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
        admitted sequences are about to get."""
        if not self._bands:
            return None
        band = self._bands[min(self._bands)]
        share = min(band, key=lambda name: (self.got(name), band[name][0].arrival))
        return band[share][0]

    def got(self, share: str) -> float:
        """A share's counter with what it owes."""
        return self._spent.get(share, self._floor) + self._owed.get(share, 0.0)

    def owe(self, sequences: Iterable[Sequence], *, anew: bool = False) -> None:
        """Sequences that were admitted: their tokens count for the order at once and are charged when computed. `anew`
        forgets what was owed before."""
        if anew:
            self._owed.clear()
        for seq in sequences:
            work = seq.group.work
            due = INPUT_COST * max(0, len(seq.tokens) - max(seq.charged, seq.computed)) / work.weight
            self._owed[work.share] = self._owed.get(work.share, 0.0) + due

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

    def charge(self, seq: Sequence, *, inputs: int, outputs: int) -> None:
        """Tokens given to a sequence. A preempted sequence is not charged again for what it computes twice."""
        work = seq.group.work
        cost = (INPUT_COST * inputs + OUTPUT_COST * outputs) / work.weight
        self._spent[work.share] = self._spent.get(work.share, self._floor) + cost

    def settle(self, active: Set[str]) -> None:
        """Once per step: raises the floor to the least active counter and forgets idle shares at or below it."""
        if active:
            self._floor = max(self._floor, min(self._spent.get(share, self._floor) for share in active))
        idle = [share for share in self._spent if share not in active]
        for share in idle:
            if self._spent[share] <= self._floor or len(self._spent) > SHARES_MAX:
                del self._spent[share]
