"""One class of waiting requests: its tenants' queues and counters, and its account against the other classes.

The parts of `fairness.FairQueue`, which says how they work together.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from math import inf


class Verdict(Enum):
    """The judge's answer about one entry.

    TAKE it. SKIP: not for this pool, look at the tenant's next entry. SKIP_ENTRY: the same for one whose own replicas are
    full, which are kept for it; a tenant with nothing else is passed like one at a cap. SKIP_TENANT: its tenant is at a
    cap, the next tenant's turn. STOP: it should run but does not fit now; nobody of its band and no lower band may have
    the place.
    """

    TAKE = "take"
    SKIP = "skip"
    SKIP_ENTRY = "skip_entry"
    SKIP_TENANT = "skip_tenant"
    STOP = "stop"


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


Judge = Callable[[Queued], Verdict]


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


# How many dispatches a band remembers of what its requests turned out to cost, and how many make evidence.
_COST_MEMORY = 64
_COST_EVIDENCE = 32
_COST_RATIO_MIN, _COST_RATIO_MAX = 0.1, 1000.0


class Band:
    """One class: its tenants and its account against the other classes.

    `ready` holds the flows that wait, sorted by (counter, order). `owed` is how many weighted tokens the band is behind
    (> 0) or ahead (< 0) of its minimum share. Dispatch knows only `cost`; output is charged later. So the band learns
    what its requests cost in the end per token of `cost`, and the account weighs dispatches by that. `level` is where
    deficits end when the order is by locality (`locality.py`), `floor` what the last walk lifts passed flows to at most.
    `yields`: so much service / weight a tenant with nobody on time lets those go ahead who have somebody.
    """

    __slots__ = (
        "charged",
        "depth",
        "dispatched",
        "dispatches",
        "floor",
        "flows",
        "last",
        "late",
        "level",
        "owed",
        "passed",
        "ready",
        "share",
        "weight",
        "yields",
    )

    def __init__(self, share: float) -> None:
        self.share = share
        self.yields = 0.0
        self.owed = 0.0
        self.depth = 0
        self.late = 0
        self.flows: dict[str, Flow] = {}
        self.ready: list[tuple[float, int, Flow]] = []
        self.weight = 0.0  # of the flows in `ready`
        self.last: Flow | None = None
        self.passed: list[Flow] = []
        self.level = 0.0
        self.floor = inf
        self.dispatched = 0.0
        self.charged = 0.0
        self.dispatches = 0

    def weigh(self, cost: float, like: Sequence[Band]) -> float:
        """Expected total cost of a request that dispatch charges with `cost`. While this band knows too little, what all
        of its like know together: else bands that know would pay in full for what the others have almost for nothing."""
        known = (self,) if self.dispatches >= _COST_EVIDENCE else like
        dispatched = sum(band.dispatched for band in known)
        if dispatched <= 0.0 or sum(band.dispatches for band in known) < _COST_EVIDENCE:
            return cost
        ratio = 1.0 + sum(band.charged for band in known) / dispatched
        return cost * min(max(ratio, _COST_RATIO_MIN), _COST_RATIO_MAX)

    def remember(self, cost: float) -> None:
        keep = 1.0 - 1.0 / _COST_MEMORY
        self.dispatched = self.dispatched * keep + cost
        self.charged *= keep
        self.dispatches += 1

    def enter(self, flow: Flow) -> None:
        """The flow becomes backlogged: lift it to the lowest waiting counter, or to the last to leave."""
        floor = self.ready[0][0] if self.ready else self.last.counter if self.last is not None else flow.counter
        flow.counter = max(flow.counter, floor)
        insort(self.ready, (flow.counter, flow.order, flow))
        self.weight += flow.weight

    def leave(self, flow: Flow) -> None:
        del self.ready[bisect_left(self.ready, (flow.counter, flow.order, flow))]
        self.weight = self.weight - flow.weight if self.ready else 0.0
        self.last = flow

    def charge(self, flow: Flow, weighted_tokens: float) -> None:
        self._move(flow, flow.counter + weighted_tokens / flow.weight)

    def overtake(self, flow: Flow) -> None:
        """`flow` is served although the flows passed at their caps had smaller counters: lift those to its level. A cap
        earns no credit either, and a capped flow must not hold down the level to which newcomers are lifted."""
        lowest = min(flow.counter, self.floor)
        for other in self.passed:
            if other.counter < lowest:
                self._move(other, lowest)

    def _move(self, flow: Flow, counter: float) -> None:
        if flow.waiting:
            del self.ready[bisect_left(self.ready, (flow.counter, flow.order, flow))]
            insort(self.ready, (counter, flow.order, flow))
        flow.counter = counter

    def ready_flows(self) -> Iterator[Flow]:
        """By counter; a tenant that has nobody on time as if its counter were `yields` higher."""
        if not self.late:
            yield from (flow for _, _, flow in self.ready)
            return
        behind: deque[Flow] = deque()
        for counter, _, flow in self.ready:
            if flow.only_late:
                behind.append(flow)
                continue
            while behind and behind[0].counter + self.yields <= counter:
                yield behind.popleft()
            yield flow
        yield from behind

    def walk(self, judge: Judge) -> tuple[Queued | None, bool]:
        """The first entry, by counter and deadline, that the judge takes (entry, True) or stops at (entry, False);
        (None, False) when nothing in the band may run."""
        self.passed.clear()
        self.floor = inf
        for flow in self.ready_flows():
            at_cap = False
            for entry in flow.line():
                verdict = judge(entry)
                if verdict in (Verdict.TAKE, Verdict.STOP):
                    return entry, verdict is Verdict.TAKE
                at_cap = at_cap or verdict is not Verdict.SKIP
                if verdict is Verdict.SKIP_TENANT:
                    break
            if at_cap:
                self.passed.append(flow)
        return None, False
