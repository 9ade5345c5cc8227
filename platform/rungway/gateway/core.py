"""The gateway's state: channels to controller and replicas, requests in flight, what still has to be acknowledged.

A controller that goes away is not an event for streams in flight; new requests are admitted from the lease
(`lease.py`) or wait for it (`controller_wait_s`). On every (re)connect GatewayHello names all flights, so that a controller without memory can rebuild its books.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec

from rungway.cache.exact import ExactCache
from rungway.clock import NS_PER_MS, NS_PER_S, monotonic_ns
from rungway.contracts import ChannelSpec, GatewaySpec
from rungway.errors import RequestError
from rungway.gateway.answer import Stored
from rungway.gateway.catalogue import Catalogue
from rungway.gateway.constrain import Checks
from rungway.gateway.faults import Fault
from rungway.gateway.flight import Flight
from rungway.gateway.idempotency import Idempotency
from rungway.gateway.lease import Leases
from rungway.gateway.links import Links
from rungway.gateway.prompts import Lexer, Tokenizers
from rungway.gateway.uplink import Uplink
from rungway.messages import (
    Deltas,
    Directory,
    Finished,
    GatewayHello,
    Granted,
    Leased,
    Message,
    Peers,
    Refused,
    Retry,
    Start,
    Submit,
)
from rungway.messages import Flight as WireFlight
from rungway.outcomes import Code, Outcome
from rungway.policies.quality import load_default
from rungway.types import Finish, Grant

SWEEP_S = 0.05
COUNTS_S = 0.5
LOAD_S = 1.0
RESEND_S = 5.0
CUT_S = 5.0
UNACKED_FACTOR = 4


class Gateway:
    """Life: `start`, then requests (see app.py), then `stop`; both may be called twice. `gateway_id` must be new for
    every incarnation of the process. `healthy`: its loops run. `ready`: it can serve every tier."""

    def __init__(
        self,
        *,
        gateway_id: str,
        resolve_controller: Callable[[], Awaitable[str]],
        channel: ChannelSpec,
        models_dir: Path,
    ) -> None:
        self.gateway_id = gateway_id
        self.catalogue: Catalogue | None = None
        self.session_secret = b""  # the controller's, so that all gateways accept the same dashboard sessions
        self.tokenizers = Tokenizers(models_dir)
        self.cache: ExactCache[Stored] = ExactCache()
        self.checks = Checks()
        self.idempotency: Idempotency[Stored] = Idempotency()
        self.flights: dict[str, Flight] = {}
        self.stopping = False
        self._channel = channel
        self._spec = GatewaySpec()
        self._uplink = Uplink(gateway_id, resolve_controller, channel, self._on_message, self._on_up, self._on_lost)
        # What others need of the channel to the controller, under this roof.
        self.tell = self._uplink.tell
        self.count = self._uplink.count
        self.query = self._uplink.query
        self._links = Links(gateway_id, channel, self._on_deltas, self._on_replica_lost)
        self._leases = Leases(load_default(), self._links.reachable, self._on_lease)
        self.admitting = self._leases.admitting
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Connect to the controller and start the clocks; does not wait for either."""
        if self._tasks:
            return
        self.stopping = False
        await self._uplink.start()
        loop = asyncio.get_running_loop()
        self._load_due = asyncio.Event()
        self._tasks = [loop.create_task(self._sweep()), loop.create_task(self._load())]

    async def stop(self) -> None:
        """End what is in flight with an error, send the last settlements, close the channels."""
        if not self._tasks:
            return
        self.stopping = True
        for flight in list(self.flights.values()):
            flight.on_fault(Fault.STOPPING, monotonic_ns())
        for _ in range(int(1 / SWEEP_S)):
            if not self.flights:
                break
            await asyncio.sleep(SWEEP_S)
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)
        self._tasks = []
        self.checks.close()
        await self._links.stop()
        await self._uplink.stop()

    def healthy(self) -> bool:
        return bool(self._tasks) and not any(task.done() for task in self._tasks)

    def ready(self) -> bool:
        return not self.lacking()

    def lacking(self) -> list[str]:
        """What keeps this gateway from being ready, in words."""
        lacking = [] if self._uplink.connected else ["controller"]
        if self.stopping:
            lacking.append("stopping")
        if self.catalogue is None:
            return [*lacking, "directory"]
        lacking += [f"tokenizer {source}" for source in self.tokenizers.lacking(self.catalogue.versions.values())]
        return lacking + [f"tier {tier}" for tier in sorted(self.catalogue.required_tiers() - self._links.tiers_up())]

    def known(self) -> Catalogue:
        """The configuration in force. Raises RequestError `starting` before the first Directory and while stopping."""
        if self.catalogue is None or self.stopping:
            raise RequestError(Code.STARTING, "the platform is starting; please try again", retry_after_s=1)
        return self.catalogue

    # --- for the request path

    def submit(self, flight: Flight) -> None:
        """Hand an Ask to the controller, or, while it is away, to the lease. Raises RequestError `overloaded` when this
        gateway is full."""
        if len(self.flights) >= self._spec.flights_max:
            raise RequestError(Code.OVERLOADED, "this gateway has no room for another request", retry_after_s=1)
        self.flights[flight.ask.request_id] = flight
        if not self.tell(Submit(flight.ask)) and self.catalogue is not None:
            self._leases.submit(flight, self.catalogue.platform)

    def settle(self, flight: Flight, cache: str) -> None:
        """The end of a flight that was submitted; its Finish is kept until the controller has it."""
        if self.flights.pop(flight.ask.request_id, None) is None:
            return
        self._leases.ended(flight.ask.request_id, None if self.catalogue is None else self.catalogue.platform)
        message = flight.settlement(monotonic_ns(), cache)
        if isinstance(message, Finished):
            self._uplink.settle(message.finish)
        elif message is not None:
            self.tell(message)

    def cancel(self, request_id: str, tenant: str | None) -> bool:
        """Stop a request of this gateway; `tenant` None = of anybody. False when it is not here."""
        flight = self.flights.get(request_id)
        if flight is None or (tenant is not None and flight.ask.tenant != tenant):
            return False
        flight.on_fault(Fault.CANCELLED, monotonic_ns())
        return True

    # --- Port of the flights

    def start_work(self, replica_id: str, start: Start) -> bool:
        return self._links.start(replica_id, start)

    def cancel_work(self, replica_id: str, request_id: str) -> None:
        self._links.cancel(replica_id, request_id)

    def lexer(self, tier: str, version: str) -> Lexer | None:
        found = self.catalogue.versions.get((tier, version)) if self.catalogue is not None else None
        return self.tokenizers.get(found) if found is not None else None

    # --- from the controller

    def _on_message(self, message: Message) -> None:
        if isinstance(message, Granted):
            self._on_grant(message.grant)
        elif isinstance(message, Refused):
            flight = self.flights.get(message.refusal.request_id)
            if flight is not None:
                flight.on_refusal(message.refusal)
        elif isinstance(message, Leased):
            self._leases.receive(message.lease)
        elif isinstance(message, Peers):
            self._links.update(message.replicas)
            self._load_due.set()
        elif isinstance(message, Directory):
            self._on_directory(message)

    def _on_grant(self, grant: Grant) -> None:
        flight = self.flights.get(grant.request_id)
        if flight is not None:
            flight.on_grant(grant)
        elif not self._uplink.owes(grant.request_id):
            # Its client left while the grant was on its way: nothing was started, so nothing is owed.
            self._uplink.settle(Finish(request_id=grant.request_id, outcome=Outcome.CLIENT_CANCELLED))

    def _on_directory(self, directory: Directory) -> None:
        self.catalogue = Catalogue(directory.version, directory.platform)
        self.session_secret = directory.session_secret
        self._spec = self.catalogue.gateway
        self._uplink.unacked_max = self._spec.flights_max * UNACKED_FACTOR
        self.cache.configure({t.name: (t.cache.entries_max, t.cache.ttl_s) for t in directory.platform.tenants})
        self.idempotency.configure(
            list(self.catalogue.tenants), self._spec.idempotency_entries_max, self._spec.idempotency_ttl_s
        )
        self._load_due.set()

    def _on_up(self) -> None:
        now_ns = monotonic_ns()
        flights = list(self.flights.values())
        wires = [_wire(flight, now_ns) for flight in flights if flight.refusal is None]
        self.tell(GatewayHello(self.gateway_id, self._leases.hello(wires, self._owes)))
        for flight in flights:
            retry: Retry | None = flight.pending_retry()
            if retry is not None:
                self.tell(retry)

    def _on_lease(self, grant: Grant) -> None:
        self.count("leased_total", (self.flights[grant.request_id].ask.tenant,))
        self._on_grant(grant)

    def _on_lost(self) -> None:
        self._leases.lost(self.flights.values())

    def _owes(self, request_id: str) -> bool:
        """Whether the controller still has to hear of it."""
        return request_id in self.flights or self._uplink.owes(request_id)

    # --- from the replicas

    def _on_deltas(self, message: Deltas) -> None:
        now_ns = monotonic_ns()
        flights = self.flights
        for delta in message.deltas:
            flight = flights.get(delta.request_id)
            if flight is not None:
                flight.on_delta(delta, now_ns)

    def _on_replica_lost(self, replica_id: str, request_ids: list[str] | None) -> None:
        for flight in list(self.flights.values()):
            grant = flight.grant
            here = grant is not None and grant.replica_id == replica_id
            if here and (request_ids is None or flight.ask.request_id in request_ids):
                flight.on_replica_lost()

    # --- clocks

    async def _sweep(self) -> None:
        counts_ns = monotonic_ns()
        while True:
            await asyncio.sleep(SWEEP_S)
            now_ns = monotonic_ns()
            for flight in list(self.flights.values()):
                flight.tick(now_ns, self._uplink.lost_ns)
                flight.cut(now_ns, int(CUT_S * NS_PER_S))
            self._links.tick(now_ns)
            if now_ns - counts_ns > COUNTS_S * NS_PER_S:
                counts_ns = now_ns
                self._uplink.flush_counts()
                self._uplink.resend(now_ns, int(RESEND_S * NS_PER_S))
                self._leases.forget(self._owes)
                self.idempotency.expire(now_ns)

    async def _load(self) -> None:
        """Load tokenizers as models become available, woken by every Directory and Peers."""
        missing = False
        while True:
            try:
                await asyncio.wait_for(self._load_due.wait(), LOAD_S if missing else None)
            except TimeoutError:
                pass
            self._load_due.clear()
            if self.catalogue is not None:
                missing = not await self.tokenizers.load(self.catalogue.versions.values())


def _wire(flight: Flight, now_ns: int) -> WireFlight:
    """A flight for GatewayHello. An ask that still waits has only what is left of its time."""
    ask = flight.ask
    if flight.grant is None and ask.deadline_ms is not None:
        ask = msgspec.structs.replace(ask, deadline_ms=max(1.0, (flight.limit_ns - now_ns) / NS_PER_MS))
    return WireFlight(ask, flight.grant)
