"""The sums that the controller keeps, against the flights that they are sums of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from rungway.control.cell import Cell
from rungway.control.flight import Flight
from rungway.control.pool import Pool
from rungway.control.tenant_state import TenantState


class _Counted:
    """What the flights of one pool hold of it and wait for in it: by tenant, by class and by replica."""

    def __init__(self) -> None:
        self.tokens: Counter[str] = Counter()
        self.sequences: Counter[str] = Counter()
        self.lined: Counter[str] = Counter()
        self.late: Counter[str] = Counter()
        self.band_tokens: Counter[int] = Counter()
        self.band_sequences: Counter[int] = Counter()
        self.band_lined: Counter[int] = Counter()
        self.band_late: Counter[int] = Counter()
        self.replicas: Counter[str] = Counter()

    def add(self, flight: Flight) -> None:
        tenant = flight.state.contract.name
        if flight.entry is not None:
            self.lined[tenant] += flight.lined_tokens
            self.band_lined[flight.band] += flight.lined_tokens
            if flight.entry.late:
                self.late[tenant] += flight.lined_tokens
                self.band_late[flight.band] += flight.lined_tokens
        for attempt in flight.attempts.values():
            if not attempt.released:
                self.tokens[tenant] += attempt.tokens
                self.sequences[tenant] += attempt.sequences
                self.band_tokens[attempt.band] += attempt.tokens
                self.band_sequences[attempt.band] += attempt.sequences
                self.replicas[attempt.replica_id] += attempt.sequences


def recount(cell: Cell, fail: Callable[[str], None]) -> None:
    """Tell `fail` of every sum that is not what its parts add up to."""
    running: Counter[str] = Counter()
    waiting: Counter[str] = Counter()
    money: Counter[str] = Counter()
    counted = {name: _Counted() for name in cell.pools}
    for flight in cell.flights.values():
        tenant = flight.state.contract.name
        running[tenant] += flight.running
        waiting[tenant] += flight.entry is not None
        money[tenant] += flight.held_nusd
        if flight.pool:  # a template needs none
            counted[flight.pool].add(flight)
    for name, state in cell.tenants.items():
        if state not in cell.crowd and name not in running and not state.budget.held:
            continue  # silent; what it still held would be missing in its pool's sum
        kept = (state.running, state.waiting, state.budget.held)
        found = (running[name], waiting[name], money[name])
        if kept != found:
            fail(f"{name}: running, waiting, held are kept as {kept}, counted {found}")
        for pool, parts in counted.items():
            _tenant(state, pool, parts, fail)
    for pool_ in cell.pools.values():
        _pool(pool_, counted[pool_.name], fail)


def _tenant(state: TenantState, pool: str, parts: _Counted, fail: Callable[[str], None]) -> None:
    name = state.contract.name
    kept = [
        each.get(pool, 0) for each in (state.pool_tokens, state.pool_running, state.queued_tokens, state.late_tokens)
    ]
    found = [each[name] for each in (parts.tokens, parts.sequences, parts.lined, parts.late)]
    if kept != found:
        fail(f"{name}: tokens, sequences, waiting, late in {pool} are kept as {kept}, counted {found}")


def _pool(pool: Pool, parts: _Counted, fail: Callable[[str], None]) -> None:
    kept = (pool.held_tokens, pool.queued_tokens)
    found = (parts.tokens.total(), parts.lined.total())
    if kept != found:
        fail(f"{pool.name}: held and waiting tokens are kept as {kept}, counted {found}")
    for what, sums, counts in (
        ("tokens", pool.band_tokens, parts.band_tokens),
        ("sequences", pool.band_sequences, parts.band_sequences),
        ("waiting tokens", pool.queued_bands, parts.band_lined),
        ("late tokens", pool.late_bands, parts.band_late),
    ):
        of_classes = [counts[band] for band in range(len(sums))]
        if sums != of_classes:
            fail(f"{pool.name}: {what} by class are kept as {sums}, counted {of_classes}")
    for view in pool.views.values():
        if view.running != parts.replicas[view.replica_id]:
            fail(f"{view.replica_id}: {view.running} sequences kept, {parts.replicas[view.replica_id]} counted")
