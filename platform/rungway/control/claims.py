"""Places that were freed by stopping running work, and for whom: until it has one, lower classes leave them alone."""

from __future__ import annotations

from collections.abc import Collection

from rungway.contracts import CLASS_ORDER
from rungway.control.flight import Flight
from rungway.control.pool import Pool
from rungway.policies.reclaim import Claim


def standing(pool: Pool, now_ns: int) -> Collection[Claim]:
    """The pool's claims that hold. Those whose time is over are dropped: what was stopped for them has gone elsewhere, or
    was never stopped."""
    if pool.claims:
        for request_id in [name for name, claim in pool.claims.items() if claim.until_ns <= now_ns]:
            del pool.claims[request_id]
    return pool.claims.values()


def minimum_share(pool: Pool, band: int) -> float:
    """What a class keeps of the pool whoever is in need."""
    return pool.spec.class_shares.get(CLASS_ORDER[band], 0.0)


def keeps_clear(pool: Pool, claims: Collection[Claim], flight: Flight) -> bool:
    """Whether this request may have a place now: nobody of a higher class waits for one that was freed for it, or its own
    class is at its minimum share with it. Else what was stopped would take its place back at once."""
    band = flight.band
    if all(claim.band >= band for claim in claims):
        return True
    slots, capacity = pool.in_flight()[1], pool.capacity_tokens()
    share = minimum_share(pool, band)
    sequences = pool.band_sequences[band] + flight.places
    return sequences <= share * slots and pool.band_tokens[band] + flight.held_tokens <= share * capacity
