"""Cutting leases: what each gateway may admit while this controller is away. Sent after its hello, again every third of
the TTL, and at once when a replica comes or goes or a rung moves: a lease must not promise full answers where the ladder
has gone down."""

from __future__ import annotations

from collections import Counter

from rungway.clock import NS_PER_S
from rungway.contracts import TenantClass
from rungway.control.cell import Cell, Now
from rungway.control.pool import SIDES, Pool
from rungway.control.tenant_state import TenantState
from rungway.leases import Lease, PoolLease
from rungway.messages import Leased
from rungway.policies.lease import Piece, ReplicaFree, TenantFree, replica_lease, tenant_lease

RENEWALS = 3  # per TTL: a lost controller was there less than a third of it ago


def renew(cell: Cell, now: Now) -> None:
    """Send what is due. Nothing where leases are off."""
    spec = cell.platform.controller.lease
    if spec.share <= 0:
        return
    rungs = {name: _rungs(pool) for name, pool in cell.pools.items()}
    basis = (rungs, frozenset(cell.replicas))
    due_ns = now.mono_ns - int(spec.ttl_s * NS_PER_S / RENEWALS)
    for gateway_id in cell.gateways:
        sent = cell.leased.get(gateway_id)
        if sent is None or sent[0] <= due_ns or sent[1] != basis:
            cell.leased[gateway_id] = (now.mono_ns, basis)
            cell.effects.sends.append((gateway_id, Leased(_lease(cell, gateway_id, rungs, now))))
    for gateway_id in cell.leased.keys() - cell.gateways.keys():
        del cell.leased[gateway_id]


def _lease(cell: Cell, gateway_id: str, rungs: dict[str, dict[str, int]], now: Now) -> Lease:
    spec = cell.platform.controller.lease
    piece = Piece(list(cell.gateways).index(gateway_id), max(len(cell.gateways), cell.platform.gateway.replicas))
    running: Counter[str] = Counter()
    sequences: Counter[str] = Counter()
    tokens: Counter[str] = Counter()
    for flight in cell.flights.values():
        if flight.ask.gateway_id == gateway_id:
            running[flight.ask.tenant] += flight.running
            for attempt in flight.attempts.values():
                if not attempt.released:
                    sequences[attempt.replica_id] += attempt.sequences
                    tokens[attempt.replica_id] += attempt.tokens
    replicas = [
        replica_lease(spec, free, piece)
        for pool in cell.pools.values()
        for free in _replicas(pool, sequences, tokens, now)
    ]
    return Lease(
        ttl_s=spec.ttl_s,
        slots_max=spec.slots_max,
        waiting_max=spec.waiting_max,
        tenants={
            name: tenant_lease(spec, _free(state, running[name], now), piece)
            for name, state in cell.tenants.items()
            if not state.contract.suspended and state.breaker.state == "closed" and name not in cell.leaving
        },
        replicas=replicas,
        pools={
            name: PoolLease(pool.saturation(), pool.pace.prefill_rate, pool.pace.decode_ms, rungs[name])
            for name, pool in cell.pools.items()
        },
    )


def _rungs(pool: Pool) -> dict[str, int]:
    """The deepest rung in force of each class, on either side of its share."""
    return {str(each): max(pool.scopes[(str(each), side)].in_force for side in SIDES) for each in TenantClass}


def _free(state: TenantState, mine: int, now: Now) -> TenantFree:
    limit, places = state.contract.budget.nusd, state.contract.quotas.concurrent_requests
    fits = state.budget.fits(1, now.wall_ns)  # moves the meter into the present window
    left = None if limit is None else limit - state.budget.spent - state.budget.held if fits else 0
    return TenantFree(
        tokens=state.tokens.remaining(now.mono_ns),
        requests=state.requests.remaining(now.mono_ns),
        places=None if places is None else places - state.running,
        nusd=left,
        mine=mine,
    )


def _replicas(pool: Pool, sequences: Counter[str], tokens: Counter[str], now: Now) -> list[ReplicaFree]:
    """All that are not draining: a tenant's shard is chosen among them, whether they are usable now or not."""
    stale_ns = int(pool.spec.replica_stale_s * NS_PER_S)
    return [
        ReplicaFree(
            name,
            view.tier,
            view.version,
            int(pool.spec.in_flight_factor * view.max_num_seqs) - view.running,
            view.kv_tokens - view.tokens,
            sequences[name],
            tokens[name],
            now.mono_ns - view.reported_ns <= stale_ns and pool.breakers[name].ready(now.mono_ns),
        )
        for name, view in pool.views.items()
        if not view.draining
    ]
