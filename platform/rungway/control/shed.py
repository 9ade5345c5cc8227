"""Turning away what would come too late, before it takes anything: see `policies/shed.py` and `contracts.ShedSpec`."""

from __future__ import annotations

from rungway.control.cell import Cell, Now
from rungway.control.flight import Flight
from rungway.control.line import dequeue
from rungway.control.pool import Pool
from rungway.control.refuse import refuse
from rungway.control.sides import is_over
from rungway.outcomes import Code
from rungway.policies.shed import draw, probability, ramp_of, spread_s
from rungway.types import OfferKind


def drop_late_offers(cell: Cell, flight: Flight, now: Now) -> bool:
    """Leave of the quote's offers those that can be taken up at the present load; False when that left none of several."""
    quote = flight.quote
    assert quote is not None
    kept = tuple(
        offer
        for offer in quote.offers
        if offer.kind is not OfferKind.MODEL or not _turned_away(cell, flight, cell.pools[offer.tier], now)
    )
    if any(offer.kind is OfferKind.MODEL and offer.tier not in flight.late for offer in kept):
        kept = tuple(offer for offer in kept if offer.kind is not OfferKind.MODEL or offer.tier not in flight.late)
    if len(kept) == len(quote.offers):
        return True
    flight.quote = quote._replace(offers=kept)
    return bool(kept)


def _turned_away(cell: Cell, flight: Flight, pool: Pool, now: Now) -> bool:
    spec, state = cell.platform.controller.shed, flight.state
    load = flight.late.get(pool.name)
    if load is None:
        load = pool.expected_wait_s(state, flight.band, now.mono_ns) * 1000.0 / state.contract.slo.ttft_ms_p99
    ramp = ramp_of(spec, flight.ask.tenant_class)
    if load <= ramp.begin:
        return False
    over = is_over(pool, state, now.mono_ns)
    return draw(flight.ask.request_id) < probability(load, ramp, over=over)


def turn_away(cell: Cell, flight: Flight, code: Code, message: str, now: Now) -> None:
    """A request that waits is refused, with the time after which the drain of its line makes another try worth it."""
    retry_s = retry_after_s(cell.pools[flight.pool], flight, now)
    dequeue(cell, flight)
    refuse(cell, flight, code, message, retry_s, now)


def retry_after_s(pool: Pool, flight: Flight, now: Now) -> int:
    """From the drain of its tenant's line, spread over the requests that are turned away."""
    queued = float(flight.state.queued_tokens.get(pool.name, 0))
    return spread_s(pool.pace.drain.retry_after_s(queued, now.mono_ns), flight.ask.request_id)
