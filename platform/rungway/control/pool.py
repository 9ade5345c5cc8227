"""One tier's pool: its queue, its replicas' capacity, what it has learned about its speed, and its ladder scopes.

The ladder is scoped by (class, side). `side` is "over" for tenants that hold more of the pool than their weight entitles
them to, "within" for the rest: the tenant that causes the pressure walks down first, its neighbours only when their
own requests suffer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection

from rungway.clock import NS_PER_S
from rungway.contracts import ControllerSpec, TenantClass, Tier, Version
from rungway.control.crowd import Crowd
from rungway.control.flight import Flight
from rungway.control.holdings import Holdings
from rungway.control.pace import BlockSums, Pace
from rungway.control.tenant_state import TenantState
from rungway.engine.protocol import EngineStats
from rungway.messages import ReplicaInfo
from rungway.policies.breaker import Breaker, State
from rungway.policies.fairness import FairQueue
from rungway.policies.ladder import LadderState
from rungway.policies.locality import Warmth
from rungway.policies.offers import TierView
from rungway.policies.placement import Need, ReplicaView
from rungway.policies.prefixes import HeldPrefixes, free_bit
from rungway.policies.reclaim import Claim
from rungway.policies.roster import Roster
from rungway.policies.shard import shard_of
from rungway.policies.versions import pick_version

SIDES = ("over", "within")
Scope = tuple[str, str]  # (tenant class, side)

SLO_SAMPLES = 64
# Minimum shares may add up to 1: even then a band that is served at all is served this much.
SHARE_LEFT_MIN = 0.05


class Pool(Holdings):
    """State of one tier: what tenants hold of it, its replicas, and what it has learned."""

    __slots__ = (
        "blocks",
        "breakers",
        "claims",
        "ever_ready",
        "kv_use",
        "pace",
        "prefixes",
        "pressures",
        "queue",
        "scopes",
        "shards",
        "slo_misses",
        "spec",
        "stats",
        "tier",
        "troubled",
        "where",
    )

    def __init__(self, tier: Tier, spec: ControllerSpec, crowd: Crowd) -> None:
        super().__init__(tier.name, Roster(spec.in_flight_factor), crowd)
        self.tier = tier
        self.spec = spec
        self.queue = FairQueue(spec.class_shares, spec.shed.late_turn, spec.shed.late_quantum_tokens)
        self.claims: dict[str, Claim] = {}  # by the request that waits
        self.stats: dict[str, EngineStats] = {}
        self.prefixes: dict[str, HeldPrefixes] = {}
        self.where: dict[int, int] = {}  # prefix key -> bits of the replicas that hold it
        self.shards: dict[tuple[str, str], frozenset[str]] = {}  # (tenant, version): its replicas, as far as asked for
        self.breakers: dict[str, Breaker] = {}
        self.troubled: dict[str, Breaker] = {}  # of the breakers those that are not closed
        self.pace = Pace()
        self.scopes: dict[Scope, LadderState] = {
            (tenant_class, side): LadderState() for tenant_class in TenantClass for side in SIDES
        }
        self.pressures: dict[Scope, tuple[float, str]] = {}
        self.kv_use = 0.0
        self.blocks = BlockSums()
        self.slo_misses: dict[str, deque[bool]] = {}
        self.ever_ready = False

    def adopt(self, tier: Tier, spec: ControllerSpec) -> None:
        """A reload: new terms for the same replicas and queue."""
        self.tier, self.spec = tier, spec
        self.shards.clear()  # their sizes are in the contracts
        for breaker in self.breakers.values():
            breaker.adopt(spec.breaker_failures, spec.breaker_open_s)
        self.queue.set_shares(spec.class_shares)
        self.queue.set_late(spec.shed.late_turn, spec.shed.late_quantum_tokens)
        self.roster.stretch(spec.in_flight_factor)

    # -- replicas ---------------------------------------------------------------------------------------------

    @property
    def views(self) -> dict[str, ReplicaView]:
        """Its replicas by id, to read."""
        return self.roster.views

    def add(self, info: ReplicaInfo, now_ns: int) -> ReplicaView:
        """A replica said hello. A known one keeps what was granted to it."""
        view = self.views.get(info.replica_id)
        if view is None:
            view = ReplicaView(info.replica_id, info.tier, info.version, info.max_num_seqs, info.kv_tokens)
            held = self.prefixes[info.replica_id] = HeldPrefixes(self.where, free_bit(self.prefixes.values()))
            view.bit = held.bit
            self.roster.add(view)
            self.breakers[info.replica_id] = Breaker(self.spec.breaker_failures, self.spec.breaker_open_s)
        view.reported_ns = now_ns
        self.roster.drain(view, info.state == "draining")
        self.shards.clear()
        self.ever_ready = True
        return view

    def drop(self, replica_id: str) -> None:
        self.roster.drop(replica_id)
        self.blocks.moved(self.stats.pop(replica_id, None), None)
        if (held := self.prefixes.pop(replica_id, None)) is not None:
            held.clear()
        self.breakers.pop(replica_id, None)
        self.troubled.pop(replica_id, None)
        self.shards.clear()

    def report(self, replica_id: str, stats: EngineStats, draining: bool, now_ns: int) -> None:
        view = self.views.get(replica_id)
        if view is None:
            return
        view.reported_ns = now_ns
        if self.roster.drain(view, draining):
            self.shards.clear()
        self.kv_use = self.blocks.moved(self.stats.get(replica_id), stats)
        self.stats[replica_id] = stats
        self.pace.reported(stats)

    def ready(self, now_ns: int) -> list[ReplicaView]:
        """Replicas that may get new work: reporting, not draining."""
        return [v for v in self.views.values() if not v.draining and now_ns - v.reported_ns <= self.stale_ns]

    @property
    def stale_ns(self) -> int:
        """A replica silent for longer is full."""
        return int(self.spec.replica_stale_s * NS_PER_S)

    def failed(self, replica_id: str, now_ns: int) -> None:
        """A try broke there by its own fault."""
        breaker = self.breakers.get(replica_id)
        if breaker is not None:
            breaker.record(False, now_ns)
            self.troubled[replica_id] = breaker

    def _look_at_breakers(self, now_ns: int) -> None:
        for replica_id, breaker in list(self.troubled.items()):
            self.views[replica_id].breaker_open = not breaker.ready(now_ns)
            if breaker.state is State.CLOSED:
                del self.troubled[replica_id]

    def shard(self, flight: Flight) -> frozenset[str] | None:
        """The replicas of the offered version that the tenant uses; None where it uses all."""
        size = flight.state.contract.isolation.shard_replicas
        assert flight.offer is not None
        version = flight.offer.version
        if size is None:
            return None
        key = (flight.ask.tenant, version)
        if key not in self.shards:
            views = [view for view in self.views.values() if view.version == version and not view.draining]
            self.shards[key] = frozenset(view.replica_id for view in shard_of(flight.ask.tenant, views, size))
        return self.shards[key]

    def place(
        self,
        flight: Flight,
        sequences: int,
        tokens: int,
        now_ns: int,
        *,
        kept: Collection[str] = (),
        warmth: Warmth | None = None,
    ) -> ReplicaView | None:
        """A replica of the offered version with room, or None. `kept` ones are for somebody who is before this one."""
        assert flight.offer is not None
        self._look_at_breakers(now_ns)
        need = Need(
            version=flight.offer.version,
            sequences=sequences,
            tokens=tokens,
            session=flight.ask.session,
            now_ns=now_ns,
            stale_ns=self.stale_ns,
            avoid=flight.avoid,
            kept=kept,
            only=self.shard(flight),
            warmth=warmth,
            imbalance=self.spec.locality_imbalance_max,
        )
        return self.roster.place(need)

    def candidates(self, flight: Flight, now_ns: int) -> list[ReplicaView]:
        """The replicas that could serve it if they had room."""
        assert flight.offer is not None
        shard, version = self.shard(flight), flight.offer.version
        views = [v for v in self.ready(now_ns) if v.version == version and not v.breaker_open]
        return [v for v in views if v.replica_id not in flight.avoid and (shard is None or v.replica_id in shard)]

    # -- what policies see ------------------------------------------------------------------------------------

    def note_slo(self, tenant_class: str, met: bool) -> None:
        self.slo_misses.setdefault(tenant_class, deque(maxlen=SLO_SAMPLES)).append(not met)

    def slo_burn(self, tenant_class: str) -> float:
        """Share of the last answers of a class that missed their targets; 0 until there are enough of them."""
        misses = self.slo_misses.get(tenant_class, ())
        return sum(misses) / len(misses) if len(misses) >= SLO_SAMPLES // 2 else 0.0

    def pick_version(self, key: int) -> Version:
        """Weighted choice among the tier's versions that have replicas, by a stable key: a session keeps its version."""
        return pick_version(self.tier.versions, key, self.roster.served())

    def strands(self, flight: Flight) -> bool:
        """Its version has no replica any more, and another one of the tier does."""
        served = self.roster.served()
        return bool(served) and flight.offer is not None and flight.offer.version not in served

    def retry_after_s(self, now_ns: int) -> int:
        """Seconds in which what waits here now will probably have been dispatched."""
        return self.pace.drain.retry_after_s(self.queued_tokens, now_ns)

    def expected_wait_s(self, state: TenantState, band: int, now_ns: int, *, late: bool = False) -> float:
        """Until a new Ask of this tenant and class would leave the queue, if it is on time, or as a `late` one. Ahead of it are the higher bands, what its own
        tenant has waiting, and meanwhile of each other tenant in the band as much as its weight entitles it to; lower
        bands take their minimum shares. So a neighbour's long queue, or a lower class's, does not make a short one look
        long."""
        rivals = self.queue.rival_weight(state.contract.name, band) / state.contract.weight
        ahead = self.ahead(state, band, rivals, late=late)
        left = max(SHARE_LEFT_MIN, 1.0 - self.queue.claimed_below(band))
        return self.pace.wait_s(ahead, (ahead + sum(self.queued_bands[:band])) / left, band, now_ns)

    def idle_view(self, version: Version) -> TierView:
        """For an Ask that this tier cannot serve: it only counts with its rank."""
        most, pace = self.roster.most(version.name), self.pace
        kv_tokens = None if most is None else most[1]
        return TierView(
            self.tier, version, 0.0, pace.prefill_rate, pace.decode_ms, 0.0, up=bool(self.views), kv_tokens=kv_tokens
        )

    def tier_view(self, version: Version, wait_s: float) -> TierView:
        """`wait_s`: expected for the Ask that looks."""
        return self.idle_view(version)._replace(saturation=self.saturation(), queue_wait_ms=1000.0 * wait_s)
