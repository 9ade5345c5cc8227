"""A pool's replicas by version and load, so that a request is placed without a look at each of them.

The choice is that of `placement.choose`, which stays the definition: it is asked about the few replicas that can win. Where
nobody holds anything of the prompt the least loaded with room wins; else it is the least loaded of all, the least loaded of
those that hold as much, for each length that is held, or the session's home. A request with a shard of its own, or with a
replica to keep away from, is rare and looks at all that it may use.

Cost: a look at the first of the line and at those of its head that are silent, broken or too full for this request; one
more such walk for each length held. A change of load costs O(log n) comparisons.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Collection, Iterable

from rungway.policies.placement import Need, ReplicaView, choose, home_of, load_of

HOMES_MAX = 4096  # sessions whose home is remembered
_ROUNDING = 1e-9

Line = list[tuple[float, str, ReplicaView]]


class Roster:
    """Replicas by id, with sums over those that are not draining: `running` sequences of `slots`, `tokens` of `room`;
    `open` of them have a free slot. A view's load and draining are changed through here only."""

    __slots__ = (
        "_factor",
        "_homes",
        "_lines",
        "_most",
        "_slots",
        "open",
        "room",
        "running",
        "slots",
        "tokens",
        "views",
    )

    def __init__(self, factor: float) -> None:
        self.views: dict[str, ReplicaView] = {}
        self._factor = factor
        self._slots: dict[str, int] = {}  # sequences that a replica takes
        self._lines: dict[str, Line] = {}
        self._most: dict[str, tuple[int, int]] = {}  # version: slots and tokens of its largest replica, at least 1
        self._homes: OrderedDict[tuple[str, str], ReplicaView] = OrderedDict()
        self.running = self.slots = self.tokens = self.room = self.open = 0

    # -- changes ----------------------------------------------------------------------------------------------

    def add(self, view: ReplicaView) -> None:
        """A replica that is not here yet."""
        assert view.replica_id not in self.views
        self.views[view.replica_id] = view
        self._slots[view.replica_id] = int(self._factor * view.max_num_seqs)
        if not view.draining:
            self._enter(view)

    def drop(self, replica_id: str) -> None:
        """Harmless for one that is not here."""
        view = self.views.pop(replica_id, None)
        if view is not None:
            if not view.draining:
                self._leave(view)
            del self._slots[replica_id]

    def drain(self, view: ReplicaView, draining: bool) -> bool:
        """Whether that was news."""
        if view.draining == draining:
            return False
        if draining:
            self._leave(view)
        view.draining = draining
        if not draining:
            self._enter(view)
        return True

    def load(self, view: ReplicaView, running: int, tokens: int) -> None:
        """It holds so much from now on, never less than nothing."""
        running, tokens = max(0, running), max(0, tokens)
        if view.draining:
            view.running, view.tokens = running, tokens
            return
        line, slots = self._lines[view.version], self._slots[view.replica_id]
        del line[bisect_left(line, (load_of(view, self._factor), view.replica_id, view))]
        self.running += running - view.running
        self.tokens += tokens - view.tokens
        self.open += (running < slots) - (view.running < slots)
        view.running, view.tokens = running, tokens
        insort(line, (load_of(view, self._factor), view.replica_id, view))

    def stretch(self, factor: float) -> None:
        """Another share of the batch is admitted after a reload."""
        if factor == self._factor:
            return
        listed = [view for view in self.views.values() if not view.draining]
        for view in listed:
            self._leave(view)
        self._factor = factor
        for view in self.views.values():
            self._slots[view.replica_id] = int(factor * view.max_num_seqs)
        for view in listed:
            self._enter(view)

    def _enter(self, view: ReplicaView) -> None:
        insort(self._lines.setdefault(view.version, []), (load_of(view, self._factor), view.replica_id, view))
        slots, room = self._most.get(view.version, (1, 1))
        self._most[view.version] = max(slots, self._slots[view.replica_id]), max(room, view.kv_tokens)
        self._count(view, 1)

    def _leave(self, view: ReplicaView) -> None:
        line = self._lines[view.version]
        del line[bisect_left(line, (load_of(view, self._factor), view.replica_id, view))]
        self._count(view, -1)
        if line:
            here = [each for _, _, each in line]
            slots = max(self._slots[each.replica_id] for each in here)
            self._most[view.version] = max(1, slots), max(1, *(each.kv_tokens for each in here))
        else:
            del self._lines[view.version], self._most[view.version]

    def _count(self, view: ReplicaView, sign: int) -> None:
        slots = self._slots[view.replica_id]
        self.running += sign * view.running
        self.tokens += sign * view.tokens
        self.slots += sign * slots
        self.room += sign * view.kv_tokens
        self.open += sign * (view.running < slots)
        self._homes.clear()

    def served(self) -> Collection[str]:
        """Versions with a replica that is not draining."""
        return self._lines.keys()

    def most(self, version: str) -> tuple[int, int] | None:
        """Slots and tokens of the largest replica of a version; None where it has none."""
        return self._most.get(version)

    # -- the choice -------------------------------------------------------------------------------------------

    def place(self, need: Need) -> ReplicaView | None:
        """As `placement.choose` among all replicas of the version that the request may use."""
        if need.avoid or need.only is not None:
            return choose(self._among(need), need, self._factor)
        line = self._lines.get(need.version, [])
        first = self._first(line, need)
        found = need.warmth.found if need.warmth is not None and need.imbalance > 0.0 else ()
        if first is None or not (found or need.session is not None):
            return first
        able = {first.replica_id: first}
        if need.session is not None and (home := self._home(line, need, need.session)) is not None:
            able[home.replica_id] = home
        for _, who in found:
            if (warm := self._first(line, need, who)) is not None:
                able[warm.replica_id] = warm
        return choose(able.values(), need, self._factor)

    def _first(self, line: Line, need: Need, who: int | None = None) -> ReplicaView | None:
        """The least loaded with room; of the replicas whose bits are in `who`."""
        if not line:
            return None
        sequences, tokens, since_ns, kept = need.sequences, need.tokens, need.now_ns - need.stale_ns, need.kept
        slots_max, room_max = self._most[need.version]
        most = max(1.0 - sequences / slots_max, 1.0 - tokens / room_max) + _ROUNDING
        for load, replica_id, view in line:
            if load > most:
                return None  # nobody from here on has room
            if (
                (who is None or who & view.bit)
                and view.running + sequences <= self._slots[replica_id]
                and view.tokens + tokens <= view.kv_tokens
                and view.reported_ns >= since_ns
                and not view.breaker_open
                and replica_id not in kept
            ):
                return view
        return None

    def _home(self, line: Line, need: Need, session: str) -> ReplicaView | None:
        """The session's replica among those that work, whether it has room or not."""
        key = (need.version, session)
        home = self._homes.get(key)
        if home is None:
            home = self._homes[key] = home_of([view for _, _, view in line], session)
            if len(self._homes) > HOMES_MAX:
                self._homes.popitem(last=False)
        if _works(home, need):
            return home
        working = [view for _, _, view in line if _works(view, need)]
        return home_of(working, session) if working else None

    def _among(self, need: Need) -> Iterable[ReplicaView]:
        """Those that `choose` has to look at."""
        if need.only is None:
            return self.views.values()
        return [view for name in need.only if (view := self.views.get(name)) is not None]


def _works(view: ReplicaView, need: Need) -> bool:
    silent = need.now_ns - view.reported_ns > need.stale_ns
    return not (silent or view.breaker_open or view.replica_id in need.kept)
