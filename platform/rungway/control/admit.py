"""Judging an Ask: the tenant's own limits first, then offers; then hold quota and money and take a place in the queue.

    submit -> limits of the tenant -> quote offers -> limits of the offer -> hold -> queue (model) or grant (cache, template)
                     \\-> refusal            \\-> refusal        \\-> refusal, or a cheaper offer where the budget says degrade

All limits of one offer are checked before any is taken, so a refusal leaves nothing held.
"""

from __future__ import annotations

from zlib import crc32

from rungway.clock import NS_PER_MS
from rungway.control.cell import Cell, Now
from rungway.control.dispatch import dispatch, grant_unqueued
from rungway.control.flight import Flight
from rungway.control.late import look, own_rung
from rungway.control.limits import Denied, can_hold, check_tokens, tenant_limits
from rungway.control.line import dequeue, enqueue, hold, tokens_needed
from rungway.control.pool import Pool
from rungway.control.refuse import refuse, refuse_again
from rungway.control.shed import drop_late_offers, retry_after_s, turn_away
from rungway.control.sides import is_over
from rungway.messages import Refused
from rungway.outcomes import Code
from rungway.policies.ladder import effective_rung, smaller_tier
from rungway.policies.offers import quote
from rungway.policies.pressure import PressureSignal
from rungway.types import Ask, Offer, OfferKind, RateInfo, Refusal


def submit(cell: Cell, ask: Ask, now: Now) -> None:
    """Judge a new Ask. A repeated submit (a gateway that reconnected) changes nothing: one in flight is answered in its
    time, one whose row is written is refused."""
    if ask.request_id in cell.flights:
        return
    if ask.request_id in cell.settled:
        refuse_again(cell, ask)
        return
    state = cell.tenants.get(ask.tenant)
    if state is None or ask.tenant in cell.leaving:
        refusal = Refusal(
            request_id=ask.request_id,
            code=Code.INVALID_API_KEY,
            message="The tenant of this key is no longer configured.",
            retry_after_s=None,
            rate=RateInfo(),
        )
        cell.effects.sends.append((ask.gateway_id, Refused(refusal)))
        return
    flight = Flight(ask, state, now.mono_ns)
    try:
        tenant_limits(flight, now)
        requote(cell, flight, now)
        _shed(cell, flight, now)
        _take_offer(cell, flight, now)
    except Denied as denied:
        refuse(cell, flight, denied.code, denied.message, denied.retry_after_s, now)
        return
    state.last_ask_ns = now.mono_ns
    cell.flights[ask.request_id] = flight
    assert flight.offer is not None
    if flight.offer.kind is not OfferKind.MODEL:
        grant_unqueued(cell, flight, now)
        return
    enqueue(cell, flight, now)
    limit = state.contract.quotas.queue_max
    if state.waiting > limit:
        dispatch(cell, now)
        if flight.entry is not None and state.waiting > limit:
            last = _last_in_line(cell, flight)
            turn_away(cell, last, Code.QUEUE_FULL, f"Your queue of {limit} waiting requests is full.", now)


def _last_in_line(cell: Cell, flight: Flight) -> Flight:
    """Who leaves a tenant's full line for a new request: the latest arrival among those that are late, or else the new one."""
    late = [entry for pool in cell.pools.values() if (entry := pool.queue.newest_late(flight.ask.tenant)) is not None]
    if not late:
        return flight
    last = max(late, key=lambda entry: entry.enqueued_ns).payload
    assert isinstance(last, Flight)
    return last


def readmit(cell: Cell, flight: Flight, now: Now) -> None:
    """Offer anew to a waiting request after the rungs moved; its arrival and its holds stay its own."""
    old = flight.offer
    requote(cell, flight, now)
    assert flight.quote is not None
    if not flight.quote.offers:
        denied = _no_offer(cell, flight, now)
        dequeue(cell, flight)
        refuse(cell, flight, denied.code, denied.message, denied.retry_after_s, now)
        return
    offer = flight.quote.offers[0]
    if old is not None and _same(offer, old):
        return
    need = tokens_needed(cell, flight, offer)
    if not can_hold(flight, offer, need, now):
        return
    dequeue(cell, flight)
    hold(cell, flight, offer, need, now)
    flight.cause = _cause_of(cell, flight, offer)
    if offer.kind is OfferKind.MODEL:
        enqueue(cell, flight, now)
    else:
        grant_unqueued(cell, flight, now)


def _same(offer: Offer, other: Offer) -> bool:
    return (offer.kind, offer.tier, offer.version, offer.rung) == (other.kind, other.tier, other.version, other.rung)


def requote(cell: Cell, flight: Flight, now: Now, least_rung: int = 0) -> None:
    """Ask the offer policy what can be given now, under the rungs in force for this tenant. `least_rung` forces at
    least that rung on every tier (a budget that asks to degrade)."""
    ask, state = flight.ask, flight.state
    waits_s = {name: look(cell, flight, pool, now) for name, pool in cell.pools.items() if pool.tier.kind is ask.kind}
    flight.rungs = {name: _rung_in_force(cell, flight, pool, now, least_rung) for name, pool in cell.pools.items()}
    key = crc32((ask.session or ask.request_id).encode())
    # A tier that was not asked for is looked at only where a rung may open it.
    everywhere = any(flight.rungs.get(name) for name in ask.tiers)
    views, predicted = [], {}
    for name, pool in cell.pools.items():
        if pool.tier.kind is not ask.kind:
            continue
        version = pool.pick_version(key)
        if not everywhere and name not in ask.tiers:
            views.append(pool.idle_view(version))
            continue
        views.append(pool.tier_view(version, waits_s[name]))
        predicted[name] = cell.predictor.predict(ask.tenant, name, ask.output_bound, version.default_max_tokens)
    flight.quote = quote(
        ask,
        state.contract,
        views,
        flight.rungs,
        cell.platform.ladder,
        cell.quality,
        predicted,
        tenant_tiers=cell.tiers_of(state.contract),
        allowed=cell.rungs_of(state.contract),
        waited_ms=(now.mono_ns - flight.submitted_ns) / NS_PER_MS,
    )


