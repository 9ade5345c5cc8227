"""Holds and places: what a request takes from its tenant's quota and where it waits. Every take has its give-back."""

from __future__ import annotations

from rungway.clock import NS_PER_MS
from rungway.control.cell import Cell, Now
from rungway.control.flight import Flight
from rungway.control.late import NEVER_NS, latest_start_ns, next_look_ns
from rungway.control.pool import Pool
from rungway.policies.fairness import Queued
from rungway.types import Offer, OfferKind

# An answer that starts at the last moment must not be cut off one token before its end because a step took longer.
SERVICE_MARGIN = 1.05


def tokens_needed(cell: Cell, flight: Flight, offer: Offer) -> int:
    """Prompt plus predicted output over all sequences: what is reserved. Nothing for cache and template. Never more than the
    largest replica has, or it would wait for ever, and whoever is behind it."""
    if offer.kind is not OfferKind.MODEL:
        return 0
    output = cell.predictor.predict(flight.ask.tenant, offer.tier, flight.ask.output_bound, offer.max_tokens)
    need = offer.prompt_tokens + min(output, offer.max_tokens) * offer.best_of
    most = cell.pools[offer.tier].roster.most(offer.version)
    if most is not None:
        need = min(need, most[1])
    limit = flight.state.contract.quotas.tokens_per_minute
    return min(need, max(limit, offer.prompt_tokens)) if limit else need


def hold(cell: Cell, flight: Flight, offer: Offer, need: int, now: Now) -> None:
    """Reserve tokens and money for an offer; a second call moves the hold to another offer."""
    state = flight.state
    if flight.held_tokens:
        state.tokens.give_back(flight.held_tokens, now.mono_ns)
    if flight.held_nusd:
        state.budget.settle(flight.held_nusd, 0, now.wall_ns)
    state.tokens.take(need, now.mono_ns)
    state.budget.hold(offer.price_nusd, now.wall_ns)
    flight.offer, flight.pool, flight.warmth = offer, offer.tier, None
    flight.held_tokens, flight.held_nusd = need, offer.price_nusd
    most = cell.pools[offer.tier].roster.most(offer.version) if offer.kind is OfferKind.MODEL else None
    flight.places = flight.sequences if most is None else min(flight.sequences, most[0])


def give_back(flight: Flight, now: Now) -> None:
    """Return what is still held: unused quota and money."""
    if flight.held_tokens:
        flight.state.tokens.give_back(flight.held_tokens, now.mono_ns)
        flight.held_tokens = 0
    if flight.held_nusd:
        flight.state.budget.settle(flight.held_nusd, 0, now.wall_ns)
        flight.held_nusd = 0


def enqueue(cell: Cell, flight: Flight, now: Now) -> None:
    """Take a place: band by class, weighted VTC over tenants, earliest deadline first inside the tenant, behind these what
    is late. What has begun goes before all that has not, at no charge: its prompt was charged already."""
    ask, state, pool = flight.ask, flight.state, cell.pools[flight.pool]
    assert flight.offer is not None
    deadline, late = NEVER_NS, flight.pool in flight.late and not flight.begun
    if late:
        deadline = next_look_ns(cell, flight)
    elif ask.deadline_ms is not None:
        # The latest moment to start: tokens of an answer that will be cut off are wasted.
        prompt = flight.offer.prompt_tokens
        service_ms = pool.pace.service_ms(prompt, max(0, flight.held_tokens - prompt) // max(1, flight.offer.best_of))
        own = flight.submitted_ns + int((ask.deadline_ms - SERVICE_MARGIN * service_ms) * NS_PER_MS)
        deadline = min(own, NEVER_NS)
    elif (latest := latest_start_ns(cell, flight, pool.pace.service_ms(flight.offer.prompt_tokens, 0))) is not None:
        deadline = latest
    flight.entry = Queued(
        request_id=ask.request_id,
        tenant=ask.tenant,
        band=flight.band,
        weight=state.contract.weight,
        cost=0.0 if flight.begun else float(flight.offer.prompt_tokens),
        deadline_ns=flight.submitted_ns - NEVER_NS if flight.begun else deadline,
        enqueued_ns=flight.enqueued_ns,
        payload=flight,
    )
    if late:
        flight.entry.relegate()
    pool.queue.push(flight.entry)
    flight.lined_tokens = flight.held_tokens  # an engine that has not stopped yet may still raise what is held
    pool.wait(flight.lined_tokens, state, flight.band)
    if late:
        pool.lag(flight.lined_tokens, state, flight.band)


def dequeue(cell: Cell, flight: Flight) -> None:
    """Leave the queue without having been dispatched."""
    if flight.entry is None:
        return
    pool = cell.pools[flight.pool]
    pool.queue.remove(flight.ask.request_id)
    left_queue(pool, flight)


def left_queue(pool: Pool, flight: Flight) -> None:
    assert flight.entry is not None
    pool.unwait(flight.lined_tokens, flight.state, flight.band, late=flight.entry.late)
    flight.entry = None
