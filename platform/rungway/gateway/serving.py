"""The steps of one request after it was read, with what has to be undone or told at its end."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace

import msgspec

from rungway.clock import NS_PER_MS, NS_PER_S, monotonic_ns
from rungway.engine.protocol import Constraint
from rungway.errors import RequestError
from rungway.gateway.answer import Choice, Stored
from rungway.gateway.call import Call
from rungway.gateway.catalogue import Catalogue
from rungway.gateway.conform import conforms
from rungway.gateway.faults import Fault
from rungway.gateway.flight import Flight
from rungway.gateway.read import Reading
from rungway.gateway.recall import Memory
from rungway.gateway.stream import Answering, replay
from rungway.outcomes import Code, Outcome
from rungway.types import Grant, OfferKind

_log = logging.getLogger(__name__)


class Serving:
    """State of one request between `submit` and `settle`."""

    __slots__ = ("_answering", "_call", "_catalogue", "_flight", "_memory", "_reading", "_watch")

    def __init__(self, call: Call) -> None:
        self._call = call
        self._reading: Reading | None = None
        self._memory: Memory | None = None
        self._flight: Flight | None = None
        self._answering: Answering | None = None
        self._watch: asyncio.Task[None] | None = None

    def remember(self, memory: Memory) -> Memory:
        self._memory = memory
        self._call.facts.cache = memory.label
        return memory

    async def replay(self, reading: Reading, stored: Stored) -> None:
        """The answer of an earlier request with the same Idempotency-Key, under that request's id."""
        self._call.facts = replace(stored.facts, rate=None, replayed=True)
        self._answering = Answering(self._call, reading, stored.created)
        await replay(self._answering, stored)

    async def submit(self, reading: Reading, catalogue: Catalogue) -> Grant:
        """Ask the controller and wait for its decision, while watching whether the client is still there."""
        call = self._call
        flight = Flight(reading, call.gateway, catalogue.gateway, call.received_ns)
        if reading.ask.deadline_ms is not None:
            left_ms = max(1.0, (flight.limit_ns - monotonic_ns()) / NS_PER_MS)
            flight.ask = msgspec.structs.replace(reading.ask, deadline_ms=left_ms)
        call.gateway.submit(flight)
        self._reading, self._flight = reading, flight
        flight.task = asyncio.current_task()
        self._watch = asyncio.get_running_loop().create_task(call.left())
        self._watch.add_done_callback(self._on_left)
        try:
            grant = await flight.decision()
        except RequestError:
            if flight.refusal is not None:
                call.facts.refused(flight.refusal)
            raise
        call.facts.granted(grant)
        return grant

    async def stream(self, grant: Grant) -> None:
        """Run the grant; the client gets deltas as they come, or one body at the end."""
        flight, reading, memory = self._flight, self._reading, self._memory
        assert flight is not None and reading is not None and memory is not None
        constraint = reading.demand.constraint
        keeping = memory.keeping or constraint is not None
        answering = self._answering = Answering(self._call, reading, keeping=keeping)
        flight.begin(grant)
        finishes: set[str | None] = set()
        while (deltas := await flight.deltas()) is not None:
            for delta in deltas:
                if delta.finish is not None:
                    finishes.add(delta.finish)
            if not self._call.started and flight.grant is not None:
                self._call.facts.granted(flight.grant)
            await answering.write(deltas)
        flight.end(Outcome.LENGTH if "length" in finishes else Outcome.COMPLETED)
        usage = flight.progress.usage
        tokens = (usage.prompt_tokens, usage.cached_tokens, flight.progress.output_tokens)
        stored = answering.stored(tokens)
        good = stored is None or constraint is None or await self._good(reading, constraint, stored)
        if stored is not None and flight.grant is not None and good:
            memory.keep(reading, flight.grant, stored)
        await answering.end(stored, tokens)

    async def _good(self, reading: Reading, constraint: Constraint, stored: Stored) -> bool:
        """Counts answers that ended by themselves and do not fit. One that the client's own stop string cut need not."""
        if reading.sampling.stop:
            return True
        good = True
        echoed = 0 if self._answering is None else self._answering.echoed
        for choice in stored.choices:
            if choice.finish == "stop" and not await asyncio.to_thread(conforms, constraint, choice.text[echoed:]):
                good = False
                _log.error("%s: an answer does not fit its %s", self._call.id, constraint.kind)
                self._call.gateway.count("structured_output_failures_total", (reading.tenant.name,))
        return good

    async def canned(self, grant: Grant, catalogue: Catalogue) -> None:
        """A cached answer or the configured template, as an ordinary completion."""
        call, flight, reading, memory = self._call, self._flight, self._reading, self._memory
        assert flight is not None and reading is not None and memory is not None
        flight.begin(grant)
        created = call.received_wall_ns // NS_PER_S
        if grant.offer.kind is OfferKind.CACHE and memory.hit is not None:
            hit = memory.hit
            call.facts.cache, call.facts.served = "hit-exact", hit.facts.served
            stored = replace(hit, request_id=call.id, created=created, facts=call.facts)
            flight.end(Outcome.CACHE_HIT)
            memory.keep(reading, grant, stored)
        elif grant.offer.kind is OfferKind.TEMPLATE and reading.demand.constraint is None:
            text = reading.tenant.template or catalogue.ladder.template
            stored = Stored(call.id, created, call.facts, (Choice(text, "stop", None),) * reading.ask.n, 0, 0, 0)
            call.facts.served = "template"
            flight.end(Outcome.TEMPLATE)
        else:
            flight.end(Outcome.ERROR, Code.INTERNAL)
            raise RequestError(Code.INTERNAL, "a stored answer was granted that is not here or does not fit")
        self._answering = Answering(call, reading, created)
        await replay(self._answering, stored)

    async def fail(self, error: RequestError) -> None:
        """An error answer. Those that this gateway decided itself are counted here; the controller counts its own."""
        call = self._call
        if self._flight is None:
            call.count_refused(error)
        else:
            self._flight.end(Outcome.ERROR, error.code)
        if self._answering is not None:
            await self._answering.fail(error)
        else:
            await call.refuse(error)

    def left(self) -> None:
        if self._flight is not None:
            self._call.cut = self._flight.was_cut
            self._flight.abandon()

    def settle(self) -> None:
        """Runs exactly once, on every path."""
        if self._watch is not None:
            self._watch.cancel()
        if self._memory is not None:
            self._memory.close()
        if self._flight is not None:
            self._flight.end(Outcome.ERROR, Code.INTERNAL)
            self._flight.task = None
            self._call.gateway.settle(self._flight, self._call.facts.cache)

    def _on_left(self, watch: asyncio.Task[None]) -> None:
        if watch.cancelled() or self._flight is None:
            return
        if watch.exception() is not None:
            _log.warning("%s: watching the connection failed: %r", self._call.id, watch.exception())
        self._flight.on_fault(Fault.CLIENT_GONE, monotonic_ns())
