"""A request in the controller's hands, from Ask to settlement, and the arithmetic of its bill."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from rungway.contracts import Price, TierKind
from rungway.control.tenant_state import BANDS, TenantState
from rungway.outcomes import Outcome
from rungway.policies.fairness import Queued
from rungway.policies.locality import Warmth
from rungway.policies.offers import Quote
from rungway.types import Ask, AttemptEnd, Finish, Grant, LedgerRow, Offer, OfferKind


class Attempt:
    """One try on one replica: the capacity it holds there and how it ended. `charged`: prompt tokens that the fair queue
    charged for it, 0 for a repeat; `band`: its class; `evicted_ns`: when the replica was told to stop it."""

    __slots__ = (
        "band",
        "charged",
        "emitted",
        "end",
        "evicted_ns",
        "granted_ns",
        "lost_ns",
        "output_reserved",
        "released",
        "replica_id",
        "sequences",
        "teller",
        "tokens",
    )

    def __init__(self, replica_id: str, sequences: int, tokens: int, output_reserved: int, band: int = 0) -> None:
        self.replica_id = replica_id
        self.sequences = sequences
        self.tokens = tokens
        self.output_reserved = output_reserved
        self.band = band
        self.charged = 0
        self.granted_ns = 0
        self.evicted_ns: int | None = None
        self.emitted = 0
        self.end: AttemptEnd | None = None
        self.teller = ""  # who sent the end, and waits for its acknowledgement
        self.lost_ns: int | None = None
        self.released = False

    def counted(self, delivered: int) -> int:
        """Output tokens as far as is known: what the engine said at the end, else the most that anybody has seen."""
        return self.end.usage.output_tokens if self.end is not None else max(self.emitted, delivered)


class Flight:
    """`late`: by pool in which it cannot begin in time, its wait in first-token targets. `grant` is None while it waits.
    `held_tokens`/`held_nusd` are what the tenant's buckets hold for it, `lined_tokens` what it counts with while it waits;
    `places`: what it takes of a replica's batch. `failure`: why its last try failed, see `Retry`. `probes`: its tenant's
    breaker let it through to prove itself."""

    __slots__ = (
        "ask",
        "attempts",
        "avoid",
        "band",
        "cause",
        "enqueued_ns",
        "entry",
        "evictions",
        "failure",
        "finish",
        "finish_ns",
        "first_wait_ms",
        "gateway_lost_ns",
        "grant",
        "granted_ns",
        "held_nusd",
        "held_tokens",
        "late",
        "lined_tokens",
        "next_attempt",
        "offer",
        "places",
        "pool",
        "pressure",
        "probes",
        "quote",
        "retrying",
        "rungs",
        "running",
        "state",
        "submitted_ns",
        "warm_until_ns",
        "warmth",
    )

    def __init__(self, ask: Ask, state: TenantState, now_ns: int) -> None:
        self.ask = ask
        self.state = state
        self.band = BANDS[ask.tenant_class]
        self.submitted_ns = now_ns
        self.enqueued_ns = now_ns
        self.granted_ns = 0
        self.first_wait_ms = 0.0
        self.quote: Quote | None = None
        self.offer: Offer | None = None
        self.places = 1
        self.pool = ""
        self.cause = "ok"
        self.rungs: dict[str, int] = {}
        self.late: dict[str, float] = {}
        self.pressure: dict[str, tuple[float, str]] = {}
        self.entry: Queued | None = None
        self.grant: Grant | None = None
        self.attempts: dict[int, Attempt] = {}
        self.next_attempt = 1
        self.avoid: frozenset[str] = frozenset()
        self.probes = False
        self.retrying = False
        self.evictions = 0
        self.failure = ""
        self.running = False
        self.held_tokens = 0
        self.lined_tokens = 0
        self.held_nusd = 0
        self.finish: Finish | None = None
        self.finish_ns = 0
        self.gateway_lost_ns: int | None = None
        self.warmth: Warmth | None = None
        self.warm_until_ns = 0

    @property
    def begun(self) -> bool:
        """Its client may have a part of the answer already: it goes on as it began, and before what is new."""
        return self.retrying or self.evictions > 0

    @property
    def sequences(self) -> int:
        """Sequences of the offered answer."""
        return 1 if self.offer is None else max(1, self.offer.best_of)

    def learn(self, ok: bool | None, now_ns: int) -> None:
        """Tell the tenant's breaker how it ended; None = nothing that the breaker counts."""
        if ok is not None:
            self.state.breaker.record(ok, now_ns)
        elif self.probes:
            self.state.breaker.abandon()
        self.probes = False

    def take_off(self) -> None:
        """Count as running for the tenant's concurrency."""
        if not self.running:
            self.running = True
            self.state.count(running=1)

    def land(self) -> None:
        """Stop counting as running; harmless when it already has."""
        if self.running:
            self.running = False
            self.state.count(running=-1)

    def open_attempts(self) -> list[Attempt]:
        """Attempts whose end is neither reported nor given up."""
        return [a for a in self.attempts.values() if a.end is None and a.lost_ns is None]

    def settled(self) -> bool:
        """Both sides have said all they will say."""
        client_done = self.finish is not None or self.gateway_lost_ns is not None
        return client_done and not self.open_attempts()


class Bill(NamedTuple):
    """Tokens that the tenant pays for, and engine output nobody pays for (tries that failed on our side)."""

    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    wasted_tokens: int
    cost_nusd: int


