"""How much of a pool a tenant may hold: its cap, what is kept free for others, and what is its own in any case."""

from __future__ import annotations

from rungway.control.flight import Flight
from rungway.control.pool import Pool
from rungway.control.tenant_state import TenantState


def share_allows(pool: Pool, flight: Flight, now_ns: int) -> bool:
    """The tenant's cap on tokens and sequence slots of the pool, and what other active tenants have reserved.

    Caps hold while somebody else is active; a lone tenant may use the whole pool. One running sequence is always
    allowed, or a small pool would lock everybody out.
    """
    if not flight.state.pool_running.get(pool.name, 0):
        return True
    pool.crowd.look(now_ns)
    if len(pool.crowd) < 2:
        return True
    return cap_allows(pool, flight) and (in_reserve(pool, flight) or _reserves_allow(pool, flight))


def cap_allows(pool: Pool, flight: Flight) -> bool:
    """The tenant stays within its `in_flight_share_max` with this request."""
    state = flight.state
    share, slots = state.contract.isolation.in_flight_share_max, pool.in_flight()[1]
    held = state.pool_tokens.get(pool.name, 0)
    running = state.pool_running.get(pool.name, 0)
    fits = held + flight.held_tokens <= share * pool.capacity_tokens()
    return fits and running + flight.places <= max(1, int(share * slots))


def in_reserve(pool: Pool, flight: Flight, sequences: int = 0, tokens: int = 0) -> bool:
    """The tenant uses no more than what is reserved for it, with this request and with so much more that it will have."""
    state = flight.state
    share = state.contract.isolation.reserved_share
    if not share:
        return False
    tokens += state.pool_tokens.get(pool.name, 0) + flight.held_tokens
    sequences += state.pool_running.get(pool.name, 0) + flight.places
    return tokens <= share * pool.capacity_tokens() and sequences <= int(share * pool.in_flight()[1])


def _reserves_allow(pool: Pool, flight: Flight) -> bool:
    """What other active tenants have reserved and do not use stays free."""
    tokens, places = pool.reserved_for_others(flight.state)
    running, slots = pool.in_flight()
    fits = pool.held_tokens + flight.held_tokens <= pool.capacity_tokens() - tokens
    return fits and running + flight.places <= slots - places


def own_share(pool: Pool, state: TenantState) -> float:
    """What nobody may take from a tenant: its reserve, or its weight among the active tenants where that is more. As of
    the crowd's last look."""
    fair = state.contract.weight / pool.crowd.weight if pool.crowd.weight else 1.0
    return max(state.contract.isolation.reserved_share, min(1.0, fair))
