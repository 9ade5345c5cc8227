"""Admission from a lease: a gateway's own yes while its controller is away. Pure: time, reachable replicas and the offer
policy's inputs are given, so the simulator runs it as it is.

The rules are those of the controller, with less to give: full offers only. A degraded answer needs an audit row before its
first byte, and nobody is there to write one; so an Ask waits where a rung was in force when the lease was cut. Each Ask
holds the most that it can cost (all of its output bound), so what is used is never above what was leased.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from enum import StrEnum
from zlib import crc32

import msgspec

from rungway.contracts import CLASS_ORDER, Platform, Price, Tenant
from rungway.leases import Lease, TenantLease
from rungway.policies.offers import TierView, quote
from rungway.policies.placement import Need, ReplicaView, choose
from rungway.policies.quality import QualityModel
from rungway.policies.shard import shard_of
from rungway.policies.versions import pick_version
from rungway.types import Ask, Grant, Offer, OfferKind, RateInfo

_NS_PER_S = 1_000_000_000
REASON = "lease"
FREE = Price(input=0, cached_input=0, output=0)


class Wait(StrEnum):
    """Why an Ask is not admitted from the lease and waits for the controller."""

    NO_LEASE = "no_lease"  # none, or its time is over
    TENANT = "tenant"  # suspended, behind its breaker, or not known when the lease was cut
    RUNG = "rung"  # a rung was in force: the answer might have to be degraded
    NO_FULL_OFFER = "no_full_offer"  # context, deadline, risk floor, or no reachable replica
    SPENT = "spent"  # the tenant's part is used up
    NO_ROOM = "no_room"  # every leased place is taken now


class _Held:
    """What one request holds at this gateway."""

    __slots__ = ("replica_id", "sequences", "tenant", "tier", "tokens")

    def __init__(self, tenant: str, grant: Grant) -> None:
        offer = grant.offer
        self.tenant, self.tier, self.replica_id = tenant, offer.tier, grant.replica_id
        self.sequences = max(1, offer.best_of) if offer.kind is OfferKind.MODEL else 0
        self.tokens = grant.reserved_tokens


class Desk:
    """One gateway's lease and what is in use of it. `receive` ends an outage: the new lease was cut knowing everything that
    the last one admitted."""

    def __init__(self, quality: QualityModel) -> None:
        self._quality = quality
        self._lease: Lease | None = None
        self._until_ns = 0
        self._views: dict[str, ReplicaView] = {}
        self._held: dict[str, _Held] = {}
        self._tokens: Counter[str] = Counter()
        self._requests: Counter[str] = Counter()
        self._nusd: Counter[str] = Counter()
        self._places: Counter[str] = Counter()
        self._in_tier: Counter[tuple[str, str]] = Counter()
        # Offers to those that wait for a place: with each place that is free all of them are looked at again.
        self._offers: dict[str, Offer | None] = {}
        self._basis: tuple[Platform, frozenset[tuple[str, str]]] | None = (
            None  # made for: the (tier, version) that are up
        )

    def receive(self, lease: Lease, now_ns: int) -> None:
        """`now_ns`: monotonic, of this gateway; its TTL runs from here."""
        self._lease = lease
        self._until_ns = now_ns + int(lease.ttl_s * _NS_PER_S)
        self._basis = None
        for spent in (self._tokens, self._requests, self._nusd):
            spent.clear()
        self._views = {
            each.replica_id: ReplicaView(each.replica_id, each.tier, each.version, each.slots, each.tokens)
            for each in lease.replicas
        }
        self.lost(())

    def lost(self, running: Iterable[tuple[str, Grant]]) -> None:
        """The controller is away. `running`: (tenant, grant) of what is in flight here, which fills places."""
        self._held.clear()
        self._places.clear()
        self._in_tier.clear()
        for view in self._views.values():
            view.running = view.tokens = 0
        for tenant, grant in running:
            self._hold(tenant, grant)

    def open(self, now_ns: int) -> bool:
        """Whether a lease is there and its time is not over."""
        return self._lease is not None and now_ns < self._until_ns

    @property
    def waiting_max(self) -> int:
        return 0 if self._lease is None else self._lease.waiting_max

    def admit(
        self, ask: Ask, platform: Platform, reachable: Collection[str], now_ns: int, wall_ns: int, waited_ms: float
    ) -> Grant | Wait:
        """A grant of this lease, or why not. `reachable`: replicas whose channel is up. `waited_ms` of the deadline is
        spent."""
        found = self._judge(ask, platform, reachable, now_ns, wall_ns, waited_ms)
        if found is not Wait.NO_ROOM:
            self._offers.pop(ask.request_id, None)
        return found

    def _judge(
        self, ask: Ask, platform: Platform, reachable: Collection[str], now_ns: int, wall_ns: int, waited_ms: float
    ) -> Grant | Wait:
        lease, contract = self._lease, platform.tenant(ask.tenant)
        if lease is None or now_ns >= self._until_ns:
            return Wait.NO_LEASE
        part = lease.tenants.get(ask.tenant)
        if part is None or contract is None or contract.suspended:
            return Wait.TENANT
        if any(lease.pools[tier].rungs.get(ask.tenant_class, 0) for tier in ask.tiers if tier in lease.pools):
            return Wait.RUNG
        offer = self._offer(ask, contract, platform, reachable, waited_ms)
        if offer is None:
            return Wait.NO_FULL_OFFER
        price = platform.tier(offer.tier).price if offer.kind is OfferKind.MODEL else FREE
        output = offer.max_tokens * max(1, offer.best_of)
        need = offer.prompt_tokens + output if offer.kind is OfferKind.MODEL else 0
        nusd = price.cost_nusd(input_tokens=offer.prompt_tokens, cached_tokens=0, output_tokens=output) if need else 0
        if not self._affords(ask.tenant, part, need, nusd):
            return Wait.SPENT
        replica_id = ""
        if offer.kind is OfferKind.MODEL:
            view = self._place(ask, contract, offer, need, reachable, part)
            if view is None:
                return Wait.NO_ROOM
            replica_id = view.replica_id
        self._tokens[ask.tenant] += need
        self._requests[ask.tenant] += 1
        self._nusd[ask.tenant] += nusd
        grant = Grant(
            request_id=ask.request_id,
            attempt=1 if replica_id else 0,
            offer=offer,
            replica_id=replica_id,
            reason=REASON,
            reserved_tokens=need,
            reserved_nusd=nusd,
            rate=self._rate(contract, part),
            price=price,
            priority=CLASS_ORDER.index(ask.tenant_class),
            weight=contract.weight,
            queue_wait_ms=waited_ms,
            granted_wall_ns=wall_ns,
            config_digest=platform.digest,
        )
        self._hold(ask.tenant, grant)
        return grant

    def ended(self, request_id: str) -> bool:
        """Its place is free; what it took of tokens and money stays taken. False where it held none."""
        self._offers.pop(request_id, None)
        held = self._held.pop(request_id, None)
        if held is None:
            return False
        self._count(held, -1)
        return True

    # --- inside

    def _offer(
        self, ask: Ask, contract: Tenant, platform: Platform, reachable: Collection[str], waited_ms: float
    ) -> Offer | None:
        """The best offer at rung 0, if it is a full one."""
        assert self._lease is not None
        here = frozenset(
            (view.tier, view.version)
            for view in self._views.values()
            if view.max_num_seqs and view.replica_id in reachable
        )
        if self._basis is None or self._basis[0] is not platform or self._basis[1] != here:
            self._basis = platform, here
            self._offers.clear()
        if ask.deadline_ms is not None:  # then time counts, too
            return self._quote(ask, contract, platform, here, waited_ms)
        if ask.request_id in self._offers:
            offer = self._offers[ask.request_id]
        else:
            offer = self._quote(ask, contract, platform, here, 0.0)
            if len(self._offers) < self.waiting_max:
                self._offers[ask.request_id] = offer
        if offer is None or offer.kind is not OfferKind.MODEL:
            return offer
        return msgspec.structs.replace(offer, time_ms=offer.time_ms + waited_ms)

    def _quote(
        self, ask: Ask, contract: Tenant, platform: Platform, here: frozenset[tuple[str, str]], waited_ms: float
    ) -> Offer | None:
        assert self._lease is not None
        key = crc32((ask.session or ask.request_id).encode())
        views = []
        for tier in platform.tiers:
            known = self._lease.pools.get(tier.name)
            if known is not None and tier.kind is ask.kind:
                speed = (known.saturation, known.prefill_tokens_per_s, known.decode_ms_per_token)
                served = {version for name, version in here if name == tier.name}
                views.append(TierView(tier, pick_version(tier.versions, key, served), *speed, 0.0, bool(served)))
        found = quote(ask, contract, views, {}, platform.ladder, self._quality, {}, waited_ms=waited_ms)
        best = found.offers[0] if found.offers else None
        return best if best is not None and not best.degraded and not best.rung else None

    def _affords(self, tenant: str, part: TenantLease, need: int, nusd: int) -> bool:
        if self._requests[tenant] + 1 > part.requests or self._tokens[tenant] + need > part.tokens:
            return False
        return part.nusd is None or self._nusd[tenant] + nusd <= part.nusd

    def _place(
        self, ask: Ask, contract: Tenant, offer: Offer, tokens: int, reachable: Collection[str], part: TenantLease
    ) -> ReplicaView | None:
        """A reachable replica of the offered version with a leased place. No tenant takes more than its share of the
        places of a tier, so that a burst of one leaves the others some."""
        sequences = max(1, offer.best_of)
        views = [view for view in self._views.values() if (view.tier, view.version) == (offer.tier, offer.version)]
        slots = sum(view.max_num_seqs for view in views)
        cap = max(1, int(contract.isolation.in_flight_share_max * slots))
        taken = self._in_tier[(ask.tenant, offer.tier)]
        if self._places[ask.tenant] + 1 > part.places or (taken and taken + sequences > cap):
            return None
        size = contract.isolation.shard_replicas
        usable = views if size is None else shard_of(ask.tenant, views, size)
        need = Need(offer.version, sequences, tokens, ask.session, now_ns=0, stale_ns=0)
        return choose([view for view in usable if view.replica_id in reachable], need, factor=1.0)

    def _hold(self, tenant: str, grant: Grant) -> None:
        held = self._held[grant.request_id] = _Held(tenant, grant)
        self._count(held, 1)

    def _count(self, held: _Held, sign: int) -> None:
        self._places[held.tenant] += sign
        self._in_tier[(held.tenant, held.tier)] += sign * held.sequences
        view = self._views.get(held.replica_id)
        if view is not None:
            view.running += sign * held.sequences
            view.tokens += sign * held.tokens

    def _rate(self, contract: Tenant, part: TenantLease) -> RateInfo:
        """What is left of the lease: nobody here knows what is left of the quota."""
        quotas, name = contract.quotas, contract.name
        return RateInfo(
            limit_requests=quotas.requests_per_minute,
            remaining_requests=max(0, part.requests - self._requests[name]),
            limit_tokens=quotas.tokens_per_minute,
            remaining_tokens=max(0, part.tokens - self._tokens[name]),
        )
