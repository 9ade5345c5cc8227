"""What waits in one pool, in tokens: per class, and how much of it is late (`control/late.py`)."""

from __future__ import annotations

from rungway.contracts import CLASS_ORDER
from rungway.control.tenant_state import TenantState


class Backlog:
    """`tokens` = the sum over all tenants of what their states say of this pool; `bands` and `late_bands` are parts of it;
    `late` counts requests."""

    __slots__ = ("_pool", "bands", "late", "late_bands", "tokens")

    def __init__(self, pool: str) -> None:
        self._pool = pool
        self.tokens = self.late = 0
        self.bands = [0 for _ in CLASS_ORDER]
        self.late_bands = [0 for _ in CLASS_ORDER]

    def enter(self, tokens: int, state: TenantState, band: int) -> None:
        """A request of `tokens` takes its place in line."""
        state.waiting += 1
        self.bands[band] += tokens
        state.queued_tokens[self._pool] = state.queued_tokens.get(self._pool, 0) + tokens
        self.tokens += tokens

    def leave(self, tokens: int, state: TenantState, band: int, *, late: bool) -> None:
        """It left the line."""
        state.waiting -= 1
        self.bands[band] -= tokens
        queued = state.queued_tokens.get(self._pool, 0)
        left = state.queued_tokens[self._pool] = max(0, queued - tokens)
        self.tokens -= queued - left
        if late:
            self._lag(-1, tokens, state, band)

    def lag(self, tokens: int, state: TenantState, band: int) -> None:
        """One that waits is late from now on."""
        self._lag(1, tokens, state, band)

    def _lag(self, sign: int, tokens: int, state: TenantState, band: int) -> None:
        self.late += sign
        self.late_bands[band] += sign * tokens
        state.late_tokens[self._pool] = state.late_tokens.get(self._pool, 0) + sign * tokens

    def above(self, band: int) -> int:
        """Tokens of higher classes that go before a class: what is late there yields to who is on time."""
        return sum(self.bands[:band]) - sum(self.late_bands[:band])

    def ahead(self, state: TenantState, band: int, rivals: float, *, late: bool) -> int | float:
        """Tokens of a class that go before a new request of a tenant: its own, and meanwhile of each rival as much as its
        weight (`rivals` of its own weight together) entitles it to. What is late goes before nobody who is not."""
        mine, all_of_band = state.queued_tokens.get(self._pool, 0), self.bands[band]
        if not late:
            mine -= state.late_tokens.get(self._pool, 0)
            all_of_band -= self.late_bands[band]
        return min(all_of_band, mine * (1.0 + rivals))
