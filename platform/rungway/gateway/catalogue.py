"""The configuration in force, compiled for a gateway: key ring, what each tenant may ask for, and cache epochs.

Made anew from every `Directory`; never changed in place, so that a request keeps the catalogue it began with.
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple

import msgspec

from rungway.contracts import Platform, Tenant, TierKind, Version
from rungway.gateway.identify import KeyRing

_ENCODER = msgspec.json.Encoder(order="sorted")


class Plan(NamedTuple):
    """What one tenant gets when it asks for one model. `candidates` are `tiers` plus the lower tiers that the ladder
    may use; both from the most to the least capable tier that was declared for the name."""

    model: str
    tiers: tuple[str, ...]
    candidates: tuple[str, ...]
    may_trim: bool


class Catalogue:
    """`version` counts the controller's reloads. Lookups only; nothing here waits."""

    def __init__(self, version: int, platform: Platform) -> None:
        self.version = version
        self.platform = platform
        self.gateway = platform.gateway
        self.ladder = platform.ladder
        self.keys = KeyRing(platform.tenants)
        self.tenants = {tenant.name: tenant for tenant in platform.tenants}
        self.tiers = {tier.name: tier for tier in platform.tiers}
        self.versions: dict[tuple[str, str], Version] = {(v.tier, v.name): v for v in platform.versions()}
        self.aliases: dict[str, tuple[str, ...]] = {tier.name: (tier.name,) for tier in platform.tiers}
        self.aliases.update({alias.name: alias.tiers for alias in platform.models})
        self.context_max = {
            tier.name: max((version.max_context for version in tier.versions), default=0) for tier in platform.tiers
        }
        self.context_min = {tier.name: min(version.max_context for version in tier.versions) for tier in platform.tiers}
        self.embed_tokens_max = {
            tier.name: min(version.embed_tokens_max for version in tier.versions) for tier in platform.tiers
        }
        shared = _ENCODER.encode([platform.tiers, platform.models, platform.ladder])
        self.epochs = {tenant.name: _epoch(shared, tenant) for tenant in platform.tenants}
        self._plans = {
            (tenant.name, model): self._plan(tenant, model)
            for tenant in platform.tenants
            for model in tenant.models
            if model in self.aliases
        }

    def plan(self, tenant: Tenant, model: str) -> Plan | None:
        """None when the tenant may not ask for `model` (or there is no such model)."""
        return self._plans.get((tenant.name, model))

    def exists(self, model: str) -> bool:
        return model in self.aliases

    def models_of(self, tenant: Tenant) -> list[str]:
        return [model for model in tenant.models if model in self.aliases]

    def required_tiers(self) -> set[str]:
        """Tiers that must have a replica before this gateway calls itself ready."""
        return {v.tier for v in self.versions.values() if v.replicas_min > 0}

    def _plan(self, tenant: Tenant, model: str) -> Plan:
        tiers = self.aliases[model]
        if self.tiers[tiers[0]].kind is TierKind.EMBEDDING:
            return Plan(model, tiers, tiers, may_trim=False)
        rung_at = {rung.name: rung.index for rung in self.ladder.rungs}
        deepest = rung_at.get(tenant.ladder.floor, len(rung_at))

        def allowed(rung: str) -> bool:
            return rung not in tenant.ladder.opt_out and rung_at.get(rung, len(rung_at)) <= deepest

        lower: list[str] = []
        if allowed("small_tier"):
            top = max(self.tiers[name].rank for name in tiers)
            reachable = {tier for name in self.models_of(tenant) for tier in self.aliases[name]}
            lower = [
                t.name
                for t in self.platform.tiers
                if t.kind is TierKind.TEXT and t.rank < top and t.name in reachable and t.name not in tiers
            ]
        return Plan(model, tiers, tiers + tuple(lower), allowed("context_trim"))


def _epoch(shared: bytes, tenant: Tenant) -> str:
    """Changes whenever something changes that may change this tenant's answers; keys do not."""
    terms = _ENCODER.encode(msgspec.structs.replace(tenant, keys=()))
    return hashlib.sha256(shared + b"\0" + terms).hexdigest()[:16]
