"""What the active tenants have reserved of a pool and do not use, as sums that follow each change."""

from __future__ import annotations

from rungway.control.tenant_state import TenantState

_NOTHING = (0, 0)


class Reserves:
    """`tokens` and `places` that are to stay free. Shares are of the pool's whole capacity, rounded down for each tenant,
    so a pool that grows or shrinks is added up anew."""

    __slots__ = ("_parts", "_pool", "_room", "_slots", "places", "tokens")

    def __init__(self, pool: str) -> None:
        self.tokens = self.places = 0
        self._pool = pool
        self._room = self._slots = 0
        self._parts: dict[TenantState, tuple[int, int]] = {}

    def joined(self, state: TenantState) -> None:
        """A tenant is active."""
        if state.contract.isolation.reserved_share > 0:
            self._parts[state] = _NOTHING
            self.moved(state)

    def left(self, state: TenantState) -> None:
        """A tenant is silent: others may use its reserve."""
        tokens, places = self._parts.pop(state, _NOTHING)
        self.tokens -= tokens
        self.places -= places

    def moved(self, state: TenantState) -> None:
        """It holds more or less of the pool than before."""
        before = self._parts.get(state)
        if before is None:
            return
        share = state.contract.isolation.reserved_share
        tokens = max(0, int(share * self._room) - state.pool_tokens.get(self._pool, 0))
        places = max(0, int(share * self._slots) - state.pool_running.get(self._pool, 0))
        self._parts[state] = tokens, places
        self.tokens += tokens - before[0]
        self.places += places - before[1]

    def resize(self, room: int, slots: int) -> None:
        """The pool has so many tokens and sequence slots."""
        if (room, slots) != (self._room, self._slots):
            self._room, self._slots = room, slots
            for state in self._parts:
                self.moved(state)

    def of_others(self, state: TenantState) -> tuple[int, int]:
        """(tokens, places) that are kept free from this tenant."""
        tokens, places = self._parts.get(state, _NOTHING)
        return self.tokens - tokens, self.places - places
