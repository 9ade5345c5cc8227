"""What tenants hold of a pool and wait for in it, against what there is. All sums follow each change: with hundreds of
replicas and a thousand tenants no decision may add them up."""

from __future__ import annotations

from rungway.contracts import CLASS_ORDER
from rungway.control.crowd import Crowd
from rungway.control.flight import Attempt
from rungway.control.reserves import Reserves
from rungway.control.tenant_state import TenantState
from rungway.policies.roster import Roster


class Holdings:
    """Capacity is what grants hold, released when the engine's report says so. `held_tokens` and `queued_tokens` are the
    sums over all tenants of what their states say of this pool, `holders` those with any of either, and how much.
    Of what waits, `late` requests with `late_bands` tokens are late (`control/late.py`)."""

    __slots__ = (
        "band_sequences",
        "band_tokens",
        "crowd",
        "held_tokens",
        "holders",
        "late",
        "late_bands",
        "name",
        "queued_bands",
        "queued_tokens",
        "reserves",
        "roster",
    )

    def __init__(self, name: str, roster: Roster, crowd: Crowd) -> None:
        self.name = name
        self.roster = roster
        self.crowd = crowd
        self.reserves = Reserves(name)
        crowd.watchers.append(self.reserves)
        self.held_tokens = self.queued_tokens = 0
        self.holders: dict[TenantState, int] = {}
        self.queued_bands = [0 for _ in CLASS_ORDER]
        self.late = 0
        self.late_bands = [0 for _ in CLASS_ORDER]
        self.band_sequences = [0 for _ in CLASS_ORDER]  # granted
        self.band_tokens = [0 for _ in CLASS_ORDER]

    # -- changes ----------------------------------------------------------------------------------------------

    def hold(self, attempt: Attempt, state: TenantState) -> None:
        view = self.roster.views.get(attempt.replica_id)
        if view is not None:
            self.roster.load(view, view.running + attempt.sequences, view.tokens + attempt.tokens)
        state.pool_tokens[self.name] = state.pool_tokens.get(self.name, 0) + attempt.tokens
        self.held_tokens += attempt.tokens
        self.band_sequences[attempt.band] += attempt.sequences
        self.band_tokens[attempt.band] += attempt.tokens
        state.pool_running[self.name] = state.pool_running.get(self.name, 0) + attempt.sequences
        self._moved(state)

    def release(self, attempt: Attempt, state: TenantState) -> None:
        """Give the attempt's capacity back, once."""
        if attempt.released:
            return
        attempt.released = True
        view = self.roster.views.get(attempt.replica_id)
        if view is not None:
            self.roster.load(view, view.running - attempt.sequences, view.tokens - attempt.tokens)
        held = state.pool_tokens.get(self.name, 0)
        left = state.pool_tokens[self.name] = max(0, held - attempt.tokens)
        self.held_tokens -= held - left
        self.band_sequences[attempt.band] -= attempt.sequences
        self.band_tokens[attempt.band] -= attempt.tokens
        state.pool_running[self.name] = max(0, state.pool_running.get(self.name, 0) - attempt.sequences)
        self._moved(state)

    def wait(self, tokens: int, state: TenantState, band: int) -> None:
        """A request of `tokens` takes its place in line."""
        state.count(waiting=1)
        self.queued_bands[band] += tokens
        state.queued_tokens[self.name] = state.queued_tokens.get(self.name, 0) + tokens
        self.queued_tokens += tokens
        self._moved(state)

    def lag(self, tokens: int, state: TenantState, band: int, sign: int = 1) -> None:
        """One that waits is late from now on."""
        self.late += sign
        self.late_bands[band] += sign * tokens
        state.late_tokens[self.name] = state.late_tokens.get(self.name, 0) + sign * tokens

    def unwait(self, tokens: int, state: TenantState, band: int, *, late: bool = False) -> None:
        """It left the line."""
        if late:
            self.lag(tokens, state, band, sign=-1)
        state.count(waiting=-1)
        self.queued_bands[band] -= tokens
        queued = state.queued_tokens.get(self.name, 0)
        left = state.queued_tokens[self.name] = max(0, queued - tokens)
        self.queued_tokens -= queued - left
        self._moved(state)

    def _moved(self, state: TenantState) -> None:
        self.reserves.moved(state)
        if load := state.load_tokens(self.name):
            self.holders[state] = load
        else:
            self.holders.pop(state, None)

    # -- sums -------------------------------------------------------------------------------------------------

    def ahead(self, state: TenantState, band: int, rivals: float, *, late: bool) -> int | float:
        """Tokens of a class that go before a new request of a tenant: its own, and meanwhile of each rival as much as its
        weight (`rivals` of its own weight together) entitles it to. What is late goes before nobody who is not."""
        mine, all_of_band = state.queued_tokens.get(self.name, 0), self.queued_bands[band]
        if not late:
            mine -= state.late_tokens.get(self.name, 0)
            all_of_band -= self.late_bands[band]
        return min(all_of_band, mine * (1.0 + rivals))

    def has_room(self) -> bool:
        """Cheap test before asking the queue: some replica has a free sequence slot."""
        return self.roster.open > 0

    def capacity_tokens(self) -> int:
        return self.roster.room

    def in_flight(self) -> tuple[int, int]:
        """(sequences granted, sequences that late binding allows)."""
        return self.roster.running, self.roster.slots

    def saturation(self) -> float:
        """Largest of sequence and token use over the pool; 1.0 when it has no replica."""
        roster = self.roster
        if not roster.slots or not roster.room:
            return 1.0
        return max(roster.running / roster.slots, roster.tokens / roster.room)

    def reserved_for_others(self, state: TenantState) -> tuple[int, int]:
        """(tokens, places) that other active tenants have reserved and do not use, as of the crowd's last look."""
        self.reserves.resize(self.roster.room, self.roster.slots)
        return self.reserves.of_others(state)
