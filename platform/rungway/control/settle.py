"""Closing the books: every path on which a request can end comes through here exactly once.

A granted request is closed when both sides have spoken: the gateway's Finish (what the client got) and an AttemptEnd
from each replica that worked on it (what the engine did). A side that died is replaced by what is known of it.
"""

from __future__ import annotations

from rungway.clock import NS_PER_S
from rungway.control.admit import readmit
from rungway.control.bill import ledger_row
from rungway.control.cell import FREE, Cell, Now, Orphan
from rungway.control.flight import Attempt, Flight
from rungway.control.late import next_look_ns, relegate, waited_too_long
from rungway.control.line import dequeue
from rungway.control.orphans import ORPHANS_MAX, keep_stray, sweep_orphans, write_orphan
from rungway.control.refuse import refuse_retry
from rungway.control.shed import turn_away
from rungway.messages import AttemptAck, FinishAck
from rungway.outcomes import Code, Outcome
from rungway.types import AttemptEnd, Finish, LedgerRow

# A tenant's breaker counts what its requests did to the engine. A replica or a client that was lost, a gateway that stops,
# and a request that asks for what cannot be are no failures.
_BREAKER_FAILURES = frozenset({(Outcome.ERROR, Code.INTERNAL)})
_BREAKER_SUCCESSES = frozenset({Outcome.COMPLETED, Outcome.LENGTH})


def finished(cell: Cell, gateway_id: str, finish: Finish, now: Now) -> None:
    """The gateway's side. Acknowledged with this turn's commit; a repeated Finish is acknowledged again."""
    flight = cell.flights.get(finish.request_id)
    if flight is None:
        if finish.delivered and finish.request_id not in cell.settled:
            keep_stray(cell, gateway_id, finish, now)
        else:
            cell.effects.held.append((gateway_id, FinishAck([finish.request_id])))
        return
    if flight.finish is None:
        _add_missed_tries(flight, finish)
        flight.finish = finish
        flight.finish_ns = now.mono_ns
        if flight.entry is not None:
            dequeue(cell, flight)
        _drop_unbegun(cell, flight, finish, now)
        _learn(flight, finish, now)
    close_if_settled(cell, flight, now)


def _add_missed_tries(flight: Flight, finish: Finish) -> None:
    """Tries that an earlier controller granted and the gateway's hello did not name (of what it admitted from a lease it names
    the first grant). The client had them, so the row waits for their engines' ends too, or these would be nobody's."""
    for number in finish.delivered.keys() - flight.attempts.keys():
        attempt = flight.attempts[number] = Attempt("", 1, 0, 0, flight.band)
        attempt.released = True  # it holds nothing here


def _drop_unbegun(cell: Cell, flight: Flight, finish: Finish, now: Now) -> None:
    """A grant that reached its gateway after the client had left was never begun there (`delivered` names every try that
    was): no engine will report its end, so its place is free now."""
    for number, attempt in flight.attempts.items():
        if number not in finish.delivered and attempt.end is None and attempt.lost_ns is None:
            attempt.lost_ns = now.mono_ns
            cell.pools[flight.pool].release(attempt, flight.state)


def _learn(flight: Flight, finish: Finish, now: Now) -> None:
    state = flight.state
    if (finish.outcome, finish.code) in _BREAKER_FAILURES:
        flight.learn(False, now.mono_ns)
    elif finish.outcome in _BREAKER_SUCCESSES:
        flight.learn(True, now.mono_ns)
    else:
        flight.learn(None, now.mono_ns)
    if flight.granted_ns:
        state.learn_service((now.mono_ns - flight.granted_ns) / NS_PER_S)


