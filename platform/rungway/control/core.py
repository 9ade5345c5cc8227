"""The controller's brain: one method per message, no I/O, time as a parameter. The service runs it behind channels, the
simulator and the tests run it as it is.
"""

from __future__ import annotations

from collections.abc import Iterable

from rungway.contracts import Platform
from rungway.control import dispatch, early, ladder_walk, lease, preempt, returns, settle
from rungway.control.cell import Cell, Now
from rungway.control.flight import Attempt, Flight
from rungway.control.line import dequeue
from rungway.control.refuse import refuse, refuse_closed, tell_cancelled
from rungway.messages import Directory, Granted, Peers, ReplicaInfo, Report, Retry
from rungway.messages import Flight as WireFlight
from rungway.outcomes import Code
from rungway.policies.quality import QualityModel
from rungway.types import Ask, AttemptEnd, Finish, OfferKind


class Core:
    """Feed it messages, call `settle_turn` after each batch and `tick` regularly, then take `cell.effects`."""

    def __init__(self, platform: Platform, quality: QualityModel, now: Now) -> None:
        self.cell = Cell(platform, quality, now)

    # -- gateways ---------------------------------------------------------------------------------------------

    def gateway_hello(self, gateway_id: str, flights: Iterable[WireFlight], now: Now) -> None:
        """A gateway (re)connected: it gets the directory and the peers, its flights are taken over or re-judged."""
        cell = self.cell
        cell.gateways[gateway_id] = None
        cell.leased.pop(gateway_id, None)
        cell.effects.sends.append((gateway_id, Directory(cell.version, cell.platform, cell.session_secret)))
        cell.effects.sends.append((gateway_id, Peers(list(cell.replicas.values()))))
        for wire in flights:
            known = cell.flights.get(wire.ask.request_id)
            if known is not None:
                known.gateway_lost_ns = None
                if wire.grant is None and known.grant is not None and known.entry is None:
                    cell.effects.held.append((gateway_id, Granted(known.grant)))  # it may be degraded
            elif wire.grant is None:
                early.arrive(cell, wire.ask, now)
            else:
                self._adopt(wire, now)

    def _adopt(self, wire: WireFlight, now: Now) -> None:
        """A grant that is not in these books: an earlier incarnation of this controller made it, or the gateway did from its
        lease. Hold what it holds; the request may be over already, then both sides' ends are on their way or here."""
        cell, ask, grant = self.cell, wire.ask, wire.grant
        state = cell.tenants.get(ask.tenant)
        assert grant is not None
        if state is None or ask.request_id in cell.settled or grant.offer.tier not in cell.pools:
            return
        flight = Flight(ask, state, now.mono_ns)
        flight.grant, flight.offer, flight.pool = grant, grant.offer, grant.offer.tier
        flight.cause, flight.granted_ns = grant.reason, now.mono_ns
        flight.first_wait_ms = grant.queue_wait_ms
        flight.held_tokens, flight.held_nusd = grant.reserved_tokens, grant.reserved_nusd
        flight.next_attempt = grant.attempt + 1
        flight.evictions = grant.evictions
        flight.places = flight.sequences
        state.requests.take(1, now.mono_ns)
        state.tokens.take(flight.held_tokens, now.mono_ns)
        state.budget.hold(flight.held_nusd, now.wall_ns)
        flight.take_off()
        cell.flights[ask.request_id] = flight
        if grant.offer.kind is not OfferKind.MODEL:
            return
        output = max(0, flight.held_tokens - grant.offer.prompt_tokens)
        attempt = Attempt(grant.replica_id, flight.places, flight.held_tokens, output, flight.band)
        attempt.granted_ns = now.mono_ns
        flight.attempts[grant.attempt] = attempt
        cell.pools[flight.pool].hold(attempt, state)
        # All that its engines said, also of tries that came after the grant that a gateway names for what it let in itself.
        for _, orphan in sorted(cell.orphans.pop(ask.request_id, {}).items()):
            settle.attempt_ended(cell, orphan.teller, orphan.end, now)

    def gateway_lost(self, gateway_id: str, now: Now) -> None:
        early.leave(self.cell, gateway_id)
        settle.gateway_lost(self.cell, gateway_id, now)

    def submit(self, ask: Ask, now: Now) -> None:
        early.arrive(self.cell, ask, now)

    def withdraw(self, request_id: str, outcome: str, now: Now) -> None:
        early.forget(self.cell, request_id)
        returns.withdraw(self.cell, request_id, outcome, now)

    def retry(self, gateway_id: str, message: Retry, now: Now) -> None:
        if message.request_id in self.cell.settled and message.request_id not in self.cell.flights:
            refuse_closed(self.cell, gateway_id, message.request_id)
        else:
            returns.retry(self.cell, message, now)

    def finished(self, gateway_id: str, finish: Finish, now: Now) -> None:
        settle.finished(self.cell, gateway_id, finish, now)

    # -- replicas ---------------------------------------------------------------------------------------------

    def replica_hello(self, info: ReplicaInfo, now: Now, running: Iterable[tuple[str, int]] = ()) -> None:
        """A replica registered, or registered again with what it still runs. Everyone learns its address."""
        cell = self.cell
        pool = cell.pools.get(info.tier)
        if pool is None:
            return
        cell.replicas[info.replica_id] = info
        view = pool.add(info, now.mono_ns)
        for request_id, number in running:
            returns.runs_on(cell, info.replica_id, request_id, number)
        mine = [
            attempt
            for flight in cell.flights.values()
            for attempt in flight.attempts.values()
            if attempt.replica_id == info.replica_id and not attempt.released
        ]
        sequences, tokens = sum(attempt.sequences for attempt in mine), sum(attempt.tokens for attempt in mine)
        pool.roster.load(view, sequences, tokens)
        self._tell_peers()

    def report(self, report: Report, now: Now) -> None:
        info = self.cell.replicas.get(report.replica_id)
        if info is None:
            return
        pool = self.cell.pools[info.tier]
        pool.report(report.replica_id, report.stats, report.draining, now.mono_ns)
        if report.prefixes is not None and (held := pool.prefixes.get(report.replica_id)) is not None:
            held.apply(report.prefixes.full, report.prefixes.added, report.prefixes.removed)
        for request_id, attempt, emitted in report.progress:
            returns.runs_on(self.cell, report.replica_id, request_id, attempt)
            settle.progress(self.cell, request_id, attempt, emitted, now)

    def attempt_ended(self, replica_id: str, end: AttemptEnd, now: Now) -> None:
        settle.attempt_ended(self.cell, replica_id, end, now)

    def replica_lost(self, replica_id: str, now: Now) -> None:
        if replica_id in self.cell.replicas:
            settle.replica_lost(self.cell, replica_id, now)
            self._tell_peers()

    def _tell_peers(self) -> None:
        peers = Peers(list(self.cell.replicas.values()))
        self.cell.effects.sends.extend((gateway_id, peers) for gateway_id in self.cell.gateways)

    # -- time and commands ------------------------------------------------------------------------------------

    def settle_turn(self, now: Now) -> None:
        """After a batch of messages: give out what capacity there is."""
        early.admit_early(self.cell, now)
        dispatch.dispatch(self.cell, now)

    def tick(self, now: Now) -> None:
        """The regular step: time-outs, rungs, and another look at the queues."""
        settle.sweep(self.cell, now)
        self.cell.part()
        early.admit_early(self.cell, now)
        ladder_walk.walk(self.cell, now)
        dispatch.dispatch(self.cell, now)
        preempt.make_room(self.cell, now)
        lease.renew(self.cell, now)

    def reload(self, platform: Platform, now: Now) -> None:
        """Put a validated configuration into force and tell every gateway."""
        cell = self.cell
        before = cell.platform.digest
        cell.adopt(platform, now)
        cell.audit("reload", now, config_from=before, config_to=platform.digest, version=cell.version)
        directory = Directory(cell.version, platform, cell.session_secret)
        cell.effects.sends.extend((gateway_id, directory) for gateway_id in cell.gateways)

    def cancel(self, request_id: str, tenant: str | None, now: Now) -> bool:
        """Stop a request wherever it is. `tenant` None = any tenant (admin). False when there is no such request."""
        flight = self.cell.flights.get(request_id)
        if flight is None or (tenant is not None and flight.ask.tenant != tenant):
            return False
        if flight.entry is not None and not flight.attempts:
            dequeue(self.cell, flight)
            refuse(self.cell, flight, Code.CANCELLED, "The request was cancelled.", None, now)
            return True
        tell_cancelled(self.cell, flight, now)
        return True

    def reoffer_all(self, now: Now) -> None:
        """An operator moved a rung: whoever waits gets the offer that now holds."""
        for pool in list(self.cell.pools.values()):
            ladder_walk.reoffer(self.cell, pool, now)
        dispatch.dispatch(self.cell, now)
