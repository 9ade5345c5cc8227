"""Shuffle sharding: a tenant uses a few replicas of a pool, chosen by hash, so that what breaks them breaks few others.

Two tenants with `size` of n replicas each share all of theirs only with probability 1 / C(n, size): with 4 of 20 once in
4,845. Rendezvous hashing picks the members: a replica that goes or comes moves only the tenants that had or get it.
Source: "Workload isolation using shuffle-sharding", Amazon Builders' Library.
"""

from __future__ import annotations

from collections.abc import Collection

from rungway.policies.placement import ReplicaView, rendezvous


def shard_of(tenant: str, views: Collection[ReplicaView], size: int) -> list[ReplicaView]:
    """The tenant's replicas among `views`, best hash first; all of them where there are not more than `size`.

    Pass broken and silent replicas along: a request that breaks its replicas must not be handed on to the whole pool.
    """
    return rendezvous(tenant, views)[:size] if len(views) > size else list(views)
