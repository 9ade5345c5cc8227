"""What waits: one request (`Queued`), and one tenant's line of them in one class (`Flow`)."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

# Ranks of late requests begin here, after all deadlines.
LATE_NS = 1 << 63


class Queued:
    """One waiting request. `band` indexes CLASS_ORDER; `cost` is its whole input, in weighted tokens, of which dispatch
    charges what is not in `cached`: so much the judge that takes it expects its replica to hold already. `deadline_ns` is
    monotonic (a large number = none); `rank_ns` orders its tenant's line: the deadline it came with, or, once it is `late`,
    behind all that are not, by arrival."""

    __slots__ = (
        "band",
        "cached",
        "cost",
        "deadline_ns",
        "enqueued_ns",
        "payload",
        "rank_ns",
        "request_id",
        "seq",
        "tenant",
        "weight",
    )

    def __init__(
        self,
        request_id: str,
        tenant: str,
        band: int,
        weight: float,
        cost: float,
        deadline_ns: int,
        enqueued_ns: int,
        payload: object = None,
    ) -> None:
        self.request_id = request_id
        self.tenant = tenant
        self.band = band
        self.weight = weight
        self.cost = cost
        self.cached = 0.0
        self.deadline_ns = deadline_ns
        self.enqueued_ns = enqueued_ns
        self.payload = payload
        self.rank_ns = deadline_ns
        self.seq = -1  # place of arrival, given by `push`: first in, first out among equal deadlines

    @property
    def late(self) -> bool:
        """It can no longer begin in time."""
        return self.rank_ns >= LATE_NS

    def relegate(self) -> None:
        """Behind all that are on time. Not while it waits in a queue: see `FairQueue.relegate`."""
        self.rank_ns = LATE_NS + self.enqueued_ns

    @property
    def charge(self) -> float:
        """What its dispatch costs its tenant now."""
        return max(0.0, self.cost - self.cached)


class Flow:
    """One tenant in one band. `counter` is service / weight; `waiting` is sorted by (rank, arrival); `passes` counts its
    dispatches since the first in line was one, `overtaken` those since a late one was (while one waits); `turn` is how
    many of these make it a late one's turn."""

    __slots__ = ("counter", "order", "overtaken", "passes", "tenant", "turn", "waiting", "weight")

    def __init__(self, tenant: str, weight: float, order: int, turn: int) -> None:
        self.tenant = tenant
        self.turn = turn
        self.overtaken = 0
        self.weight = weight
        self.order = order
        self.counter = 0.0
        self.passes = 0
        self.waiting: list[tuple[int, int, Queued]] = []

    @property
    def only_late(self) -> bool:
        """All that wait are late."""
        return self.waiting[0][2].late

    def add(self, entry: Queued) -> None:
        insort(self.waiting, (entry.rank_ns, entry.seq, entry))

    def drop(self, entry: Queued) -> None:
        del self.waiting[bisect_left(self.waiting, (entry.rank_ns, entry.seq, entry))]

    def line(self) -> Iterator[Queued]:
        """In order: who is on time by deadline, then who is late by arrival; but a late one in its turn goes first."""
        first = self._in_turn()
        if first is not None:
            yield first
        for _, _, entry in self.waiting:
            if entry is not first:
                yield entry

    def window(self, size: int) -> list[Queued]:
        """The first `size` in line that may be served in another order among themselves: a late one is not one of those
        who are on time."""
        first = self._in_turn()
        if first is not None:
            return [first]
        head = [entry for _, _, entry in self.waiting[:size]]
        return [entry for entry in head if entry.late == head[0].late]

    def served(self, entry: Queued) -> None:
        """An entry is about to be served: count who is overtaken."""
        first = next(self.line())
        self.passes = 0 if first is entry else self.passes + 1
        if entry.late:
            self.overtaken = 0
        elif self.waiting[-1][2].late:
            self.overtaken += 1

    def _in_turn(self) -> Queued | None:
        """The late entry that was overtaken often enough to go first, except before what has begun (ranks below 0)."""
        if self.overtaken < self.turn or not self.waiting[-1][2].late or self.waiting[0][0] < 0:
            return None
        return self.waiting[bisect_left(self.waiting, (LATE_NS,))][2]
