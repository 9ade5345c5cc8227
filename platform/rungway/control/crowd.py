"""How many tenants are active and what they weigh together: needed for every request, too dear to add up each time.

Whoever becomes active is counted at once (`join`); who fell silent is noticed within `_LOOK_NS`.
"""

from __future__ import annotations

from collections.abc import Iterable

from rungway.clock import NS_PER_MS
from rungway.control.tenant_state import TenantState

_LOOK_NS = 50 * NS_PER_MS


class Crowd:
    """`count` tenants are active, with `weight` together, as of the last `look` and `join`."""

    __slots__ = ("_until_ns", "count", "weight")

    def __init__(self) -> None:
        self.count = 0
        self.weight = 0.0
        self._until_ns = -1

    def look(self, states: Iterable[TenantState], now_ns: int) -> None:
        """Count again where the last count is out of date."""
        if now_ns < self._until_ns:
            return
        weights = [state.contract.weight for state in states if state.active(now_ns)]
        self.count, self.weight = len(weights), sum(weights)
        self._until_ns = now_ns + _LOOK_NS

    def join(self, state: TenantState) -> None:
        """Somebody becomes active now."""
        self.count += 1
        self.weight += state.contract.weight
