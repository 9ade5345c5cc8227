"""A played gateway: the states and messages of the real one (`gateway/flight.py`), without HTTP, text and tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from rungway.clock import NS_PER_MS, NS_PER_S
from rungway.contracts import Platform
from rungway.gateway.faults import BROKEN, FAULTS, Broken, Fault
from rungway.gateway.lease import Leases, Time
from rungway.messages import (
    Cancel,
    FinishAck,
    Finished,
    GatewayHello,
    Granted,
    Leased,
    Peers,
    Refused,
    Submit,
    Withdraw,
)
from rungway.outcomes import Code, Outcome
from rungway.policies.quality import QualityModel
from rungway.simulate.flight import Flight
from rungway.simulate.link import Link, Wire
from rungway.simulate.news import LeaseWatch, catch_up, moved
from rungway.simulate.replica import News, Order, SimReplica, hash_unit
from rungway.simulate.workload import Arrival
from rungway.types import Action, Ask, Finish, Grant, OfferKind, Refusal, billing_of

TICK_NS = 250 * NS_PER_MS
RESEND_NS = 5 * NS_PER_S
CANCEL_WAIT_NS = NS_PER_S

OnDone = Callable[[Flight, Outcome], None]


class SimGateway:
    """`on_done` tells the client how its request ended; a client whose gateway dies is told by whoever killed it."""

    def __init__(
        self,
        wire: Wire,
        name: str,
        platform: Platform,
        replicas: Mapping[str, SimReplica],
        on_done: OnDone,
        quality: QualityModel,
        watch: LeaseWatch,
    ) -> None:
        self.wire, self.loop, self.name, self.alive = wire, wire.loop, name, True
        self.platform, self.replicas, self.on_done = platform, replicas, on_done
        self.spec = platform.gateway
        self.flights: dict[str, Flight] = {}
        self.unacked: dict[str, tuple[Finish, int]] = {}
        self.links: dict[str, Link] = {}
        self.uplink: Link | None = None
        self.lost_ns: int | None = 0
        self.starts = 0
        self.watch = watch
        self.leases = Leases(quality, self._reachable, self._leased, lambda: Time(*self.loop.clocks()))
        self.loop.after(int(TICK_NS * (0.5 + hash_unit(name))), self._tick)

    # -- clients ----------------------------------------------------------------------------------------------

    def submit(self, ask: Ask, arrival: Arrival) -> Flight:
        now = self.loop.now_ns
        limit_ns = now + int(self.spec.request_timeout_s * NS_PER_S)
        if ask.deadline_ms is not None:
            limit_ns = min(limit_ns, now + int(ask.deadline_ms * NS_PER_MS))
        flight = Flight(ask, arrival, now, limit_ns)
        self.flights[ask.request_id] = flight
        if not self.tell(Submit(ask)):
            self.leases.submit(flight, self.platform)
        return flight

    def leave(self, flight: Flight) -> None:
        """The client hangs up."""
        if flight.state != "ended" and self.alive:
            self._fault(flight, Fault.CLIENT_GONE)

    # -- channels ---------------------------------------------------------------------------------------------

    def tell(self, message: object) -> bool:
        return self.uplink is not None and self.uplink.send(self, message)

    def up(self, link: Link) -> None:
        if link.server.name in self.links:
            return
        self.uplink, self.lost_ns = link, None
        wires = [flight.wire(self.loop.now_ns) for flight in self.flights.values()]
        self.tell(GatewayHello(self.name, self.leases.hello(wires, self.unacked.__contains__)))
        for flight in self.flights.values():
            if flight.state == "retrying":
                self.tell(flight.retry_message())
        self._resend(0)

    def lost(self, link: Link) -> None:
        if link is self.uplink:
            self.lost_ns = self.loop.now_ns
            self.leases.lost(self.flights.values())
            return
        for flight in list(self.flights.values()):
            if flight.grant is not None and flight.grant.replica_id == link.server.name:
                self._replica_lost(flight)

    def receive(self, link: Link, message: object) -> None:
        if isinstance(message, News):
            self._news(message)
        elif isinstance(message, Granted):
            self._granted(message.grant)
        elif isinstance(message, Refused):
            flight = self.flights.get(message.refusal.request_id)
            if flight is not None:
                self._refused(flight, message.refusal)
        elif isinstance(message, FinishAck):
            for request_id in message.request_ids:
                self.unacked.pop(request_id, None)
        elif isinstance(message, Leased):
            self.watch.lease(self.name, message.lease)
            self.leases.receive(message.lease)
        elif isinstance(message, Peers):
            self._peers(message)

    def _peers(self, peers: Peers) -> None:
        names = {info.replica_id for info in peers.replicas}
        for name in sorted(names - self.links.keys()):
            if name in self.replicas:
                self.links[name] = Link(self.wire, self, self.replicas[name])

    def kill(self) -> list[Flight]:
        """SIGKILL; the flights that died with it."""
        self.alive = False
        for link in self.links.values():
            link.close()
        if self.uplink is not None:
            self.uplink.close()
        gone, self.flights = list(self.flights.values()), {}
        return gone

    # -- decisions --------------------------------------------------------------------------------------------

    def _reachable(self) -> set[str]:
        return {name for name, link in self.links.items() if link.client_up}

    def _leased(self, grant: Grant) -> None:
        self.watch.leased(self.name, self.flights[grant.request_id].ask, grant)
        self._granted(grant)

    def _granted(self, grant: Grant) -> None:
        flight = self.flights.get(grant.request_id)
        if flight is None:
            if grant.request_id not in self.unacked:
                self._settle(Finish(request_id=grant.request_id, outcome=Outcome.CLIENT_CANCELLED))
            return
        if flight.state in ("waiting", "retrying") and (flight.grant is None or grant.attempt > flight.grant.attempt):
            flight.grant = grant
            flight.first_grant = flight.first_grant or grant
            self._begin(flight, grant)

    def _begin(self, flight: Flight, grant: Grant) -> None:
        flight.state, flight.changed_ns, flight.broken = "running", self.loop.now_ns, None
        if grant.offer.kind is not OfferKind.MODEL:
            flight.first_ns = flight.last_ns = self.loop.now_ns
            self._end(flight, Outcome.CACHE_HIT if grant.offer.kind is OfferKind.CACHE else Outcome.TEMPLATE)
            return
        job = flight.begin(grant)
        link = self.links.get(grant.replica_id)
        self.starts += 1
        if link is None or not link.send(self, Order(job, billing_of(flight.ask, grant))):
            self._replica_lost(flight)

    def _refused(self, flight: Flight, refusal: Refusal) -> None:
        if refusal.code == Code.CANCELLED and flight.grant is not None:
            self._fault(flight, Fault.CANCELLED)
        elif flight.state in ("waiting", "retrying"):
            flight.refusal, flight.code = refusal, Code(refusal.code)
            self._end(flight, BROKEN[flight.broken][0] if flight.broken is not None else Outcome.REFUSED)

    # -- the stream -------------------------------------------------------------------------------------------

    def _news(self, news: News) -> None:
        flight = self.flights.get(news.request_id)
        if flight is None or flight.grant is None or flight.grant.attempt != news.attempt:
            return
        if flight.state not in ("running", "closing") or flight.over:
            return
        now = self.loop.now_ns
        flight.changed_ns = now
        if news.tokens:
            flight.first_ns = flight.first_ns or now
            flight.last_ns = now
            flight.delivered[news.attempt] = max(flight.delivered[news.attempt], news.tokens)
        if news.finish is None:
            return
        flight.over = True
        if flight.state == "closing":
            self._ask_again(flight)
        elif news.finish == "length":
            whole = flight.target == flight.arrival.output_tokens
            self._end(flight, Outcome.COMPLETED if whole else Outcome.LENGTH)
        else:
            self._break(flight, Broken.EVICTED if news.error == "evicted" else Broken.REPLICA_LOST)

    def _replica_lost(self, flight: Flight) -> None:
        if flight.state == "closing":
            flight.over = True
            self._ask_again(flight)
        elif flight.state == "running" and not flight.over:
            catch_up(flight, self.replicas, self.links, self.loop.now_ns, self.wire.base_ns)
            flight.over = True
            self._break(flight, Broken.REPLICA_LOST)

    def _break(self, flight: Flight, broken: Broken) -> None:
        """The attempt failed: another one, or the end."""
        outcome, code, _, _ = BROKEN[broken]
        if broken is Broken.EVICTED:
            flight.evicted += 1
        elif flight.ask.action is Action.NON_IDEMPOTENT_WRITE or flight.failed > self.spec.retries_max:
            flight.code = code
            self._end(flight, outcome)
            return
        flight.broken = broken
        if flight.over:
            self._ask_again(flight)
            return
        flight.state = "closing"
        self._stop_attempt(flight)
        self.loop.after(CANCEL_WAIT_NS, self._give_up, flight, flight.attempts)

    def _give_up(self, flight: Flight, attempts: int) -> None:
        if flight.state == "closing" and flight.attempts == attempts:
            self._ask_again(flight)

    def _ask_again(self, flight: Flight) -> None:
        flight.state, flight.changed_ns, flight.over = "retrying", self.loop.now_ns, True
        self.tell(flight.retry_message())

    # -- ends -------------------------------------------------------------------------------------------------

    def _fault(self, flight: Flight, fault: Fault) -> None:
        outcome, code, _, _ = FAULTS[fault]
        if flight.state == "running":
            catch_up(flight, self.replicas, self.links, self.loop.now_ns, self.wire.base_ns)
            self._stop_attempt(flight)
        if fault is Fault.NO_CONTROLLER and flight.state == "retrying" and flight.broken is not None:
            outcome, code, _, _ = BROKEN[flight.broken]
        flight.code = code
        self._end(flight, outcome)

    def _stop_attempt(self, flight: Flight) -> None:
        if flight.grant is not None and not flight.over:
            link = self.links.get(flight.grant.replica_id)
            if link is not None:
                link.send(self, Cancel(flight.ask.request_id))

    def _end(self, flight: Flight, outcome: Outcome) -> None:
        if flight.state == "ended":
            return
        flight.state = "ended"
        self.flights.pop(flight.ask.request_id, None)
        self.leases.ended(flight.ask.request_id, self.platform)
        if flight.grant is not None:
            self._settle(flight.finish(outcome, self.loop.now_ns))
        elif flight.refusal is None:
            self.tell(Withdraw(flight.ask.request_id, outcome))
        self.on_done(flight, outcome)

    def _settle(self, finish: Finish) -> None:
        self.unacked[finish.request_id] = (finish, self.loop.now_ns)
        self.tell(Finished(finish))

    def _resend(self, older_than_ns: int) -> None:
        now = self.loop.now_ns
        for request_id, (finish, sent_ns) in list(self.unacked.items()):
            if now - sent_ns >= older_than_ns and self.tell(Finished(finish)):
                self.unacked[request_id] = (finish, now)

    def _tick(self) -> None:
        """The clocks of all requests here."""
        if not self.alive:
            return
        self.loop.after(TICK_NS, self._tick)
        now = self.loop.now_ns
        quiet_ns = int(self.spec.inter_token_timeout_s * NS_PER_S)
        for flight in list(self.flights.values()):
            if now >= flight.limit_ns:
                self._fault(flight, flight.limit_fault(self.spec.request_timeout_s))
            elif flight.state == "running":
                quiet = now - flight.changed_ns > quiet_ns
                if quiet and not moved(flight, self.replicas, self.links, now, self.wire.base_ns):
                    self._break(flight, Broken.TIMEOUT)
            elif self.lost_ns is not None and flight.state in ("waiting", "retrying"):
                since_ns = max(self.lost_ns, flight.changed_ns)
                if now - since_ns > self.spec.controller_wait_s * NS_PER_S:
                    self._fault(flight, Fault.NO_CONTROLLER)
        if self.lost_ns is None:
            self._resend(RESEND_NS)
