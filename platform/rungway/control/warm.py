"""Which replicas hold the beginning of a waiting request: looked up where it is placed, and for the order by locality."""

from __future__ import annotations

from rungway.clock import NS_PER_MS
from rungway.control.flight import Flight
from rungway.control.pool import Pool
from rungway.policies.fairness import Queued
from rungway.policies.locality import Local, Warmth
from rungway.policies.placement import open_to_work
from rungway.policies.prefixes import holders

_BEGUN = 1 << 40  # more than any prompt: what has begun is not to wait for what has not
_LOOK_NS = 50 * NS_PER_MS  # news of a cache are older than that when they come


def warmth(pool: Pool, flight: Flight, now_ns: int) -> Warmth:
    """As of the last 50 ms. A prompt that a rung has shortened is another text: nothing is known of it."""
    if flight.warmth is None or now_ns >= flight.warm_until_ns:
        offer, ask = flight.offer, flight.ask
        assert offer is not None
        keys = ask.prefix_keys.get(pool.name, ())
        if not keys or offer.prompt_tokens != ask.prompt_tokens.get(pool.name):
            keys = ()
        flight.warmth = Warmth(offer.prompt_tokens, ask.key_tokens.get(pool.name, 0), holders(pool.where, keys))
        flight.warm_until_ns = now_ns + _LOOK_NS
    return flight.warmth


def local(pool: Pool, now_ns: int) -> Local | None:
    """How to order this pool's queue for one selection; None = by VTC alone."""
    if pool.spec.order != "dlpm":
        return None
    masks: list[int] = []  # looked at only where there is a choice

    def mask() -> int:
        if not masks:
            masks.append(_open(pool, now_ns))
        return masks[0]

    def tokens(entry: Queued) -> int:
        flight = entry.payload
        assert isinstance(flight, Flight)
        return _BEGUN if flight.begun else warmth(pool, flight, now_ns).cached(mask())

    return Local(float(pool.spec.locality_quantum_tokens), tokens)


def _open(pool: Pool, now_ns: int) -> int:
    return open_to_work(pool.views.values(), now_ns=now_ns, stale_ns=pool.stale_ns, factor=pool.spec.in_flight_factor)
