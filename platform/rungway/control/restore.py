"""A new controller's memory: quotas as the ledger knows them. The simulator restarts controllers through this, too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from rungway.clock import NS_PER_S
from rungway.contracts import Platform, Tenant
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

    def spent_since(self, tenant: str, wall_ns: int, until_ns: int | None = None) -> int: ...

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


class Newcomer(NamedTuple):
    """A tenant whose meters a reload leaves empty: it comes (and may have been here before), or its budget gets another
    period. `metered`: what that budget's meter said as of the look; None for one that comes."""

    contract: Tenant
    metered: int | None


class Known(NamedTuple):
    """What the ledger knows of one: requests and tokens of the last minute, money of the present window."""

    newcomer: Newcomer
    requests: int
    tokens: int
    spent_nusd: int


def newcomers(cell: Cell, platform: Platform) -> list[Newcomer]:
    """Those that `platform` would bring."""
    found = []
    for contract in platform.tenants:
        state = cell.tenants.get(contract.name)
        if state is None or not state.budget.same_period(contract.budget):
            found.append(Newcomer(contract, None if state is None else state.budget.spent))
    return found


def look_up(found: Sequence[Newcomer], books: Books, now: Now) -> list[Known]:
    """Their usage until `now`, which is when they were found; the rows until then are written. Raises what the ledger
    raises."""
    recent = books.recent(now.wall_ns - RATE_WINDOW_NS) if found else {}
    known = []
    for newcomer in found:
        name, budget = newcomer.contract.name, newcomer.contract.budget
        start_ns, _ = window(budget.per, budget.timezone, now.wall_ns)
        spent = books.spent_since(name, start_ns, now.wall_ns + 1)
        known.append(Known(newcomer, *recent.get(name, (0, 0)), spent))
    return known


def recall(cell: Cell, known: Sequence[Known], now: Now) -> None:
    """After that reload. What was settled since the look comes on top."""
    for usage in known:
        state, metered = cell.tenants[usage.newcomer.contract.name], usage.newcomer.metered
        if metered is None:
            state.requests.drain(usage.requests, now.mono_ns)
            state.tokens.drain(usage.tokens, now.mono_ns)
        since = max(0, state.budget.spent - (metered or 0))
        state.budget.restore(usage.spent_nusd + since, now.wall_ns)
