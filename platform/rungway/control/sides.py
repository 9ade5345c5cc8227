"""Who holds more of a pool than its weight entitles it to: the side of the ladder's scopes that goes down first."""

from __future__ import annotations

from rungway.control.pool import Pool
from rungway.control.tenant_state import TenantState

# A share is exceeded by more than this, or rounding would move tenants from side to side.
OVER = 1.05


def is_over(pool: Pool, state: TenantState, now_ns: int) -> bool:
    """Whether a tenant holds and wants more of the pool than its weight among the active ones. A lone tenant is never
    over: there is nobody whose share it takes. By sums that are kept, since it is asked for every request."""
    crowd, total = pool.crowd, pool.held_tokens + pool.queued_tokens
    crowd.look(now_ns)
    if len(crowd) < 2 or not total:
        return False
    return state.load_tokens(pool.name) * crowd.weight > state.contract.weight * total * OVER


def over_share(pool: Pool, now_ns: int) -> frozenset[str]:
    """The active tenants for which `is_over` holds."""
    crowd, total = pool.crowd, pool.held_tokens + pool.queued_tokens
    crowd.look(now_ns)
    if len(crowd) < 2:
        return frozenset()
    weight = crowd.weight
    return frozenset(
        state.contract.name
        for state, load in pool.holders.items()
        if load * weight > state.contract.weight * total * OVER and state in crowd
    )
