"""What must hold whatever goes wrong. Looked at in every turn, recounted every second, settled at the end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING

from rungway.clock import NS_PER_S
from rungway.control.cell import Cell
from rungway.control.core import Core
from rungway.control.effects import Effects
from rungway.control.flight import Flight
from rungway.messages import AttemptAck, FinishAck, Granted, Message
from rungway.policies.desk import REASON
from rungway.simulate import books
from rungway.simulate.disk import Disk
from rungway.simulate.history import History
from rungway.simulate.loop import Loop
from rungway.simulate.sums import recount
from rungway.types import Grant, OfferKind, Risk

if TYPE_CHECKING:
    from rungway.simulate.controller import SimController
    from rungway.simulate.replica import SimReplica
    from rungway.simulate.world import World

SHOWN_MAX = 20
LOOK_EVERY_NS = NS_PER_S


class Invariants:
    """`broken`: what was violated, in words. A crash of the controller makes it forget what was in flight until the
    gateways say hello; what that may cost at most (the leases outstanding at the crash) is counted as slack: `money_slack` by
    tenant. `reserved`: money that each granted request holds."""

    def __init__(self, loop: Loop, disk: Disk) -> None:
        self.loop, self.disk = loop, disk
        self.history = History(loop, disk, self.fail)
        self.broken: list[str] = []
        self.checks = 0
        self.crashes = 0
        # Free answers (cache, template, refusal) whose controller died before their row was on disk: nobody else can
        # write it.
        self.unwritten = 0
        self.misnamed = 0  # rows that say gateway_lost although the gateway was only cut off and its client got all
        self.reserved: dict[str, int] = {}
        self.money_slack: Counter[str] = Counter()
        self._places_slack: Counter[str] = Counter()
        self._levels: dict[str, tuple[int, int]] = {}  # tenant -> (level of its request bucket, when)
        self._looked_ns = 0
        self.replicas: Mapping[str, SimReplica] = {}  # of the world
        self._unheld: set[tuple[str, int]] = set()  # tries that ran without a place at the last look
        self._crowded_ns: dict[str, int] = {}

    def fail(self, what: str) -> None:
        if len(self.broken) < SHOWN_MAX:
            self.broken.append(f"at {self.loop.now_ns / NS_PER_S:.3f} s: {what}")

    # -- every turn -------------------------------------------------------------------------------------------

    def turn(self, core: Core, effects: Effects) -> None:
        """`effects` are about to be carried out."""
        cell = core.cell
        for sends in (effects.sends, effects.held):
            for _, message in sends:
                if isinstance(message, Granted):
                    self._granted(cell, message.grant)
        if effects.rows:
            self.history.written(effects.rows)
        if self.loop.now_ns - self._looked_ns >= LOOK_EVERY_NS:
            self._looked_ns = self.loop.now_ns
            self._recount(cell)
            self._runners(cell)
            self._refills(cell)
            self.history.look(cell)

    def _granted(self, cell: Cell, grant: Grant) -> None:
        self.checks += 1
        flight = cell.flights.get(grant.request_id)
        if flight is None:
            return
        self.reserved[grant.request_id] = grant.reserved_nusd
        self.history.reserved(flight.ask.tenant, grant, flight.submitted_ns)
        ask, state = flight.ask, flight.state
        if sum(not attempt.released for attempt in flight.attempts.values()) > 1:
            self.fail(f"{ask.request_id} holds the places of several tries")
        if ask.risk is Risk.HIGH and (grant.offer.degraded or grant.offer.rung):
            self.fail(f"{ask.request_id} is high risk and was degraded: {grant.offer.degraded}")
        limit = state.contract.quotas.concurrent_requests
        slack = self._places_slack[ask.tenant]
        if grant.offer.kind is not OfferKind.MODEL:
            return
        if limit is not None and state.running > limit + slack and self._models(cell, ask.tenant) > limit + slack:
            self.fail(f"{ask.tenant} runs {state.running} requests, its limit is {limit}")
        if not flight.retrying and not slack:
            self._share(cell, flight)

    def _models(self, cell: Cell, tenant: str) -> int:
        """Requests that a model runs for; cached answers and templates are over as soon as they are granted, and what a
        gateway admitted from its lease is the lease's overspend."""
        mine = (f.grant for f in cell.flights.values() if f.running and f.ask.tenant == tenant)
        return sum(
            grant is not None and grant.offer.kind is OfferKind.MODEL and grant.reason != REASON for grant in mine
        )

    def _share(self, cell: Cell, flight: Flight) -> None:
        """Only while somebody else has been active for a while: a lone tenant may take all, and keeps it."""
        state, pool = flight.state, cell.pools[flight.pool]
        others = any(other is not state and other.active(self.loop.now().mono_ns) for other in cell.tenants.values())
        cap = state.contract.isolation.in_flight_share_max
        if not others or flight.entry is not None or state.pool_running.get(pool.name, 0) <= 1:
            return
        newest = flight.attempts[max(flight.attempts)]
        before = state.pool_tokens.get(pool.name, 0) - newest.tokens
        if before > 0 and before + newest.tokens > cap * pool.capacity_tokens() and not newest.released:
            since = self._crowded_ns.setdefault(state.contract.name, self.loop.now_ns)
            if self.loop.now_ns - since > NS_PER_S:
                self.fail(f"{state.contract.name} holds {before + newest.tokens} tokens of {pool.name}, cap {cap}")
        else:
            self._crowded_ns.pop(state.contract.name, None)

    def sending(self, core: Core, message: Message) -> None:
        """A message leaves the controller now: what it promises must be on disk."""
        match message:
            case Granted() if message.grant.offer.degraded:
                self.checks += 1
                if message.grant.request_id not in self.disk.downgrades:
                    self.fail(f"{message.grant.request_id} is told its downgrade before the audit row is written")
            case FinishAck():
                self.checks += 1
                for request_id in message.request_ids:
                    if request_id in core.cell.settled and request_id not in self.disk.rows:
                        self.fail(f"the end of {request_id} is acknowledged before its row is written")
            case AttemptAck():
                self.checks += 1
                for key in message.attempts:
                    if tuple(key) not in self.disk.ends:
                        self.fail(f"the end of try {key} is acknowledged before it is written")

    # -- every second -----------------------------------------------------------------------------------------

    def _recount(self, cell: Cell) -> None:
        self.checks += 1
        recount(cell, self.fail)

    def _runners(self, cell: Cell) -> None:
        """What a replica of the list has reported to run fills its place, but for the moment of a message."""
        unheld: set[tuple[str, int]] = set()
        for name, info in cell.replicas.items():
            for request_id, number in self.replicas[name].reported():
                flight = cell.flights.get(request_id)
                attempt = flight.attempts.get(number) if flight is not None else None
                if flight is None or attempt is None or attempt.lost_ns is None or flight.finish is not None:
                    continue
                if flight.entry is None and number == flight.next_attempt - 1:
                    unheld.add((request_id, number))
                    if (request_id, number) in self._unheld:
                        self.fail(f"{request_id} runs on {name} ({info.tier}) and holds no place there")
        self._unheld = unheld

    def _refills(self, cell: Cell) -> None:
        """A request bucket gains at most its rate times the time that passed on the monotonic clock."""
        now = self.loop.now()
        for name, state in cell.tenants.items():
            known = self._levels.get(name)
            if known is not None and known[0] == state.requests.limit and state.last_ask_ns < known[1]:
                continue  # full and untouched
            limit = state.contract.quotas.requests_per_minute
            level = state.requests.remaining(now.mono_ns)
            if not limit or level is None:
                continue
            if known is not None:
                gained, most = level - known[0], limit * (now.mono_ns - known[1]) / (60 * NS_PER_S) + 1
                if gained > most:
                    self.fail(f"{name}: its request bucket gained {gained}, at most {most:.1f} were due")
            self._levels[name] = (level, now.mono_ns)

    # -- crashes ----------------------------------------------------------------------------------------------

    def crashed(self, controller: SimController) -> None:
        """The controller is about to die: what is in flight now, or decided and not on disk yet, may be forgotten for a
        while."""
        self.crashes += 1
        for row in self.history.undurable():  # without its row a request may come back, and go on within what it held
            self.money_slack[row.tenant] += max(row.cost_nusd, self.reserved.get(row.request_id, 0))
        for flight in controller.core.cell.flights.values():
            self.money_slack[flight.ask.tenant] += max(flight.held_nusd, self.reserved.get(flight.ask.request_id, 0))
            self._places_slack[flight.ask.tenant] += 1

    def restarted(self, core: Core) -> None:
        self._levels.clear()
        self.history.restarted()

    # -- the end ----------------------------------------------------------------------------------------------

    def final(self, world: World) -> None:
        """Everything is over: books closed, every bill right."""
        if not world.at_rest():
            self.fail(f"not at rest: {_left(world)}")
            return
        cell = world.controller.core.cell
        self._recount(cell)
        for name, state in cell.tenants.items():
            if state.running or state.waiting or state.budget.held or state.retries.running:
                self.fail(f"{name} still holds something at rest")
        for pool in cell.pools.values():
            if pool.queue.depth() or pool.held_tokens or pool.queued_tokens:
                self.fail(f"{pool.name} still holds something at rest")
        books.close(self, world)
        self.history.final(cell, self.crashes)


def _left(world: World) -> str:
    cell = world.controller.core.cell
    flights = [f"{f.ask.request_id} {len(f.attempts)} attempts" for f in list(cell.flights.values())[:3]]
    owed = {r.name: len(r.owed) for r in world.living() if r.owed}
    gateways = {g.name: (len(g.flights), len(g.unacked)) for g in world.gateways if g.alive}
    return f"flights {flights}, owed {owed}, gateways {gateways}, orphans {len(cell.orphans)}"