def _rung_in_force(cell: Cell, flight: Flight, pool: Pool, now: Now, least_rung: int) -> int:
    """The rung of this pool for this tenant, or for this very request where it is late; notes the pressure behind it for the
    explanation."""
    state, ladder = flight.state, cell.platform.ladder
    over = bool(pool.queue.depth()) and is_over(pool, state, now.mono_ns)
    scope = (flight.ask.tenant_class, "over" if over else "within")
    value, signal = pool.pressures.get(scope, (0.0, "none"))
    # A rung that is held by hand is not the signal's doing.
    flight.pressure[pool.name] = (value, signal if pool.scopes[scope].override is None else "override")
    rung = max(pool.scopes[scope].in_force, least_rung)
    load = flight.late.get(pool.name)
    if load is not None and (own := own_rung(load, ladder)) > rung:
        rung, flight.pressure[pool.name] = own, (round(load, 3), PressureSignal.QUEUE_WAIT)
    return effective_rung(rung, state.contract, ladder)


def _take_offer(cell: Cell, flight: Flight, now: Now) -> None:
    """Pick the best offer that the tenant's tokens and money allow and hold both. Raises Denied."""
    assert flight.quote is not None
    if not flight.quote.offers:
        raise _no_offer(cell, flight, now)
    state = flight.state
    first = flight.quote.offers[0]
    need = tokens_needed(cell, flight, first)
    check_tokens(state, first, need, now)
    offer, cause = first, ""
    if not state.budget.fits(first.price_nusd, now.wall_ns):
        offer, cause = _cheaper(cell, flight, now), "budget"
        need = tokens_needed(cell, flight, offer)
        check_tokens(state, offer, need, now)
    state.requests.take(1, now.mono_ns)
    hold(cell, flight, offer, need, now)
    flight.cause = cause or _cause_of(cell, flight, offer)


def _shed(cell: Cell, flight: Flight, now: Now) -> None:
    """Take away the offers that would come too late. Raises Denied where none is left."""
    assert flight.quote is not None
    if not drop_late_offers(cell, flight, now):
        pools = [cell.pools[name] for name in flight.ask.tiers if name in cell.pools]
        retry_s = max((retry_after_s(pool, flight, now) for pool in pools), default=1)
        raise Denied(Code.OVERLOADED, "The queue is too long for an answer in time.", retry_s)


def _cheaper(cell: Cell, flight: Flight, now: Now) -> Offer:
    """The budget does not fit the best offer. `at_limit: degrade` looks for a cheaper one, `refuse` does not."""
    budget = flight.state.budget
    if flight.state.contract.budget.at_limit == "degrade" and flight.ask.risk != "high":
        requote(cell, flight, now, least_rung=smaller_tier(cell.platform.ladder))
        assert flight.quote is not None
        for offer in flight.quote.offers:
            if budget.fits(offer.price_nusd, now.wall_ns):
                return offer
    limit = flight.state.contract.budget
    raise Denied(
        Code.BUDGET_EXHAUSTED,
        f"The budget of this {limit.per} does not cover this request.",
        budget.reset_s(now.wall_ns) if limit.nusd else None,
    )


def _no_offer(cell: Cell, flight: Flight, now: Now) -> Denied:
    """Translate why no tier could be offered into the code that helps the caller most."""
    assert flight.quote is not None
    whys = [rejected.why for rejected in flight.quote.rejected]
    pools = [cell.pools[name] for name in flight.ask.tiers if name in cell.pools]
    if pools and not any(pool.views for pool in pools):
        started = any(pool.ever_ready for pool in pools)
        code = Code.NO_CAPACITY if started else Code.STARTING
        return Denied(code, "No replica of this model is running now.", 3)
    if whys and all(why.startswith("context") for why in whys):
        return Denied(Code.CONTEXT_LENGTH_EXCEEDED, "The prompt is longer than this model's context.")
    retry_s = max((pool.retry_after_s(now.mono_ns) for pool in pools), default=1)
    if any("deadline" in why for why in whys):
        return Denied(Code.DEADLINE_UNREACHABLE, "The deadline cannot be met at the present load.", retry_s)
    if any("defer" in why for why in whys):
        return Denied(Code.DEFERRED, "The platform is overloaded and defers this request.", retry_s)
    return Denied(
        Code.NO_CAPACITY, "No way to serve this request is open now: " + "; ".join(sorted(set(whys)))[:300], retry_s
    )


def _cause_of(cell: Cell, flight: Flight, offer: Offer) -> str:
    """One closed word for why the offer is worse than the best: the signal that moved the ladder, or what was missing."""
    if not offer.degraded:
        return "ok"
    for name, rung in flight.rungs.items():
        if rung >= offer.rung:
            signal = flight.pressure[name][1]
            return signal if signal != "none" else "override"
    if any(not cell.pools[name].views for name in flight.ask.tiers if name in cell.pools):
        return "no_replicas"
    return "load"
