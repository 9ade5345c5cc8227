"""Stopping running work for work that must not wait longer: a tenant's lent share comes back, a class gets its place.

New grants come first: nobody is stopped for a request before half of the time is over in which it must have a place.
Then just enough is stopped, the newest of the lowest class first (`policies/reclaim.py`), by an Evict to the replica. The
gateway asks to go on, and the rest of the answer is made later, after the tokens that the client has (`returns.py`).
Two reasons:

    reclaim   a tenant inside its reserved share waits; tenants over their own share give way
    class     a request waits for a part of its first-token target; lower classes give way, down to their minimum shares
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rungway.clock import NS_PER_MS, NS_PER_S
from rungway.contracts import CLASS_ORDER
from rungway.control.cell import Cell, Now
from rungway.control.claims import minimum_share, standing
from rungway.control.flight import Attempt, Flight
from rungway.control.pace import Pace
from rungway.control.pool import Pool
from rungway.control.shares import cap_allows, in_reserve, own_share
from rungway.control.sides import is_over
from rungway.messages import Evict
from rungway.policies.placement import ReplicaView
from rungway.policies.reclaim import Claim, Counts, Keeps, Need, Room, Running, Spare, choose_victims

NEW_GRANTS_ONLY = 0.5  # of `reclaim_s`; what is stopped then has the other half to leave
CLAIMS_MAX = 32  # new ones per pool and look


@dataclass(slots=True)
class _Scene:
    """What runs in a pool as of this look. `open`: attempts by (request, number)."""

    running: list[Running]
    spare: Spare
    stopping: dict[str, list[Attempt]]
    flights: dict[tuple[str, int], tuple[Flight, Attempt]]


def make_room(cell: Cell, now: Now) -> None:
    """One look at every pool that has work waiting."""
    if not cell.platform.controller.preempt.evictions_max:
        return
    for pool in cell.pools.values():
        if not pool.queue.depth():
            continue
        standing(pool, now.mono_ns)
        scene: _Scene | None = None
        for made, (flight, why) in enumerate(_claimants(cell, pool, now)):
            if made >= CLAIMS_MAX:
                break
            scene = scene or _look(cell, pool, now)
            _claim(cell, pool, scene, flight, why, now)


def _claimants(cell: Cell, pool: Pool, now: Now) -> Iterator[tuple[Flight, str]]:
    """Waiting requests that work should be stopped for, in order of class and arrival."""
    waiting = [entry.payload for entry in pool.queue.entries()]
    waiting.sort(key=lambda flight: flight.band if isinstance(flight, Flight) else 0)
    for flight in waiting:
        assert isinstance(flight, Flight)
        if flight.gateway_lost_ns is not None or flight.state.at_concurrency():
            continue
        if flight.ask.request_id in pool.claims:
            continue
        if _reclaims(pool, flight, now):
            yield flight, "reclaim"
        elif _outranks(cell, pool, flight, now):
            yield flight, "class"


def _reclaims(pool: Pool, flight: Flight, now: Now) -> bool:
    """Its tenant has a reserve that this request would be within, and new grants had their time to give it back."""
    isolation = flight.state.contract.isolation
    if isolation.reclaim_s is None or not isolation.reserved_share:
        return False
    if now.mono_ns - flight.enqueued_ns < NEW_GRANTS_ONLY * isolation.reclaim_s * NS_PER_S:
        return False
    mine = [claim for claim in pool.claims.values() if claim.tenant == flight.ask.tenant]
    return in_reserve(pool, flight, sum(c.sequences for c in mine), sum(c.tokens for c in mine))


def _outranks(cell: Cell, pool: Pool, flight: Flight, now: Now) -> bool:
    """It has used up its part of the first-token target (or of its own deadline), its tenant takes no more than its due, and
    lower classes hold something. What was stopped once stops nobody."""
    at, band = pool.spec.preempt.at, flight.band
    if (
        at is None
        or flight.evictions
        or flight.entry is None
        or flight.entry.late
        or not any(pool.band_sequences[band + 1 :])
    ):
        return False
    target_ns = flight.state.contract.slo.ttft_ms_p99 * NS_PER_MS
    urgent = flight.entry.deadline_ns - now.mono_ns < (1.0 - at) * target_ns
    if now.mono_ns - flight.enqueued_ns < at * target_ns and not urgent:
        return False
    return cap_allows(pool, flight) and not is_over(pool, flight.state, now.mono_ns)


def _look(cell: Cell, pool: Pool, now: Now) -> _Scene:
    spec = pool.spec.preempt
    tenants: dict[str, Counts] = {}
    bands = [Counts() for _ in CLASS_ORDER]
    scene = _Scene([], Spare(tenants, bands, pool.in_flight()[1], pool.capacity_tokens()), {}, {})
    for flight in cell.flights.values():
        if flight.pool != pool.name or flight.entry is not None:
            continue
        for number, attempt in flight.attempts.items():
            if attempt.released or attempt.replica_id not in pool.views:
                continue
            if attempt.evicted_ns is not None and now.mono_ns - attempt.evicted_ns < spec.claim_s * NS_PER_S:
                scene.stopping.setdefault(attempt.replica_id, []).append(attempt)
                continue
            for counts in (tenants.setdefault(flight.ask.tenant, Counts()), bands[flight.band]):
                counts.add(attempt.sequences, attempt.tokens)
            if not _may_stop(flight, attempt, spec.evictions_max, int(spec.rest_s * NS_PER_S), now.mono_ns):
                continue
            scene.flights[(flight.ask.request_id, number)] = flight, attempt
            scene.running.append(_running(pool, flight, number, attempt, now.mono_ns))
    return scene


def _may_stop(flight: Flight, attempt: Attempt, evictions_max: int, rest_ns: int, now_ns: int) -> bool:
    if flight.finish is not None or flight.gateway_lost_ns is not None or flight.evictions >= evictions_max:
        return False
    return not flight.evictions or now_ns - attempt.granted_ns >= rest_ns


def _running(pool: Pool, flight: Flight, number: int, attempt: Attempt, now_ns: int) -> Running:
    return Running(
        flight.ask.request_id,
        number,
        attempt.replica_id,
        flight.ask.tenant,
        flight.band,
        attempt.granted_ns,
        attempt.sequences,
        attempt.tokens,
        tight=breaks_a_promise(flight, attempt, pool.pace, now_ns),
    )


def breaks_a_promise(flight: Flight, attempt: Attempt, pace: Pace, now_ns: int) -> bool:
    """A pause of the usual length would cost a running answer its deadline, its first-token target or its pace. What is
    missed in any case, but for a deadline, is no reason to spare it."""
    lived_ms = (now_ns - flight.submitted_ns) / NS_PER_MS
    made = sum(each.emitted for each in flight.attempts.values()) / flight.sequences
    whole = max(made, attempt.output_reserved / flight.sequences)
    left_ms, pause_ms = (whole - made) * pace.decode_ms, 1000.0 * pace.pause_s(now_ns)
    if flight.ask.deadline_ms is not None and flight.ask.deadline_ms - lived_ms - left_ms < pause_ms:
        return True
    slo = flight.state.contract.slo
    if not made:
        return lived_ms <= slo.ttft_ms_p99
    slack_ms = slo.tpot_ms_p99 * (whole - 1.0) - (lived_ms - flight.first_wait_ms) - left_ms
    return 0.0 <= slack_ms < pause_ms


def _claim(cell: Cell, pool: Pool, scene: _Scene, flight: Flight, why: str, now: Now) -> None:
    """Find what to stop for this request, and stop it."""
    band, states = flight.band, cell.tenants
    if why == "class":
        may = [
            each for each in scene.running if each.band > band and each.tenant != flight.ask.tenant and not each.tight
        ]
        keeps = Keeps(
            {each.tenant: states[each.tenant].contract.isolation.reserved_share for each in may},
            [minimum_share(pool, lower) for lower in range(len(CLASS_ORDER))],
        )
    else:
        may = [each for each in scene.running if each.tenant != flight.ask.tenant]
        keeps = Keeps(
            {each.tenant: own_share(pool, states[each.tenant]) for each in may},
            [minimum_share(pool, lower) if lower > band else 0.0 for lower in range(len(CLASS_ORDER))],
        )
    rooms = [_room(pool, scene, view) for view in pool.candidates(flight, now.mono_ns)]
    chosen = choose_victims(Need(flight.places, flight.held_tokens), rooms, may, scene.spare, keeps)
    if chosen is None or not chosen[1]:
        return
    replica_id, victims = chosen
    request_id = flight.ask.request_id
    until_ns = now.mono_ns + int(pool.spec.preempt.claim_s * NS_PER_S)
    pool.claims[request_id] = Claim(
        request_id, flight.ask.tenant, band, replica_id, flight.places, flight.held_tokens, until_ns
    )
    scene.running = [each for each in scene.running if each not in victims]
    for victim in victims:
        stopped, attempt = scene.flights[(victim.request_id, victim.attempt)]
        scene.stopping.setdefault(replica_id, []).append(attempt)
        _stop(cell, stopped, victim, attempt, flight, why, now)


def _room(pool: Pool, scene: _Scene, view: ReplicaView) -> Room:
    """What is free on a replica, counting what is being stopped there and what of it is claimed."""
    sequences = int(pool.spec.in_flight_factor * view.max_num_seqs) - view.running
    tokens = view.kv_tokens - view.tokens
    for attempt in scene.stopping.get(view.replica_id, ()):
        sequences += attempt.sequences
        tokens += attempt.tokens
    for claim in pool.claims.values():
        if claim.replica_id == view.replica_id:
            sequences -= claim.sequences
            tokens -= claim.tokens
    return Room(view.replica_id, sequences, tokens)


def _stop(cell: Cell, flight: Flight, victim: Running, attempt: Attempt, claimant: Flight, why: str, now: Now) -> None:
    attempt.evicted_ns = now.mono_ns
    cell.effects.sends.append((attempt.replica_id, Evict(victim.request_id, victim.attempt)))
    cell.audit(
        "eviction",
        now,
        tenant=flight.ask.tenant,
        request_id=victim.request_id,
        why=why,
        attempt=victim.attempt,
        replica=attempt.replica_id,
        tenant_class=flight.ask.tenant_class,
        emitted=attempt.emitted,
        computed_again=attempt.tokens - attempt.output_reserved + attempt.emitted,
        evictions=flight.evictions,
        for_tenant=claimant.ask.tenant,
        for_class=claimant.ask.tenant_class,
        for_request=claimant.ask.request_id,
        waited_ms=round((now.mono_ns - claimant.enqueued_ns) / NS_PER_MS, 1),
    )
