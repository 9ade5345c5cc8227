"""A new controller's memory: quotas as the ledger knows them. The simulator restarts controllers through this, too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from rungway.clock import NS_PER_S
from rungway.control.cell import Now
from rungway.control.core import Core
from rungway.control.early import restarted

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
