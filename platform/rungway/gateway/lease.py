"""The gateway's own admission while the controller is away: the desk (`policies/desk.py`), who waits at it, and what the
controller has to be told afterwards.

Only Asks that no controller has ever seen are admitted here. One that was submitted before the loss may have been granted;
two grants of one request would be two bills, so it waits for the controller.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple, Protocol

from rungway.clock import NS_PER_MS, monotonic_ns, wall_ns
from rungway.contracts import Platform
from rungway.leases import Lease
from rungway.messages import Flight as WireFlight
from rungway.policies.desk import Desk, Wait
from rungway.policies.quality import QualityModel
from rungway.types import Ask, Grant


class Asking(Protocol):
    """A flight, as far as it matters here. `received_ns` is monotonic."""

    @property
    def ask(self) -> Ask: ...

    @property
    def grant(self) -> Grant | None: ...

    @property
    def received_ns(self) -> int: ...


class Time(NamedTuple):
    """`mono_ns` for TTL and waiting, `wall_ns` for the grant."""

    mono_ns: int
    wall_ns: int


def real_time() -> Time:
    return Time(monotonic_ns(), wall_ns())


class Leases:
    """`reachable`: replicas whose channel is up. `give` takes a grant to its flight. `owed`: what was admitted here, until
    its settlement is acknowledged; the hello names it."""

    def __init__(
        self,
        quality: QualityModel,
        reachable: Callable[[], Collection[str]],
        give: Callable[[Grant], None],
        now: Callable[[], Time] = real_time,
    ) -> None:
        self._desk = Desk(quality)
        self._reachable = reachable
        self._give = give
        self._now = now
        self._away = False
        self._waiting: dict[str, Asking] = {}
        self.owed: dict[str, WireFlight] = {}

    def receive(self, lease: Lease) -> None:
        self._desk.receive(lease, self._now().mono_ns)

    def lost(self, flights: Iterable[Asking]) -> None:
        """The controller went away."""
        self._away = True
        self._desk.lost([(flight.ask.tenant, flight.grant) for flight in flights if flight.grant is not None])

    def hello(self, live: list[WireFlight], owes: Callable[[str], bool]) -> list[WireFlight]:
        """It is there again: what waits goes to it, and with it what was admitted here, has ended, and still `owes` its
        settlement."""
        self._away = False
        self._waiting.clear()
        names = {wire.ask.request_id for wire in live}
        self.forget(lambda request_id: request_id in names or owes(request_id))
        return live + [wire for request_id, wire in self.owed.items() if request_id not in names]

    def admitting(self) -> bool:
        """Whether new requests are decided here and now."""
        return self._away and self._desk.open(self._now().mono_ns)

    def submit(self, flight: Asking, platform: Platform) -> None:
        """A new Ask while the controller is away: a grant at once, or a place among those that wait for one. Beyond the
        bound it only waits for the controller."""
        if not self._away:
            return
        if self._decide(flight, platform) and len(self._waiting) < self._desk.waiting_max:
            self._waiting[flight.ask.request_id] = flight

    def ended(self, request_id: str, platform: Platform | None) -> None:
        """A flight is over: whoever waits may get its place."""
        self._waiting.pop(request_id, None)
        if self._away and self._desk.ended(request_id) and platform is not None:
            for waiting_id, waiting in list(self._waiting.items()):
                if not self._decide(waiting, platform):
                    self._waiting.pop(waiting_id, None)

    def forget(self, owes: Callable[[str], bool]) -> None:
        """Let go of what is acknowledged."""
        for request_id in [request_id for request_id in self.owed if not owes(request_id)]:
            del self.owed[request_id]

    def _decide(self, flight: Asking, platform: Platform) -> bool:
        """Grant it if the lease allows. True where another look may be worth it: every place was taken."""
        now = self._now()
        waited_ms = max(0.0, (now.mono_ns - flight.received_ns) / NS_PER_MS)
        found = self._desk.admit(flight.ask, platform, self._reachable(), now.mono_ns, now.wall_ns, waited_ms)
        if isinstance(found, Wait):
            return found is Wait.NO_ROOM
        self.owed[flight.ask.request_id] = WireFlight(flight.ask, found)
        self._give(found)
        return False
