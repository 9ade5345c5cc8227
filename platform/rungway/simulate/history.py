"""Histories of reserve, commit and refund, checked as intervals, the way Jepsen checks a counter.

A commit whose row is on disk is acknowledged; a reservation without one may be lost with a message or a controller, or be
counted already: its outcome is unknown. What a controller believes to be spent in a window then lies within

    [sum of acknowledged commits, that + the most that the unknown ones can cost]

and what was admitted in any stretch of time is at most quota + one burst + what leases gave (+ one burst for each controller
that died: a new one's rate buckets know rows, not reservations).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable

from rungway.clock import NS_PER_S
from rungway.control.cell import Cell
from rungway.leases import Lease
from rungway.simulate.controller import TURN_NS
from rungway.simulate.disk import Disk
from rungway.simulate.loop import MONO_START_NS, Loop
from rungway.types import Ask, Grant, LedgerRow

MINUTE_NS = 60 * NS_PER_S


class _Given:
    """A lease that a gateway holds, and what it has admitted from it."""

    __slots__ = ("lease", "nusd", "requests", "since_ns", "tokens")

    def __init__(self, lease: Lease, now_ns: int) -> None:
        self.lease, self.since_ns = lease, now_ns
        self.tokens: Counter[str] = Counter()
        self.requests: Counter[str] = Counter()
        self.nusd: Counter[str] = Counter()


class _Account:
    """One tenant's commits against its present window, added up as they come: an hour has hundreds of thousands. `begun`: how
    many rows were decided before the window; `acked` cost of rows on disk that belong to it, `late` of rows on disk that
    were decided in it but ended before it by the wall clock."""

    __slots__ = ("acked", "begun", "late", "rows", "start_ns")

    def __init__(self) -> None:
        self.rows: dict[str, tuple[int, LedgerRow]] = {}  # with the number of its decision
        self.start_ns = -1
        self.begun = 0
        self.acked = self.late = 0

    def committed(self, number: int, row: LedgerRow) -> None:
        if row.ended_wall_ns >= self.start_ns:
            self.acked += row.cost_nusd
        elif number >= self.begun:
            self.late += row.cost_nusd

    def recount(self, disk: Disk) -> None:
        self.acked = self.late = 0
        for request_id, (number, row) in self.rows.items():
            if request_id in disk.rows:
                self.committed(number, row)


class History:
    """`leased_nusd`: money that each request admitted from a lease holds; `leased_by` the same per tenant. `admitted`
    counts requests admitted from leases."""

    def __init__(self, loop: Loop, disk: Disk, fail: Callable[[str], None]) -> None:
        self._loop, self._disk, self._fail = loop, disk, fail
        self.admitted = 0
        self.leased_nusd: dict[str, int] = {}
        self.leased_by: Counter[str] = Counter()
        self._leased_tokens: Counter[str] = Counter()
        self._given: dict[str, _Given] = {}
        self._worst: dict[str, tuple[str, int]] = {}  # request -> tenant, the most that it can cost
        self._holds: dict[str, tuple[str, int, int]] = {}  # request -> tenant, tokens, when (loop time)
        self._ends: dict[str, tuple[int, int]] = {}  # request -> tokens used, when
        self._decided: set[str] = set()
        self._number = 0
        self._accounts: defaultdict[str, _Account] = defaultdict(_Account)
        self._pending: dict[str, tuple[int, LedgerRow]] = {}  # decided and not known to be on disk
        self._open: Counter[str] = Counter()  # the most that a tenant's undecided requests can cost
        self.begun: Counter[str] = Counter()  # windows of its budget that a tenant has been seen in

    # -- what happens -----------------------------------------------------------------------------------------

    def reserved(self, tenant: str, grant: Grant, submitted_mono_ns: int) -> None:
        """A grant leaves the controller. Further tries hold nothing more."""
        if grant.request_id in self._holds:
            return
        offer = grant.offer
        output = offer.max_tokens * max(1, offer.best_of)
        worst = grant.price.cost_nusd(input_tokens=offer.prompt_tokens, cached_tokens=0, output_tokens=output)
        worst = max(worst, grant.reserved_nusd)
        self._worst[grant.request_id] = (tenant, worst)
        if grant.request_id not in self._decided:
            self._open[tenant] += worst
        self._holds[grant.request_id] = (tenant, grant.reserved_tokens, submitted_mono_ns - MONO_START_NS)

    def lease(self, gateway: str, lease: Lease) -> None:
        """It arrives at its gateway."""
        self._given[gateway] = _Given(lease, self._loop.now_ns)

    def leased(self, gateway: str, ask: Ask, grant: Grant) -> None:
        """A gateway admits from its lease: within it, within its time, in full."""
        self.admitted += 1
        given = self._given.get(gateway)
        part = None if given is None else given.lease.tenants.get(ask.tenant)
        if given is None or part is None:
            self._fail(f"{gateway} admitted {ask.request_id} without a lease")
            return
        given.tokens[ask.tenant] += grant.reserved_tokens
        given.requests[ask.tenant] += 1
        given.nusd[ask.tenant] += grant.reserved_nusd
        taken = (given.tokens[ask.tenant], given.requests[ask.tenant], given.nusd[ask.tenant])
        if taken[0] > part.tokens or taken[1] > part.requests or (part.nusd is not None and taken[2] > part.nusd):
            self._fail(f"{gateway} admitted {taken} for {ask.tenant}, its lease is {part}")
        if self._loop.now_ns - given.since_ns > given.lease.ttl_s * NS_PER_S:
            self._fail(f"{gateway} admitted {ask.request_id} after its lease was over")
        if grant.offer.degraded or grant.offer.rung:
            self._fail(f"{gateway} degraded {ask.request_id} without an audit row: {grant.offer.degraded}")
        self.leased_nusd[ask.request_id] = grant.reserved_nusd
        self.leased_by[ask.tenant] += grant.reserved_nusd
        self._leased_tokens[ask.tenant] += grant.reserved_tokens
        self.reserved(ask.tenant, grant, MONO_START_NS + self._loop.now_ns)

    def written(self, rows: Iterable[LedgerRow]) -> None:
        """Rows that a controller has decided and that are on their way to the disk; a crash may still lose them."""
        for row in rows:
            request_id, account = row.request_id, self._accounts[row.tenant]
            if request_id not in self._decided:
                self._decided.add(request_id)
                tenant, worst = self._worst.get(request_id, (row.tenant, 0))
                self._open[tenant] -= worst
            known = account.rows.get(request_id)
            if known is None:
                account.rows[request_id] = self._pending[request_id] = (self._number, row)
                self._number += 1
            else:
                self._reword(account, known[0], row)
            # What it held was free from the middle of the turn on, whose effects are seen at its end.
            self._ends[request_id] = (row.prompt_tokens + row.output_tokens, self._loop.now_ns - TURN_NS)

    def _reword(self, account: _Account, number: int, row: LedgerRow) -> None:
        """A second word about a request takes the place of the first."""
        self._commit()
        account.rows[row.request_id] = (number, row)
        if row.request_id in self._pending:
            self._pending[row.request_id] = (number, row)
        account.recount(self._disk)

    def _commit(self) -> None:
        """Note which decisions have reached the disk."""
        for request_id, (number, row) in list(self._pending.items()):
            if request_id in self._disk.rows:
                del self._pending[request_id]
                self._accounts[row.tenant].committed(number, row)

    def undurable(self) -> list[LedgerRow]:
        """Decided and not on disk: what a crash now makes a controller forget until gateways repeat their ends."""
        self._commit()
        return [row for _, row in self._pending.values()]

    def restarted(self) -> None:
        """A new controller knows what is on disk: decisions that are not there are unknown again."""
        for account in self._accounts.values():
            account.rows = {name: kept for name, kept in account.rows.items() if name in self._disk.rows}
            account.recount(self._disk)
        self._pending.clear()
        self._decided = {name for account in self._accounts.values() for name in account.rows}
        self._open = Counter()
        for request_id, (tenant, worst) in self._worst.items():
            if request_id not in self._decided:
                self._open[tenant] += worst

    # -- what must hold ---------------------------------------------------------------------------------------

    def look(self, cell: Cell) -> None:
        """Spent money of the present window against the interval of the history."""
        self._commit()
        for name, state in cell.tenants.items():
            account, start_ns = self._accounts[name], state.budget.bounds[0]
            if account.start_ns != start_ns:
                self.begun[name] += account.start_ns < start_ns
                account.start_ns, account.begun = start_ns, self._number
                account.recount(self._disk)
        pending: Counter[str] = Counter()
        for number, row in self._pending.values():
            if number >= self._accounts[row.tenant].begun:
                pending[row.tenant] += row.cost_nusd
        for name, state in cell.tenants.items():
            spent, account = state.budget.spent, self._accounts[name]
            low, high = account.acked, account.acked + account.late + self._open[name] + pending[name]
            if not low <= spent <= high:
                self._fail(f"{name}: {spent} nano-dollars spent, the history allows {low} to {high}")

    def final(self, cell: Cell, crashes: int) -> None:
        """Admitted tokens in any stretch of time: a bucket of the quota, filled by reservations and emptied by time and
        refunds, never holds more than one burst and what the leases gave."""
        events: dict[str, list[tuple[int, int]]] = {}
        for request_id, (tenant, tokens, when_ns) in self._holds.items():
            if tokens:
                events.setdefault(tenant, []).append((when_ns, tokens))
                used, end_ns = self._ends.get(request_id, (tokens, when_ns))
                events[tenant].append((end_ns, min(0, used - tokens)))
        for tenant, found in events.items():
            limit = cell.tenants[tenant].contract.quotas.tokens_per_minute
            if limit is None:
                continue
            allowed = limit * (1 + crashes) + self._leased_tokens[tenant]
            level = last_ns = 0.0
            for when_ns, tokens in sorted(found):
                level = max(0.0, level - limit * (when_ns - last_ns) / MINUTE_NS) + tokens
                last_ns = when_ns
                if level > allowed + 1:
                    self._fail(f"{tenant} was admitted {level:.0f} tokens, its quota and leases give {allowed}")
                    break
