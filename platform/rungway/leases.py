"""What a gateway may admit by itself while its controller is away: the bounds of it and the slice that one gateway holds.

A lease is not taken out of the quota: while the controller is there nobody notices it. What a gateway admits from it is
what a quota can be overspent by at most, until the controller is back and debits it.
"""

from __future__ import annotations

import msgspec


class LeaseSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of all leases. `share` of what is free, over all gateways together; 0 = no leases. The `_max` bound one lease:
    a tenant without a limit of its own still has these."""

    ttl_s: float = 30.0
    share: float = 0.25
    slots_max: int = 4
    tokens_max: int = 20_000
    requests_max: int = 100
    waiting_max: int = 1000


class TenantLease(msgspec.Struct, frozen=True, array_like=True):
    """Of one tenant's unused quota. `places`: requests running at once that were admitted from the lease. `nusd` None =
    no budget limits it."""

    tokens: int
    requests: int
    places: int
    nusd: int | None


class ReplicaLease(msgspec.Struct, frozen=True, array_like=True):
    """Room on one replica: sequences and tokens that this gateway may have in flight there, the granted ones included."""

    replica_id: str
    tier: str
    version: str
    slots: int
    tokens: int


class PoolLease(msgspec.Struct, frozen=True, array_like=True):
    """What was last known of a tier. `rungs`: deepest rung in force by tenant class."""

    saturation: float
    prefill_tokens_per_s: float
    decode_ms_per_token: float
    rungs: dict[str, int]


class Lease(msgspec.Struct, frozen=True, array_like=True):
    """One gateway's slice, good for `ttl_s` on its own monotonic clock from the moment it arrives; replaces the one before.
    A tenant that is not named gets nothing (suspended, or behind its breaker)."""

    ttl_s: float
    slots_max: int
    waiting_max: int
    tenants: dict[str, TenantLease]
    replicas: list[ReplicaLease]
    pools: dict[str, PoolLease]
