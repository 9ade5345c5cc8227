"""Virtual time: a heap of calls. Nothing else in a simulation waits, and nothing reads a real clock."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush

from rungway.clock import NS_PER_S
from rungway.control.cell import Now

# Where a simulation starts: an arbitrary monotonic reading, and a wall clock shortly before noon UTC.
MONO_START_NS = 1_000 * NS_PER_S
WALL_START_NS = 1_800_000_000 * NS_PER_S

Call = Callable[..., None]


class Loop:
    """`now_ns` counts from 0. Calls of one moment run in the order in which they were planned. `wall_step_ns` is how far
    somebody has moved the wall clock; the monotonic one cannot be moved."""

    __slots__ = ("_heap", "_serial", "now_ns", "turns", "wall_step_ns")

    def __init__(self) -> None:
        self.now_ns = 0
        self.turns = 0
        self.wall_step_ns = 0
        self._serial = 0
        self._heap: list[tuple[int, int, Call, tuple[object, ...]]] = []

    def at(self, when_ns: int, call: Call, *args: object) -> None:
        """Plan a call; one for the past runs as soon as possible."""
        self._serial += 1
        heappush(self._heap, (when_ns if when_ns > self.now_ns else self.now_ns, self._serial, call, args))

    def after(self, delay_ns: int, call: Call, *args: object) -> None:
        self.at(self.now_ns + delay_ns, call, *args)

    def run(self, until_ns: int) -> None:
        """Run everything that is due up to and including `until_ns`, and stand there."""
        heap = self._heap
        while heap and heap[0][0] <= until_ns:
            self.now_ns, _, call, args = heappop(heap)
            self.turns += 1
            call(*args)
        self.now_ns = max(self.now_ns, until_ns)

    def now(self) -> Now:
        """This moment as the controller sees it."""
        now_ns = self.now_ns
        return Now(MONO_START_NS + now_ns, WALL_START_NS + now_ns + self.wall_step_ns)

    def clocks(self) -> tuple[int, int]:
        """This moment as a gateway sees it: its monotonic clock starts with the loop."""
        return self.now_ns, self.wall_ns()

    def wall_ns(self) -> int:
        return WALL_START_NS + self.now_ns + self.wall_step_ns
