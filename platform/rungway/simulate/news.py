"""What a played gateway knows of its streams, and whoever looks at what it admits by itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from rungway.leases import Lease
from rungway.simulate.flight import Flight
from rungway.simulate.link import Link
from rungway.simulate.replica import SimReplica
from rungway.types import Ask, Grant


class LeaseWatch(Protocol):
    """Looks at every lease and at what is admitted from it; see `history.py`."""

    def lease(self, gateway: str, lease: Lease) -> None: ...

    def leased(self, gateway: str, ask: Ask, grant: Grant) -> None: ...


def catch_up(
    flight: Flight, replicas: Mapping[str, SimReplica], links: Mapping[str, Link], now_ns: int, base_ns: int
) -> None:
    """Tokens that came in since the first one: the real gateway saw each of them."""
    grant = flight.grant
    assert grant is not None
    replica, link = replicas.get(grant.replica_id), links.get(grant.replica_id)
    if replica is None or link is None or flight.over:
        return
    until_ns = now_ns if link.broken_ns is None else link.broken_ns
    there = replica.delivered(grant.request_id, grant.attempt, until_ns - base_ns)
    if there is not None and flight.delivered[grant.attempt]:
        flight.last_ns = max(flight.first_ns, until_ns)
        flight.delivered[grant.attempt] = max(flight.delivered[grant.attempt], there)


def moved(
    flight: Flight, replicas: Mapping[str, SimReplica], links: Mapping[str, Link], now_ns: int, base_ns: int
) -> bool:
    """Whether tokens came since the last look; if so, that was news."""
    assert flight.grant is not None
    before = flight.delivered[flight.grant.attempt]
    catch_up(flight, replicas, links, now_ns, base_ns)
    found = flight.delivered[flight.grant.attempt] > before
    if found:
        flight.changed_ns = now_ns
    return found
