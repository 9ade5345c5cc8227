"""All mutable state of the controller, in one place with one owner. Behaviour lives beside it: `admit.py` judges,
`dispatch.py` gives out capacity, `settle.py` closes the books, `ladder_walk.py` moves the rungs.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from rungway.contracts import LadderSpec, Platform, Price, Tenant
from rungway.control.crowd import Crowd
from rungway.control.effects import Effects
from rungway.control.flight import Flight
from rungway.control.pool import Pool
from rungway.control.tenant_state import TenantState
from rungway.messages import ReplicaInfo
from rungway.policies.ladder import clamped
from rungway.policies.offers import permitted
from rungway.policies.quality import QualityModel
from rungway.policies.reserve import OutputPredictor
from rungway.types import Ask, AttemptEnd, AuditEntry, Finish, Offer, OfferKind

FREE = Price(input=0, cached_input=0, output=0)


class Now(NamedTuple):
    """The time of one turn: monotonic for durations, wall for calendars and rows."""

    mono_ns: int
    wall_ns: int


@dataclass(slots=True)
class Orphan:
    """An engine-side end of a request that no gateway has claimed since this controller started; `teller` sent it."""

    end: AttemptEnd
    since_ns: int
    teller: str


@dataclass(slots=True)
class Stray:
    """A client's side of a request that this controller never saw; `teller` sent it."""

    finish: Finish
    since_ns: int
    teller: str


class Cell:
    """`settled` remembers the last requests whose row is written: request id -> delivered tokens per attempt.
    `thresholds`: what explanations show of the ladder, as JSON. `session_secret` goes to gateways with the directory; empty =
    nobody can sign in to the dashboard."""

    def __init__(self, platform: Platform, quality: QualityModel, now: Now) -> None:
        self.platform = platform
        self.quality = quality
        self.effects = Effects()
        self.predictor = OutputPredictor()
        self.tenants: dict[str, TenantState] = {}
        self.leaving: set[str] = set()  # of the tenants those that left the configuration, but still have work here
        self.pools: dict[str, Pool] = {}
        self.crowd = Crowd()
        self.flights: dict[str, Flight] = {}
        self.gateways: dict[str, None] = {}  # a set in order of arrival: what goes to all goes in one order
        self.replicas: dict[str, ReplicaInfo] = {}
        self.settled: OrderedDict[str, dict[int, int]] = OrderedDict()
        self.refused: OrderedDict[str, str] = (
            OrderedDict()
        )  # request id -> code, of those in `settled` that were refused
        self.orphans: dict[str, dict[int, Orphan]] = {}  # by request and try
        self.strays: OrderedDict[str, Stray] = OrderedDict()
        self.early: dict[str, tuple[Ask, int]] = {}  # Asks that wait for the first replicas, since when
        self.early_of: Counter[str] = Counter()  # how many of each tenant
        self.early_until_ns = 0
        self.leased: dict[str, tuple[int, object]] = {}  # gateway -> when its lease was sent, and what it rested on
        self.version = 0
        self.session_secret = b""
        self.adopt(platform, now)

    def adopt(self, platform: Platform, now: Now) -> None:
        """Take a validated configuration into force; usage so far is kept. New tiers need a restart."""
        self.platform = platform
        self.version += 1
        self._tiers: dict[str, frozenset[str]] = {}
        self._allowed: dict[str, dict[str, int]] = {}
        self.thresholds = msgspec.Raw(msgspec.json.encode(_thresholds(platform.ladder), order="sorted"))
        for contract in platform.tenants:
            state = self.tenants.get(contract.name)
            if state is None:
                self.tenants[contract.name] = TenantState(
                    contract, platform.controller, self.crowd, now.mono_ns, now.wall_ns
                )
            else:
                state.reload(contract, platform.controller, now.mono_ns, now.wall_ns)
        self.leaving = self.tenants.keys() - {contract.name for contract in platform.tenants}
        self.part()
        for tier in platform.tiers:
            if tier.name in self.pools:
                self.pools[tier.name].adopt(tier, platform.controller)
            else:
                self.pools[tier.name] = Pool(tier, platform.controller, self.crowd)
            for contract in platform.tenants:
                self.pools[tier.name].queue.set_weight(contract.name, contract.weight)
        for pool in self.pools.values():
            pool.scopes = {scope: clamped(state, platform.ladder) for scope, state in pool.scopes.items()}
        self.crowd.renew()

    def part(self) -> None:
        """Let those go who left the configuration and have nothing here any more."""
        if not self.leaving:
            return
        for name in self.leaving - {flight.ask.tenant for flight in self.flights.values()}:
            self.leaving.discard(name)
            self.crowd.forget(self.tenants.pop(name))
            for pool in self.pools.values():
                pool.queue.forget(name)

    def tiers_of(self, contract: Tenant) -> frozenset[str]:
        """Tiers that a tenant may be served by: those that its models, aliases resolved, lead to."""
        tiers = self._tiers.get(contract.name)
        if tiers is None:
            aliases = {alias.name: alias.tiers for alias in self.platform.models}
            tiers = frozenset(tier for model in contract.models for tier in aliases.get(model, (model,)))
            self._tiers[contract.name] = tiers
        return tiers

    def rungs_of(self, contract: Tenant) -> dict[str, int]:
        """Rungs that may touch a tenant (`offers.permitted`)."""
        allowed = self._allowed.get(contract.name)
        if allowed is None:
            allowed = self._allowed[contract.name] = permitted(contract, self.platform.ladder)
        return allowed

    def price_of(self, offer: Offer) -> Price:
        """The served tier's price; a cached answer or a template costs nothing."""
        return self.pools[offer.tier].tier.price if offer.kind is OfferKind.MODEL else FREE

    def remember(self, request_id: str, delivered: dict[int, int], refused: str = "") -> None:
        """Its row is written. `refused`: the code, if it was."""
        self.settled[request_id] = delivered
        if len(self.settled) > self.platform.controller.settled_memory:
            self.settled.popitem(last=False)
        if refused:
            self.refused[request_id] = refused
            if len(self.refused) > self.platform.controller.settled_memory:
                self.refused.popitem(last=False)

    def audit(
        self, kind: str, now: Now, *, tenant: str = "", request_id: str = "", rung: int = 0, **detail: object
    ) -> None:
        """Append to the hash chain with this turn's commit."""
        text = msgspec.json.encode(detail, order="sorted").decode()
        self.effects.audit.append(
            AuditEntry(wall_ns=now.wall_ns, kind=kind, tenant=tenant, request_id=request_id, rung=rung, detail=text)
        )


def _thresholds(spec: LadderSpec) -> dict[str, object]:
    """What the explanation of a decision shows of the ladder; `names` in the order of the rungs."""
    return {
        "names": [rung.name for rung in spec.rungs],
        "enter": {rung.name: rung.enter for rung in spec.rungs},
        "leave": spec.leave,
        "ladder": spec.digest,
    }
