"""One class of waiting requests: its tenants' lines by counter, and its account against the other classes.

The parts of `fairness.FairQueue`, which says how they work together.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from math import inf

from rungway.policies.flow import Flow, Queued

_REBASE_AT = 2.0**32  # service / weight: leaves a millionth of a token below the point


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


Judge = Callable[[Queued], Verdict]


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

    def rebase(self) -> None:
        """Take the lowest level off all counters once it is large; not during a walk. Only their differences count, and
        beyond 2^53 a float would swallow small charges and a quantum."""
        level = self.ready[0][0]
        if level <= _REBASE_AT:
            return
        for flow in self.flows.values():
            flow.counter -= level
        self.ready = sorted((flow.counter, order, flow) for _, order, flow in self.ready)
        self.level -= level

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
