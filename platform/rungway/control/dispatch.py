"""Giving out capacity: late binding, fair order, isolation caps.

A request leaves our queue only against room on a replica. For each pool the queue is asked for its next request; the
judge below says whether that one can go now. "Does not fit" stops the band (no overtaking, or the fairness bound is
lost); "its tenant is at a cap" passes the turn to the next tenant. Who waits for replicas of its own that are full (a shard, or one
version of several) is passed too, but nobody behind it gets one of these.
"""

from __future__ import annotations

from rungway.control.cell import Cell, Now
from rungway.control.claims import keeps_clear, standing
from rungway.control.flight import Attempt, Flight
from rungway.control.late import relegate
from rungway.control.line import left_queue
from rungway.control.pool import Pool
from rungway.control.shares import share_allows
from rungway.control.warm import local, warmth
from rungway.messages import Granted
from rungway.policies.fairness import Queued, Verdict
from rungway.policies.placement import ReplicaView
from rungway.types import Grant, Rejected


def dispatch(cell: Cell, now: Now) -> None:
    """Grant as long as some pool has both room and an eligible request."""
    for pool in cell.pools.values():
        while pool.queue.depth() and pool.has_room():
            judge = _Judge(cell, pool, now)
            entry = pool.queue.select(judge, local(pool, now.mono_ns))
            for missed in judge.missed:
                relegate(pool, missed)
            if entry is None and judge.missed:
                continue
            if entry is None:
                break
            flight = entry.payload
            assert isinstance(flight, Flight) and judge.view is not None
            left_queue(pool, flight)
            charged = int(entry.charge)
            _grant_on(cell, pool, flight, judge.view, charged, now)


class _Judge:
    """One selection: may this entry go now? Keeps the replica it found for the entry it said TAKE to."""

    def __init__(self, cell: Cell, pool: Pool, now: Now) -> None:
        self.cell = cell
        self.pool = pool
        self.now = now
        self.view: ReplicaView | None = None
        self.claims = standing(pool, now.mono_ns)
        self.missed: list[Flight] = []  # passed: they can no longer begin in time
        self.kept: set[str] = set()  # replicas that somebody waits for who was passed
        self.full: set[str] = set()  # versions of which the same holds

    def __call__(self, entry: Queued) -> Verdict:
        flight = entry.payload
        assert isinstance(flight, Flight) and flight.offer is not None
        if flight.gateway_lost_ns is not None or self._missed(entry, flight):
            return Verdict.SKIP
        if flight.offer.version in self.full:
            return Verdict.SKIP_ENTRY
        if flight.state.at_concurrency():
            return Verdict.SKIP_TENANT
        if not flight.retrying and not share_allows(self.pool, flight, self.now.mono_ns):
            return Verdict.SKIP_TENANT
        if self.claims and not keeps_clear(self.pool, self.claims, flight):
            return Verdict.SKIP_TENANT
        warm = warmth(self.pool, flight, self.now.mono_ns)
        self.view = self.pool.place(
            flight, flight.places, flight.held_tokens, self.now.mono_ns, kept=self.kept, warmth=warm
        )
        if self.view is not None:
            entry.cached = float(warm.cached(self.view.bit))
            return Verdict.TAKE
        return self._waits(flight, flight.offer.version)

    def _waits(self, flight: Flight, version: str) -> Verdict:
        """There is no room for it. It keeps what it waits for from those behind it, and nothing else."""
        most, shard = self.pool.roster.most(version), self.pool.shard(flight)
        if most is None or flight.places > most[0] or flight.held_tokens > most[1]:
            return Verdict.SKIP_ENTRY  # no replica that is here could ever take it
        if shard is not None:
            self.kept |= shard
            return Verdict.SKIP_TENANT
        self.full.add(version)
        return Verdict.STOP if self.full.issuperset(self.pool.roster.served()) else Verdict.SKIP_ENTRY

    def _missed(self, entry: Queued, flight: Flight) -> bool:
        """Its latest start is over since the last tick, which gives it its place (or its refusal) among those that are late."""
        if entry.late or flight.begun or entry.deadline_ns >= self.now.mono_ns:
            return False
        if flight.ask.deadline_ms is None:
            self.missed.append(flight)
        return True


def _grant_on(cell: Cell, pool: Pool, flight: Flight, view: ReplicaView, charged: int, now: Now) -> None:
    """Bind the flight to a replica: a new attempt that holds its capacity until the engine reports its end."""
    offer = flight.offer
    assert offer is not None
    number = flight.next_attempt
    before = flight.attempts.get(number - 1)
    if before is not None and before.evicted_ns is not None:
        pool.pace.paused((now.mono_ns - before.evicted_ns) / 1e9, now.mono_ns)
    flight.next_attempt += 1
    output = max(0, flight.held_tokens - offer.prompt_tokens)
    attempt = Attempt(view.replica_id, flight.places, flight.held_tokens, output, flight.band)
    attempt.granted_ns = now.mono_ns
    attempt.charged = charged
    flight.attempts[number] = attempt
    pool.claims.pop(flight.ask.request_id, None)
    pool.hold(attempt, flight.state)
    pool.pace.dispatched(
        flight.held_tokens,
        flight.band,
        now.mono_ns,
        waiting=pool.queue.depth() > 0,
        waiting_in_band=pool.queue.depth(band=flight.band) > 0,
    )
    pool.breakers[view.replica_id].allows(now.mono_ns)
    _grant(cell, flight, view.replica_id, number, now)


def grant_unqueued(cell: Cell, flight: Flight, now: Now) -> None:
    """A cached answer or a template needs no replica."""
    _grant(cell, flight, "", 0, now)


def _grant(cell: Cell, flight: Flight, replica_id: str, attempt: int, now: Now) -> None:
    offer, state, ask = flight.offer, flight.state, flight.ask
    assert offer is not None
    first = flight.grant is None
    if first:
        flight.first_wait_ms = (now.mono_ns - flight.enqueued_ns) / 1e6
    flight.take_off()
    flight.granted_ns = now.mono_ns
    grant = Grant(
        request_id=ask.request_id,
        attempt=attempt,
        offer=offer,
        replica_id=replica_id,
        reason=flight.cause,
        reserved_tokens=flight.held_tokens,
        reserved_nusd=flight.held_nusd,
        rate=state.rate(now.mono_ns),
        price=cell.price_of(offer),
        priority=flight.band,
        weight=state.contract.weight,
        queue_wait_ms=flight.first_wait_ms,
        granted_wall_ns=now.wall_ns,
        config_digest=cell.platform.digest,
        evictions=flight.evictions,
    )
    flight.grant = grant
    if not (offer.degraded and first):
        cell.effects.sends.append((ask.gateway_id, Granted(grant)))
        return
    cell.audit(
        "downgrade",
        now,
        tenant=ask.tenant,
        request_id=ask.request_id,
        rung=offer.rung,
        degraded=offer.degraded,
        cause=flight.cause,
        model=ask.model,
        best=flight.quote.best if flight.quote is not None else None,
        given=offer,
        tried=[[r.tier, r.kind, r.why] for r in _rejected(flight)],
        rungs=flight.rungs,
        pressure=flight.pressure,
        thresholds=cell.thresholds,
        config=cell.platform.digest,
    )
    cell.effects.held.append((ask.gateway_id, Granted(grant)))


def _rejected(flight: Flight) -> tuple[Rejected, ...]:
    return flight.quote.rejected if flight.quote is not None else ()
