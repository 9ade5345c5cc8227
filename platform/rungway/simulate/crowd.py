"""More tenants than a trace has: each of its clients copied, with the client's own lengths, order and burstiness.

`load` is the requests of all copies together over those of the trace. A recorded trace is dealt out in time: copy j of n
plays the stretch of its client's requests that begins at j/n of the piece, slowed down so that it fills the whole piece
(with load 1 every request is played exactly once; gaps keep their coefficient of variation, and what is busy in the trace is
busy in some copy). Clients that are drawn from rates (ServeGen) are drawn anew for each copy at its share of the rate.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from rungway.simulate.errors import SimulationError
from rungway.simulate.workload import Arrival

TENANTS_MAX = 100_000


@dataclass(frozen=True, slots=True)
class Crowd:
    """`tenants` None = as many as the trace has, and only `load` is asked for."""

    tenants: int | None = None
    load: float = 1.0

    def copies(self, clients: int) -> list[int]:
        """How often each of so many clients is there: as evenly as it goes, first ones first. Raises SimulationError."""
        wanted = self.tenants or clients
        if not clients <= wanted <= TENANTS_MAX:
            told = f"the trace has {clients:,} in this piece, and {TENANTS_MAX:,} are the most"
            raise SimulationError(f"--tenants {wanted:,} cannot be played: {told}")
        each, more = divmod(wanted, clients)
        return [each + (number < more) for number in range(clients)]


def copy_name(client: str, copy: int, copies: int) -> str:
    """A client that is there once keeps its name, and with it its contract."""
    return client if copies == 1 else f"{client}.{copy + 1}"


def spread(found: Sequence[Arrival], crowd: Crowd, span_s: float) -> list[Arrival]:
    """`found` in order of time, from 0 and within `span_s` seconds. Raises SimulationError."""
    clients: dict[str, list[Arrival]] = {}
    for arrival in found:
        clients.setdefault(arrival.tenant, []).append(arrival)
    made: list[Arrival] = []
    counts = crowd.copies(len(clients)) if clients else []
    for (client, mine), copies in zip(sorted(clients.items()), counts, strict=True):
        for copy in range(copies):
            made += _copy(mine, copy_name(client, copy, copies), crowd.load / copies, copy, span_s)
    made.sort(key=lambda arrival: arrival.at_s)
    return made


def _copy(mine: Sequence[Arrival], name: str, share: float, copy: int, span_s: float) -> Iterator[Arrival]:
    """The client's requests from `copy` x `share` of the piece on, at `share` of their pace, again from the start when the
    piece ends before the copy's time does."""
    times = [arrival.at_s for arrival in mine]
    begin_s, end_s = copy * share * span_s, (copy + 1) * share * span_s
    lap = int(begin_s // span_s)
    at = bisect_left(times, begin_s - lap * span_s)
    while True:
        if at == len(times):
            lap, at = lap + 1, 0
        played_s = times[at] + lap * span_s
        if played_s >= end_s:
            return
        yield replace(mine[at], tenant=name, at_s=max(0.0, (played_s - begin_s) / share))
        at += 1
