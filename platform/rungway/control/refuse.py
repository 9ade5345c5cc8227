"""Saying no, in one place: holds go back, the gateway is told, the audit and the ledger get their rows."""

from __future__ import annotations

from rungway.control.bill import ledger_row
from rungway.control.cell import FREE, Cell, Now
from rungway.control.flight import Flight
from rungway.control.line import give_back
from rungway.messages import Refused
from rungway.outcomes import CODES, Code, Outcome
from rungway.types import Ask, RateInfo, Refusal, Rejected


def refuse(cell: Cell, flight: Flight, code: Code, message: str, retry_s: int | None, now: Now) -> None:
    """End a request that has not been granted (or can not be retried): give back holds, tell, audit, write its row."""
    ask, state = flight.ask, flight.state
    give_back(flight, now)
    flight.learn(None, now.mono_ns)
    cell.flights.pop(ask.request_id, None)
    rejected: tuple[Rejected, ...] = flight.quote.rejected if flight.quote is not None else ()
    rung = max(flight.rungs.values(), default=0) if CODES[code].whose == "platform" else 0
    refusal = Refusal(
        request_id=ask.request_id,
        code=code,
        message=message,
        retry_after_s=retry_s,
        rate=state.rate(now.mono_ns),
        rung=rung,
        reason=code,
        rejected=rejected,
    )
    cell.effects.sends.append((ask.gateway_id, Refused(refusal)))
    cell.audit(
        "refusal",
        now,
        tenant=ask.tenant,
        request_id=ask.request_id,
        rung=rung,
        code=code,
        model=ask.model,
        rungs=flight.rungs,
        pressure=flight.pressure,
        tried=[[r.tier, r.kind, r.why] for r in rejected],
        retry_after_s=retry_s,
    )
    cell.effects.rows.append(ledger_row(flight, FREE, Outcome.REFUSED, code, now.wall_ns, cell.thresholds))
    cell.remember(ask.request_id, {}, code)


def refuse_again(cell: Cell, ask: Ask) -> None:
    """A gateway asks about a request that is closed: the answer was lost with a channel or a controller. The row stands,
    so the answer is no; a request that was closed because its gateway was away may be sent anew."""
    refusal = Refusal(
        request_id=ask.request_id,
        code=cell.refused.get(ask.request_id, Code.STARTING),
        message="This request was closed while its gateway was cut off; please send it again.",
        retry_after_s=1,
        rate=RateInfo(),
    )
    cell.effects.sends.append((ask.gateway_id, Refused(refusal)))


def refuse_closed(cell: Cell, gateway_id: str, request_id: str) -> None:
    """A further try of a request whose row was written while its gateway was away: its engine had reported, and nobody
    claimed it in time."""
    refusal = Refusal(
        request_id=request_id,
        code=Code.REPLICA_LOST,
        message="The replica failed while the gateway was cut off from the controller.",
        retry_after_s=1,
        rate=RateInfo(),
        reason=Code.REPLICA_LOST,
    )
    cell.effects.sends.append((gateway_id, Refused(refusal)))


def refuse_retry(cell: Cell, flight: Flight, now: Now) -> None:
    """Tell the gateway that there will be no further try, and by its code whether that is for what the request did to an
    engine. The flight stays until its Finish settles it."""
    what, code = ("engine", Code.INTERNAL) if flight.failure == "error" else ("replica", Code.REPLICA_LOST)
    refusal = Refusal(
        request_id=flight.ask.request_id,
        code=code,
        message=f"The {what} failed and the retry budget of this tenant is used up.",
        retry_after_s=2,
        rate=flight.state.rate(now.mono_ns),
        reason=code,
    )
    cell.effects.sends.append((flight.ask.gateway_id, Refused(refusal)))


def tell_cancelled(cell: Cell, flight: Flight, now: Now) -> None:
    """Somebody stopped a granted request: its gateway ends it, stops the engine and settles as for any client that left."""
    refusal = Refusal(
        request_id=flight.ask.request_id,
        code=Code.CANCELLED,
        message="The request was cancelled.",
        retry_after_s=None,
        rate=flight.state.rate(now.mono_ns),
        reason=Code.CANCELLED,
    )
    cell.effects.sends.append((flight.ask.gateway_id, Refused(refusal)))