def bill(flight: Flight, price: Price) -> Bill:
    """A tenant pays its prompt once and every output token it could receive: all that the last attempt emitted, and of
    earlier attempts what was delivered before they failed. The rest of their output is waste. What was cached for any of
    them is billed as cached: nobody pays more because a request was moved."""
    prompt = cached = output = wasted = 0
    last = max(flight.attempts, default=0)
    delivered = flight.finish.delivered if flight.finish is not None else {}
    for number, attempt in sorted(flight.attempts.items()):
        usage = attempt.end.usage if attempt.end is not None else None
        emitted = attempt.counted(delivered.get(number, 0))
        failed = attempt.end is None or attempt.end.finish in ("lost", "error")
        paid = min(emitted, delivered.get(number, 0)) if failed or number != last else emitted
        output += paid
        wasted += emitted - paid
        if usage is not None and (paid or number == last) and usage.prompt_tokens:
            prompt, cached = usage.prompt_tokens, max(cached, usage.cached_tokens)
    if (output or _embedded(flight)) and not prompt and flight.offer is not None:
        prompt = flight.offer.prompt_tokens
    if not output and _engine_failed(flight):
        prompt = cached = 0
    cost = price.cost_nusd(input_tokens=prompt, cached_tokens=cached, output_tokens=output)
    return Bill(prompt, cached, output, wasted, cost)


def _embedded(flight: Flight) -> bool:
    """The client has its vectors, whatever became of the engine's report."""
    asked = flight.ask.kind is TierKind.EMBEDDING and flight.offer is not None and flight.offer.kind is OfferKind.MODEL
    return asked and flight.finish is not None and flight.finish.outcome == Outcome.COMPLETED


def _engine_failed(flight: Flight) -> bool:
    """A request that got no token because of our failure costs nothing, its prompt included."""
    return flight.finish is None or flight.finish.outcome in (Outcome.ERROR, Outcome.REPLICA_LOST, Outcome.TIMEOUT)


def ledger_row(flight: Flight, price: Price, outcome: str, code: str, wall_ns: int, thresholds: object) -> LedgerRow:
    """The one row of this request. Times come from the gateway's Finish, tokens from the engines."""
    ask, grant, finish = flight.ask, flight.grant, flight.finish
    offer = grant.offer if grant is not None else None
    due = bill(flight, price)
    ttft = finish.ttft_ms if finish is not None else None
    tpot = finish.tpot_ms if finish is not None else None
    slo = flight.state.contract.slo
    met = None
    if ttft is not None and offer is not None and offer.kind is OfferKind.MODEL:
        met = int(ttft <= slo.ttft_ms_p99 and (tpot is None or tpot <= slo.tpot_ms_p99))
    return LedgerRow(
        request_id=ask.request_id,
        started_wall_ns=ask.received_wall_ns,
        ended_wall_ns=wall_ns,
        tenant=ask.tenant,
        key_id=ask.key_id,
        tenant_class=ask.tenant_class,
        risk=ask.risk,
        action=ask.action,
        endpoint=ask.endpoint,
        model=ask.model,
        tier=offer.tier if offer is not None else "",
        version=offer.version if offer is not None else "",
        rung=offer.rung if offer is not None else 0,
        degraded=",".join(offer.degraded) if offer is not None else "",
        reason=grant.reason if grant is not None else code,
        outcome=outcome,
        code=code,
        prompt_tokens=due.prompt_tokens,
        cached_tokens=due.cached_tokens,
        output_tokens=due.output_tokens,
        wasted_tokens=due.wasted_tokens,
        cost_nusd=due.cost_nusd,
        price_input=price.input,
        price_cached_input=price.cached_input,
        price_output=price.output,
        attempts=len(flight.attempts),
        replica_id=grant.replica_id if grant is not None else "",
        gateway_id=ask.gateway_id,
        session=ask.session or "",
        cache=finish.cache if finish is not None else "off",
        queue_wait_ms=grant.queue_wait_ms if grant is not None else 0.0,
        ttft_ms=ttft,
        tpot_ms=tpot,
        e2e_ms=finish.e2e_ms if finish is not None else None,
        slo_met=met,
        decision=decision(flight, thresholds),
    )


def decision(flight: Flight, thresholds: object) -> str:
    """JSON of all that the decision rested on."""
    ask, quote, grant = flight.ask, flight.quote, flight.grant
    return msgspec.json.encode(
        {
            "ask": {
                "model": ask.model,
                "tiers": ask.tiers,
                "class": ask.tenant_class,
                "risk": ask.risk,
                "action": ask.action,
                "prompt_tokens": ask.prompt_tokens,
                "output_bound": ask.output_bound,
                "best_of": ask.best_of,
                "deadline_ms": ask.deadline_ms,
            },
            "rungs": flight.rungs,
            "pressure": flight.pressure,
            "thresholds": thresholds,
            "offers": quote.offers if quote is not None else (),
            "best": quote.best if quote is not None else None,
            "rejected": quote.rejected if quote is not None else (),
            "given": grant.offer if grant is not None else None,
            "reason": grant.reason if grant is not None else "",
            "config": grant.config_digest if grant is not None else "",
            "queue_wait_ms": grant.queue_wait_ms if grant is not None else None,
            "evictions": flight.evictions or None,
            "late": flight.late or None,
        }
    ).decode()
