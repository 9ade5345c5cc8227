"""The arithmetic of a request's bill, and its one row."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from rungway.contracts import Price, TierKind
from rungway.control.flight import Flight
from rungway.outcomes import Outcome
from rungway.types import LedgerRow, OfferKind


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
