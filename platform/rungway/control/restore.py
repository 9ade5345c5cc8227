"""A new controller's memory, or a new budget's: quotas as the ledger knows them. The simulator restarts controllers through
this, too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from rungway.clock import NS_PER_S
from rungway.contracts import Platform
from rungway.control.cell import Cell, Now
from rungway.control.core import Core
from rungway.control.early import restarted
from rungway.policies.budget import window

RATE_WINDOW_NS = 60 * NS_PER_S
# Gateways and replicas ask about requests and repeat ends of the last seconds; the rest is for a wall clock that stepped.
SETTLED_WINDOW_NS = 900 * NS_PER_S
SAMPLES_MAX = 2000


# A wall clock that was set moves by minutes. A newest row further away than this says something else: an idle day, or a
# clock that was wrong by years.
STEP_MAX_NS = 900 * NS_PER_S


class Books(Protocol):
    """What is read of a ledger (`LedgerReader`)."""

    def newest_ns(self) -> int: ...

    def recent(self, since_ns: int) -> Mapping[str, tuple[int, int]]: ...

    def spent_since(self, tenant: str, wall_ns: int) -> int: ...

    def settled(self, since_ns: int, limit: int) -> Sequence[tuple[str, str, dict[int, int]]]: ...

    def output_samples(self, limit: int) -> Sequence[tuple[str, str, int]]: ...


def restore(core: Core, books: Books, now: Now) -> None:
    """The last minute's rates, the budget windows' spending, output lengths, and which requests are closed. Running
    requests come with the gateways' hellos. Raises what the ledger raises."""
    cell = core.cell
    newest_ns = books.newest_ns()
    near = abs(newest_ns - now.wall_ns) <= STEP_MAX_NS
    # The last minute before the newest row: by the clock alone, a step forth would make a busy minute look long past.
    last_ns = min(newest_ns, now.wall_ns) if near else now.wall_ns
    for tenant, (requests, tokens) in books.recent(last_ns - RATE_WINDOW_NS).items():
        state = cell.tenants.get(tenant)
        if state is not None:
            state.requests.drain(requests, now.mono_ns)
            state.tokens.drain(tokens, now.mono_ns)
    # A clock that stepped back over the end of a window has rows of the next one: that one had begun, and is not begun again.
    window_ns = max(newest_ns, now.wall_ns) if near else now.wall_ns
    for tenant, state in cell.tenants.items():
        start_ns, _ = state.budget.enter(window_ns)
        state.budget.restore(books.spent_since(tenant, start_ns), now.wall_ns)
    for tenant, tier, output_tokens in books.output_samples(SAMPLES_MAX):
        cell.predictor.observe(tenant, tier, output_tokens)
    memory = cell.platform.controller.settled_memory
    if newest_ns:
        restarted(cell, now)
    for request_id, refused, emitted in books.settled(now.wall_ns - SETTLED_WINDOW_NS, memory):
        cell.remember(request_id, emitted, refused)


def windows_anew(cell: Cell, loaded: Platform, now: Now) -> dict[str, int]:
    """Tenants whose spending the meters here do not know under a configuration that is about to come into force, and when
    their present windows began (wall ns): who is new, or comes back, and whose budget has another period."""
    found: dict[str, int] = {}
    for contract in loaded.tenants:
        state, budget = cell.tenants.get(contract.name), contract.budget
        old = state.contract.budget if state is not None else None
        if old is None or (old.per, old.timezone) != (budget.per, budget.timezone):
            found[contract.name] = window(budget.per, budget.timezone, now.wall_ns)[0]
    return found


def spent_anew(cell: Cell, spent: Mapping[str, int], known: Mapping[str, int], now: Now) -> None:
    """The configuration is in force: `spent` is what the ledger says of those tenants, `known` what their meters said when it
    was asked. What was settled since is added; it may be in both, for a moment's work too much is better than too little."""
    for tenant, nusd in spent.items():
        meter = cell.tenants[tenant].budget
        since = max(0, meter.spent - known.get(tenant, 0))
        meter.restore(nusd + since, now.wall_ns)
