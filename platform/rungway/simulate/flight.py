"""One request in a played gateway's hands, and the messages that are made of it."""

from __future__ import annotations

import msgspec

from rungway.clock import NS_PER_MS
from rungway.gateway.faults import Broken, Fault
from rungway.messages import Flight as WireFlight
from rungway.messages import Retry
from rungway.outcomes import Code, Outcome
from rungway.simulate.job import Job
from rungway.simulate.workload import Arrival
from rungway.types import Ask, Finish, Grant, Refusal


class Flight:
    """One request of a client, from submit to settlement."""

    __slots__ = (
        "arrival",
        "ask",
        "attempts",
        "broken",
        "changed_ns",
        "code",
        "delivered",
        "emitted",
        "evicted",
        "first_grant",
        "first_ns",
        "grant",
        "last_ns",
        "limit_ns",
        "over",
        "received_ns",
        "refusal",
        "state",
        "target",
    )

    def __init__(self, ask: Ask, arrival: Arrival, now_ns: int, limit_ns: int) -> None:
        self.ask, self.arrival = ask, arrival
        self.received_ns = self.changed_ns = now_ns
        self.limit_ns = limit_ns
        self.state = "waiting"  # waiting | running | closing | retrying | ended
        self.grant: Grant | None = None
        self.first_grant: Grant | None = None
        self.refusal: Refusal | None = None
        self.broken: Broken | None = None
        self.over = True
        self.attempts = self.evicted = 0
        self.delivered: dict[int, int] = {}
        self.emitted = 0  # of attempts before the present one
        self.target = 0
        self.first_ns = self.last_ns = 0
        self.code: Code | None = None

    @property
    def tokens(self) -> int:
        """Output that the client has."""
        return sum(self.delivered.values())

    @property
    def failed(self) -> int:
        """Tries that were not stopped for others."""
        return self.attempts - self.evicted

    def begin(self, grant: Grant) -> Job:
        """A new attempt; what it has to do."""
        first = self.first_grant or grant
        self.attempts += 1
        self.emitted = self.tokens
        self.delivered[grant.attempt] = 0
        self.over = False
        self.target = min(self.arrival.output_tokens, first.offer.max_tokens)
        return Job(
            grant.request_id,
            grant.attempt,
            prompt=grant.offer.prompt_tokens,
            target=self.target - self.emitted,
            resumed=self.emitted,
            priority=grant.priority,
            share=self.ask.tenant,
            weight=grant.weight,
            blocks=self.arrival.blocks,
        )

    def limit_fault(self, timeout_s: float) -> Fault:
        """What its `limit_ns` was: the client's deadline, or the gateway's own time limit."""
        deadline = self.ask.deadline_ms
        return Fault.DEADLINE if deadline is not None and deadline < timeout_s * 1000.0 else Fault.TIMEOUT

    def retry_message(self) -> Retry:
        assert self.grant is not None and self.broken is not None
        return Retry(self.ask.request_id, self.grant.attempt, self.grant.replica_id, self.broken, self.tokens)

    def finish(self, outcome: Outcome, now_ns: int) -> Finish:
        gaps = max(1, self.tokens - 1)
        span_ns = self.last_ns - self.first_ns
        return Finish(
            request_id=self.ask.request_id,
            outcome=outcome,
            code=self.code,
            attempts=self.attempts,
            delivered=dict(self.delivered),
            ttft_ms=(self.first_ns - self.received_ns) / NS_PER_MS if self.first_ns else None,
            tpot_ms=span_ns / gaps / NS_PER_MS if span_ns else None,
            e2e_ms=(now_ns - self.received_ns) / NS_PER_MS,
        )

    def wire(self, now_ns: int) -> WireFlight:
        """For a hello. An ask that still waits has only what is left of its time."""
        ask = self.ask
        if self.grant is None and ask.deadline_ms is not None:
            left_ms = max(1.0, (self.limit_ns - now_ns) / NS_PER_MS)
            ask = msgspec.structs.replace(ask, deadline_ms=left_ms)
        return WireFlight(ask, self.grant)
