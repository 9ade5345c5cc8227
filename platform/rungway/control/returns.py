"""Requests that come back to the queue with a part of their answer made, those whose clients left it, and tries that come
back with a replica that was only cut off."""

from __future__ import annotations

from rungway.control.bill import ledger_row
from rungway.control.cell import FREE, Cell, Now
from rungway.control.flight import Flight
from rungway.control.line import dequeue, enqueue, give_back
from rungway.control.refuse import refuse_retry
from rungway.messages import Granted, Retry

EVICTED = "evicted"


def withdraw(cell: Cell, request_id: str, outcome: str, now: Now) -> None:
    """The client left while its request waited. A granted one is settled by its Finish instead."""
    flight = cell.flights.get(request_id)
    if flight is None or flight.entry is None or flight.attempts:
        return
    dequeue(cell, flight)
    give_back(flight, now)
    flight.learn(None, now.mono_ns)
    del cell.flights[request_id]
    cell.effects.rows.append(ledger_row(flight, FREE, outcome, "", now.wall_ns, cell.thresholds))
    cell.remember(request_id, {})


def retry(cell: Cell, message: Retry, now: Now) -> None:
    """A try ended before the answer was whole: queue the rest of it first in its tenant's line, within the budget. One that
    was stopped for others costs no budget and counts as no failure."""
    flight = cell.flights.get(message.request_id)
    if flight is None or flight.finish is not None or flight.entry is not None:
        return
    if _answered(flight, message):
        assert flight.grant is not None
        cell.effects.sends.append((flight.ask.gateway_id, Granted(flight.grant)))
        return
    pool, state = cell.pools[flight.pool], flight.state
    attempt = flight.attempts.get(message.attempt)
    if attempt is not None:
        pool.release(attempt, state)
    if message.why in ("timeout", "error"):
        pool.failed(message.replica_id, now.mono_ns)
    if message.why == EVICTED:
        if message.attempt == flight.next_attempt - 1:  # not a repeated word about an older try
            flight.evictions += 1
    elif not _another_try(cell, flight, message):
        refuse_retry(cell, flight, now)
        return
    flight.land()
    flight.enqueued_ns = now.mono_ns
    enqueue(cell, flight, now)


def runs_on(cell: Cell, replica_id: str, request_id: str, number: int) -> None:
    """A replica says that it runs a try. One that was given up with it was not lost: its gateway reads on, and it fills its
    place again."""
    flight = cell.flights.get(request_id)
    attempt = flight.attempts.get(number) if flight is not None else None
    if flight is None or attempt is None or attempt.lost_ns is None or attempt.end is not None:
        return
    newest = number == flight.next_attempt - 1 and flight.entry is None and flight.finish is None
    if newest and attempt.replica_id == replica_id:
        attempt.lost_ns, attempt.released = None, False
        cell.pools[flight.pool].hold(attempt, flight.state)


def _answered(flight: Flight, message: Retry) -> bool:
    """Whether the next try was granted already: the grant was lost with a channel, and the gateway says again what it said."""
    newest = flight.next_attempt - 1
    granted = flight.attempts.get(newest)
    return message.attempt < newest and granted is not None and granted.end is None and granted.lost_ns is None


def _another_try(cell: Cell, flight: Flight, message: Retry) -> bool:
    """Take one from the tenant's retry budget, if there is one left, and keep away from the replica that failed."""
    state = flight.state
    flight.failure = message.why
    failed = message.attempt - flight.evictions
    if not state.retries.allows(state.running) or failed > cell.platform.gateway.retries_max:
        return False
    if not flight.retrying:
        state.retries.begin()
    flight.retrying = True
    flight.avoid = flight.avoid | {message.replica_id}
    return True
