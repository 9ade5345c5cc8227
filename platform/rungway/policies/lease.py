"""How much a gateway may admit by itself: a share of what is free, cut into one piece per gateway.

All pieces that are out together are at most `share` of what was free when they were cut, so a controller that is lost right
then comes back to at most that much overspend. Places that a gateway fills already stay its own: while no controller gives
out anything else, what ends there may be followed there.
"""

from __future__ import annotations

from typing import NamedTuple

from rungway.leases import LeaseSpec, ReplicaLease, TenantLease


class Piece(NamedTuple):
    """Gateway `number` (from 0) of so many."""

    number: int
    gateways: int

    def of(self, total: int) -> int:
        """This gateway's part of `total` whole units. The parts of all gateways add up to it exactly."""
        total = max(0, total)
        return total * (self.number + 1) // self.gateways - total * self.number // self.gateways


class TenantFree(NamedTuple):
    """What a tenant has not used; None = without limit. `mine`: its requests that run through this gateway, which count in
    its places; `places` are those that nobody uses."""

    tokens: int | None
    requests: int | None
    places: int | None
    nusd: int | None
    mine: int


class ReplicaFree(NamedTuple):
    """Room on a replica that nobody uses, and what this gateway has in flight there. `usable` False = it takes no new work
    (silent, or behind its breaker)."""

    replica_id: str
    tier: str
    version: str
    sequences: int
    tokens: int
    my_sequences: int
    my_tokens: int
    usable: bool


def tenant_lease(spec: LeaseSpec, free: TenantFree, piece: Piece) -> TenantLease:
    requests = _part(spec, free.requests, spec.requests_max, piece)
    return TenantLease(
        tokens=_part(spec, free.tokens, spec.tokens_max, piece),
        requests=requests,
        places=free.mine + _part(spec, free.places, spec.requests_max, piece),
        nusd=None if free.nusd is None else piece.of(int(spec.share * free.nusd)),
    )


def replica_lease(spec: LeaseSpec, free: ReplicaFree, piece: Piece) -> ReplicaLease:
    slots = tokens = 0
    if free.usable:
        slots = free.my_sequences + min(spec.slots_max, piece.of(int(spec.share * free.sequences)))
        tokens = free.my_tokens + piece.of(int(spec.share * free.tokens))
    return ReplicaLease(free.replica_id, free.tier, free.version, slots, tokens)


def _part(spec: LeaseSpec, free: int | None, most: int, piece: Piece) -> int:
    """`most` bounds one lease; what has no limit of its own has this one."""
    return most if free is None else min(most, piece.of(int(spec.share * free)))