def attempt_ended(cell: Cell, replica_id: str, end: AttemptEnd, now: Now) -> None:
    """The engine's side: capacity is free at once, the row waits for the gateway. Acknowledged with the row, so that a
    controller that dies in between leaves somebody who knows."""
    flight = cell.flights.get(end.request_id)
    if flight is None:
        _late_end(cell, replica_id, end, now)
        return
    attempt = flight.attempts.get(end.attempt)
    if attempt is None:
        # A try before the one that was adopted: it holds nothing, but what it emitted belongs to the bill.
        attempt = flight.attempts[end.attempt] = Attempt(end.replica_id, 1, 0, 0)
        attempt.released = True
    attempt.teller = replica_id
    if attempt.end is not None:
        return
    cell.effects.attempts.append(end)
    attempt.end = end
    pool = cell.pools[flight.pool]
    pool.release(attempt, flight.state)
    usage = end.usage
    owed = 2.0 * (usage.output_tokens - attempt.emitted)
    if attempt.charged:  # what was expected to be cached is corrected to what was
        owed += usage.prompt_tokens - usage.cached_tokens - attempt.charged
    attempt.emitted = max(attempt.emitted, usage.output_tokens)
    pool.queue.charge(end.billing.tenant, flight.band, owed)
    if end.finish in ("stop", "length"):
        whole = sum(each.emitted for each in flight.attempts.values())
        if whole:  # a request that only scores its prompt says nothing of how long answers are
            cell.predictor.observe(end.billing.tenant, flight.pool, whole // flight.sequences)
        breaker = pool.breakers.get(replica_id)
        if breaker is not None:
            breaker.record(True, now.mono_ns)
    close_if_settled(cell, flight, now)


def _late_end(cell: Cell, replica_id: str, end: AttemptEnd, now: Now) -> None:
    """Engine output of a request that is closed or was never seen here."""
    key = (end.request_id, end.attempt)
    delivered = cell.settled.get(end.request_id)
    if delivered is not None:
        cell.effects.attempts.append(end)
        cell.effects.held.append((replica_id, AttemptAck([key])))
        emitted = end.usage.output_tokens
        if end.attempt not in delivered:
            # After a restart: what the row counted for attempts that no engine had reported is known only as a sum.
            delivered[end.attempt] = min(emitted, delivered.get(0, 0))
            delivered[0] = delivered.get(0, 0) - delivered[end.attempt]
        extra = emitted - delivered[end.attempt]
        if extra > 0:
            cell.effects.waste.append((end.request_id, extra))
            delivered[end.attempt] = emitted
        return
    tries = cell.orphans.setdefault(end.request_id, {})
    if end.attempt not in tries:
        cell.effects.attempts.append(end)
        tries[end.attempt] = Orphan(end, now.mono_ns, replica_id)
        if len(cell.orphans) > ORPHANS_MAX:
            write_orphan(cell, cell.orphans.pop(end.request_id).values(), now)


def progress(cell: Cell, request_id: str, number: int, emitted: int, now: Now) -> None:
    """Output so far: charged to the fair queue as it streams, topped up where it passes what was reserved."""
    flight = cell.flights.get(request_id)
    attempt = flight.attempts.get(number) if flight is not None else None
    if flight is None or attempt is None or attempt.end is not None or emitted <= attempt.emitted:
        return
    cell.pools[flight.pool].queue.charge(flight.ask.tenant, flight.band, 2.0 * (emitted - attempt.emitted))
    attempt.emitted = emitted
    over = emitted - attempt.output_reserved
    if over > 0 and flight.entry is None:  # what waits counts in its line with what it held when it joined
        flight.state.tokens.take(over, now.mono_ns)
        flight.held_tokens += over
        attempt.output_reserved += over


def close_if_settled(cell: Cell, flight: Flight, now: Now) -> None:
    if not flight.settled():
        return
    if flight.finish is not None:
        outcome, code = flight.finish.outcome, flight.finish.code or ""
    else:
        outcome, code = Outcome.GATEWAY_LOST, ""
        flight.learn(None, now.mono_ns)
    price = flight.grant.price if flight.grant is not None else FREE
    row = ledger_row(flight, price, outcome, code, now.wall_ns, cell.thresholds)
    _settle_holds(flight, row, now)
    flight.land()
    if flight.retrying:
        flight.state.retries.end()
    cell.effects.rows.append(row)
    cell.effects.held.append((flight.ask.gateway_id, FinishAck([flight.ask.request_id])))
    for number, attempt in flight.attempts.items():
        if attempt.end is not None:
            cell.effects.held.append((attempt.teller, AttemptAck([(flight.ask.request_id, number)])))
    del cell.flights[flight.ask.request_id]
    known = flight.finish.delivered if flight.finish is not None else {}
    # What the row has accounted for: a later word of the engine adds only what is beyond it.
    emitted = {n: attempt.counted(known.get(n, 0)) for n, attempt in flight.attempts.items()}
    cell.remember(flight.ask.request_id, {**known, **emitted})
    _note_slo(cell, flight, row)


def _settle_holds(flight: Flight, row: LedgerRow, now: Now) -> None:
    """Held becomes used: the difference goes back, or is taken where more was used than held."""
    state = flight.state
    used = row.prompt_tokens + row.output_tokens
    if flight.held_tokens > used:
        state.tokens.give_back(flight.held_tokens - used, now.mono_ns)
    elif used > flight.held_tokens:
        state.tokens.take(used - flight.held_tokens, now.mono_ns)
    state.budget.settle(flight.held_nusd, row.cost_nusd, now.wall_ns)
    flight.held_tokens = flight.held_nusd = 0


def _note_slo(cell: Cell, flight: Flight, row: LedgerRow) -> None:
    if row.slo_met is not None and flight.pool in cell.pools:
        cell.pools[flight.pool].note_slo(row.tenant_class, bool(row.slo_met))


def replica_lost(cell: Cell, replica_id: str, now: Now) -> None:
    """Its attempts have no engine side any more. Their emitted tokens come later from the node's token log, if at all."""
    info = cell.replicas.pop(replica_id, None)
    if info is None:
        return
    pool = cell.pools.get(info.tier)
    for flight in list(cell.flights.values()):
        for attempt in flight.attempts.values():
            if attempt.replica_id == replica_id and attempt.end is None and attempt.lost_ns is None:
                attempt.lost_ns = now.mono_ns
                if pool is not None:
                    pool.release(attempt, flight.state)
                close_if_settled(cell, flight, now)
    if pool is not None:
        pool.drop(replica_id)


def gateway_lost(cell: Cell, gateway_id: str, now: Now) -> None:
    """Its clients are gone with it. Replicas notice by themselves, stop, and report what they had emitted."""
    cell.gateways.pop(gateway_id, None)
    for flight in [f for f in cell.flights.values() if f.ask.gateway_id == gateway_id]:
        flight.gateway_lost_ns = now.mono_ns
        if flight.attempts and flight.entry is None:
            close_if_settled(cell, flight, now)


def sweep(cell: Cell, now: Now) -> None:
    """Bounds on waiting: queue time-outs and deadlines, engine sides that never came, orphans nobody claimed."""
    spec = cell.platform.controller
    for flight in list(cell.flights.values()):
        lost_ns = flight.gateway_lost_ns
        if lost_ns is None and flight.finish is None and flight.entry is None:
            continue  # it runs, and its gateway is there
        if lost_ns is not None and (flight.entry is not None or not flight.open_attempts()):
            if now.mono_ns - lost_ns > spec.orphan_wait_s * NS_PER_S:
                _abandon(cell, flight, now)
        elif flight.entry is not None:
            _expire(cell, flight, now)
        elif now.mono_ns - _client_done_ns(flight, now.mono_ns) > spec.lost_wait_s * NS_PER_S:
            for attempt in flight.open_attempts():
                attempt.lost_ns = now.mono_ns
                cell.pools[flight.pool].release(attempt, flight.state)
            close_if_settled(cell, flight, now)
    sweep_orphans(cell, int(spec.orphan_wait_s * NS_PER_S), now)


def _client_done_ns(flight: Flight, now_ns: int) -> int:
    """Since when the client's side is over, by its Finish or by the loss of its gateway; now when it is not. A gateway
    may die between a grant and its start: then no engine ever heard of the attempt."""
    if flight.finish is not None:
        return flight.finish_ns
    return now_ns if flight.gateway_lost_ns is None else flight.gateway_lost_ns


def _abandon(cell: Cell, flight: Flight, now: Now) -> None:
    """Its gateway did not come back and no engine works on it: close it as it stands."""
    dequeue(cell, flight)
    close_if_settled(cell, flight, now)


def _expire(cell: Cell, flight: Flight, now: Now) -> None:
    entry = flight.entry
    assert entry is not None
    waited_ns = now.mono_ns - flight.enqueued_ns
    if flight.evictions and not flight.retrying:
        return  # stopped by us, not by a failure: it goes on as soon as there is room, and only its client's time ends it
    late = not flight.begun and now.mono_ns > entry.deadline_ns
    if late and flight.ask.deadline_ms is None:
        _overdue(cell, flight, now)
        return
    if not late and waited_ns <= cell.platform.controller.queue_timeout_s * NS_PER_S:
        return
    if flight.retrying:
        dequeue(cell, flight)
        refuse_retry(cell, flight, now)
    elif late:
        turn_away(cell, flight, Code.DEADLINE_UNREACHABLE, "The deadline cannot be met any more.", now)
    else:
        turn_away(cell, flight, Code.OVERLOADED, "No replica became free within the queue's time limit.", now)


def _overdue(cell: Cell, flight: Flight, now: Now) -> None:
    """A request that waits has missed its latest start, or its wait reached another rung: it goes behind those that are on
    time, and gets the offer of its own rung; where it still waits and has for too long, it is refused."""
    assert flight.entry is not None
    if not flight.entry.late:
        relegate(cell.pools[flight.pool], flight)
    readmit(cell, flight, now)
    if flight.entry is not None and not waited_too_long(cell, flight, now):
        flight.entry.deadline_ns = next_look_ns(cell, flight)
    elif flight.entry is not None:
        turn_away(cell, flight, Code.OVERLOADED, "It waited too long for its first-token target.", now)
