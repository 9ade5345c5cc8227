"""One request in this gateway's hands, from submit to settle: its attempts, their deltas, and what goes wrong.

The channels push (`on_*`, synchronous); one coroutine pulls (`decision`, `deltas`). A failed attempt is replaced without
a seam: the next one gets the tokens that the client already has as `resume`. `settlement` says how it ended.
"""

from __future__ import annotations

import asyncio
from enum import StrEnum

from rungway.clock import NS_PER_MS, NS_PER_S, monotonic_ns
from rungway.contracts import GatewaySpec, TierKind
from rungway.engine.protocol import Delta
from rungway.errors import RequestError
from rungway.gateway.call import ClientGone
from rungway.gateway.faults import BROKEN, FAULTS, FINAL, Broken, Fault, Meaning
from rungway.gateway.port import Port
from rungway.gateway.progress import Progress
from rungway.gateway.prompts import Lexer
from rungway.gateway.read import Reading
from rungway.gateway.work import start_message
from rungway.messages import Finished, Retry, Withdraw
from rungway.outcomes import Code, Outcome
from rungway.types import Action, Grant, OfferKind, Refusal

CANCEL_WAIT_S = 1.0
"""How long a cancelled try may take to confirm its end before the next one is asked for: a replica that does not
answer at all will not emit either, and its own watch over the channel stops the engine."""


class State(StrEnum):
    WAITING = "waiting"  # for the first decision
    RUNNING = "running"
    RETRYING = "retrying"  # for a decision about another try
    ENDED = "ended"


