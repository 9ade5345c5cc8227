"""Who is active, how many they are and what they weigh together: needed for every request, too dear to add up each time.

Whoever has work in the system joins at once (`TenantState.count`). Whoever has none any more is looked at again when
`ACTIVE_FOR_NS` have passed since its last request.
"""

from __future__ import annotations

from heapq import heappop, heappush
from typing import Protocol

from rungway.control.tenant_state import ACTIVE_FOR_NS, TenantState


class Watcher(Protocol):
    """Is told who becomes active and who falls silent."""

    def joined(self, state: TenantState) -> None: ...

    def left(self, state: TenantState) -> None: ...


class Crowd:
    """The active tenants as of the last `look`, and those who joined since. `weight`: theirs together."""

    __slots__ = ("_due", "_members", "_resting", "_serial", "watchers", "weight")

    def __init__(self) -> None:
        self.weight = 0.0
        self.watchers: list[Watcher] = []
        self._members: dict[TenantState, float] = {}  # with the weights that are in the sum
        self._due: list[tuple[int, int, TenantState]] = []
        self._resting: set[TenantState] = set()  # those in `_due`
        self._serial = 0

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, state: TenantState) -> bool:
        return state in self._members

    def look(self, now_ns: int) -> None:
        """Let those go whose time is over."""
        while self._due and self._due[0][0] <= now_ns:
            _, _, state = heappop(self._due)
            self._resting.discard(state)
            if state.active(now_ns):
                if not state.running and not state.waiting:
                    self.rest(state)  # it has asked since
            else:
                self.forget(state)

    def join(self, state: TenantState) -> None:
        """It has work. Harmless for one that is here."""
        if state not in self._members:
            weight = self._members[state] = state.contract.weight
            self.weight += weight
            for watcher in self.watchers:
                watcher.joined(state)

    def rest(self, state: TenantState) -> None:
        """It has no work any more."""
        if state in self._members and state not in self._resting:
            self._resting.add(state)
            self._serial += 1
            heappush(self._due, (state.last_ask_ns + ACTIVE_FOR_NS, self._serial, state))

    def forget(self, state: TenantState) -> None:
        """It is silent, or no tenant any more."""
        weight = self._members.pop(state, None)
        if weight is not None:
            # Sums of fractions drift: nobody weighs nothing.
            self.weight = self.weight - weight if self._members else 0.0
            for watcher in self.watchers:
                watcher.left(state)

    def renew(self) -> None:
        """Contracts may have changed: everybody joins again with what holds now."""
        members = list(self._members)
        for state in members:
            self.forget(state)
        for state in members:
            self.join(state)