class Flight:
    """`grant` is the newest one. `fault` is final; `changed_ns` is when something last happened."""

    def __init__(self, reading: Reading, port: Port, spec: GatewaySpec, received_ns: int) -> None:
        self.reading = reading
        self.ask = reading.ask
        self.state = State.WAITING
        self.grant: Grant | None = None
        self.first_grant: Grant | None = None
        self.outcome = Outcome.ERROR
        self.code: Code | None = None
        self.progress = Progress(received_ns)
        self.task: asyncio.Task[object] | None = None
        self.fault: Fault | None = None
        self.fault_ns = 0
        self.was_cut = False
        self.received_ns = self.changed_ns = received_ns
        limits = [received_ns + int(spec.request_timeout_s * NS_PER_S)]
        if reading.ask.deadline_ms is not None:
            limits.append(received_ns + int(reading.ask.deadline_ms * NS_PER_MS))
        self.limit_ns, self._limit_fault = min(limits), Fault.DEADLINE if limits[-1] < limits[0] else Fault.TIMEOUT
        self._port = port
        self._spec = spec
        self._inbox: list[Delta | Broken] = []
        self._waiter: asyncio.Future[None] | None = None
        self._granted: Grant | None = None
        self.refusal: Refusal | None = None
        self._broken: Broken | None = None
        self._over = True  # no attempt is running, as far as is known
        self._tries = 0
        self._lexer: Lexer | None = None

    # --- pushed by the gateway

    def on_grant(self, grant: Grant) -> None:
        if self.state in (State.WAITING, State.RETRYING) and (self.grant is None or grant.attempt > self.grant.attempt):
            self._granted = self.grant = grant
            self.first_grant = self.first_grant or grant
            self._wake()

    def on_refusal(self, refusal: Refusal) -> None:
        """No, or no further try. `cancelled` also stops what runs: somebody asked for it at another gateway."""
        if refusal.code == Code.CANCELLED and self.grant is not None:
            self.on_fault(Fault.CANCELLED, monotonic_ns())
        elif self.state in (State.WAITING, State.RETRYING):
            self.refusal = refusal
            self._wake()

    def on_delta(self, delta: Delta, now_ns: int) -> None:
        if self.state is not State.RUNNING or self.grant is None or delta.attempt != self.grant.attempt:
            return
        if self.fault is not None and delta.usage is None:
            return
        self.changed_ns = now_ns
        self.progress.at(now_ns)
        if delta.usage is not None:
            self._over = True
        self._inbox.append(delta)
        if len(self._inbox) > self._spec.stream_buffer_deltas_max:
            self.on_fault(Fault.OVERFLOW, now_ns)
        self._wake()

    def on_replica_lost(self) -> None:
        if self.state is State.RUNNING and not self._over:
            self._over = True
            self._inbox.append(Broken.REPLICA_LOST)
            self._wake()

    def on_fault(self, fault: Fault, now_ns: int) -> None:
        """Final; the engine is told at once, whatever the pulling coroutine is waiting for."""
        if self.fault is None and self.state is not State.ENDED:
            self.fault, self.fault_ns = fault, now_ns
            self._stop_attempt()
            self._wake()

    def tick(self, now_ns: int, controller_lost_ns: int | None) -> None:
        """Look at every clock of this request; called a few times a second."""
        if self.state is State.ENDED:
            return
        if now_ns >= self.limit_ns:
            self.on_fault(self._limit_fault, now_ns)
        elif self.state is State.RUNNING:
            if not self._over and now_ns - self.changed_ns > self._spec.inter_token_timeout_s * NS_PER_S:
                self.changed_ns = now_ns
                self._inbox.append(Broken.TIMEOUT)
                self._wake()
        elif controller_lost_ns is not None:
            since_ns = max(controller_lost_ns, self.changed_ns)
            if now_ns - since_ns > self._spec.controller_wait_s * NS_PER_S:
                self.on_fault(Fault.NO_CONTROLLER, now_ns)

    def cut(self, now_ns: int, after_ns: int) -> None:
        """Free a coroutine that is stuck sending to a client that does not read, `after_ns` past its request's end."""
        over_ns = self.fault_ns if self.fault is not None else self.limit_ns
        if self.task is not None and now_ns - over_ns > after_ns:
            self.was_cut = True
            self.task.cancel()
            self.task = None

    # --- pulled by the request path

    async def decision(self) -> Grant:
        """The controller's grant. Raises RequestError for a refusal or a fault, ClientGone."""
        while True:
            if self.fault is not None:
                raise self._failed(FAULTS[self.fault])
            if self.refusal is not None:
                raise self._refused(self.refusal)
            if self._granted is not None:
                grant, self._granted = self._granted, None
                return grant
            await self._wait()

    def begin(self, grant: Grant) -> None:
        """Start the granted attempt on its replica; what is left to say of the answer, if there was one before."""
        if grant.offer.kind is not OfferKind.MODEL:
            self.state = State.RUNNING
            return
        lexer = self._port.lexer(grant.offer.tier, grant.offer.version)
        self.state, self._broken, self._over = State.RUNNING, None, False
        self._tries += 1
        self.changed_ns = monotonic_ns()
        if lexer is None or (self._lexer is not None and lexer is not self._lexer and self.progress.tokens):
            # Another vocabulary cannot go on from these tokens.
            self.on_replica_lost()
            return
        self._lexer = lexer
        # Every try makes all vectors, so that one try's usage is the whole bill.
        anew = self.ask.kind is TierKind.EMBEDDING
        resume = self.progress.open(grant.attempt, self.reading.sequences(grant.offer), anew=anew)
        first = self.first_grant or grant
        message = start_message(self.reading, grant, lexer, first.offer.max_tokens, resume, self.progress.scored)
        if not self._port.start_work(grant.replica_id, message):
            self.on_replica_lost()

    async def deltas(self) -> list[Delta] | None:
        """All that came since the last call, at least one; None when the answer is whole. Retries inside. Raises
        RequestError when the answer cannot be finished, ClientGone."""
        while True:
            fresh = self._absorb() if self._inbox else None
            if fresh and self.fault is not Fault.CLIENT_GONE:
                return fresh
            if self.progress.whole:
                return None
            if self.fault is not None:
                raise self._failed(FAULTS[self.fault])
            if self._broken is not None:
                await self._retry(self._broken)
            else:
                await self._wait()

    def end(self, outcome: Outcome, code: Code | None = None) -> None:
        """Name how it ended; the first name that is given holds."""
        if self.state is not State.ENDED:
            self.outcome, self.code = outcome, code
            self._stop_attempt()
            self.state = State.ENDED

    def abandon(self) -> None:
        """Nobody waits for the answer any more: it ends by its fault, or else as the client's choice."""
        outcome, code, _, _ = FAULTS[self.fault or Fault.CLIENT_GONE]
        self.end(outcome, code)

    def settlement(self, now_ns: int, cache: str) -> Finished | Withdraw | None:
        """What the controller has to be told; None where it ended the request itself."""
        assert self.state is State.ENDED, "settled before its end"
        if self.grant is None:
            return Withdraw(self.ask.request_id, self.outcome) if self.refusal is None else None
        finish = self.progress.finish(self.ask.request_id, self.outcome, self.code, now_ns, cache)
        return Finished(finish)

    def pending_retry(self) -> Retry | None:
        """The Retry to send again after the controller came back."""
        if self.state is not State.RETRYING or self._broken is None:
            return None
        return self._retry_message(self._broken)

    # --- inside

    def _absorb(self) -> list[Delta]:
        """Empty the inbox: book tokens and ends, give on what the client gets."""
        taken, self._inbox = self._inbox, []
        fresh: list[Delta] = []
        for item in taken:
            if isinstance(item, Broken):
                self._broken = self._broken or item
            elif self._broken is not None:
                self.progress.drop(item)
            else:
                delta, self._broken = self.progress.take(item)
                if delta is not None:
                    fresh.append(delta)
        return fresh

    async def _retry(self, broken: Broken) -> None:
        final = broken in FINAL or self.ask.action is Action.NON_IDEMPOTENT_WRITE
        if broken is Broken.EVICTED:
            self._tries -= 1  # the engine stopped in good order: the answer goes on, whatever the action
        elif final or self._tries > self._spec.retries_max:
            raise self._failed(BROKEN[broken])
        await self._close_attempt()
        if self.fault is not None:
            return
        self.state, self.changed_ns, self._granted = State.RETRYING, monotonic_ns(), None
        self._port.tell(self._retry_message(broken))
        self.begin(await self.decision())

    def _retry_message(self, broken: Broken) -> Retry:
        assert self.grant is not None, "retries follow a grant"
        grant = self.grant
        return Retry(self.ask.request_id, grant.attempt, grant.replica_id, broken, self.progress.tokens)

    async def _close_attempt(self) -> None:
        """The old try ends before the next begins: cancel it and wait, within a bound, for its last delta."""
        if self._over:
            return
        self._stop_attempt()
        timer = asyncio.get_running_loop().call_later(CANCEL_WAIT_S, self._give_up_attempt)
        try:
            while not self._over and self.fault is None:
                await self._wait()
        finally:
            timer.cancel()
        self._absorb()

    def _give_up_attempt(self) -> None:
        self._over = True
        self._wake()

    def _stop_attempt(self) -> None:
        if self.state is State.RUNNING and not self._over and self.grant is not None:
            self._port.cancel_work(self.grant.replica_id, self.ask.request_id)

    def _failed(self, meaning: Meaning) -> Exception:
        if self.state is State.RETRYING and self._broken is not None and self.fault is Fault.NO_CONTROLLER:
            meaning = BROKEN[self._broken]
        outcome, code, message, retry_after_s = meaning
        self.end(outcome, code)
        if self.fault is Fault.CLIENT_GONE:
            return ClientGone()
        param = self.reading.demand.param or None if code is Code.INVALID_SCHEMA else None
        return RequestError(code, message, param=param, retry_after_s=retry_after_s)

    def _refused(self, refusal: Refusal) -> RequestError:
        code = Code(refusal.code)
        outcome = BROKEN[self._broken][0] if self._broken is not None else Outcome.REFUSED
        self.end(outcome, code)
        return RequestError(code, refusal.message, retry_after_s=refusal.retry_after_s)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def _wait(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None
