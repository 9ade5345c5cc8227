"""The configuration in force, in the shape of the files, and the digests that name it.

Every default is filled in, so that what an absent key means can be read here. Secrets are masked: key hashes to eight
characters, a database password to stars.
"""

from __future__ import annotations

import hashlib
import json
import re
from datetime import UTC, datetime
from typing import Any

import msgspec

from rungway.contracts import (
    NUSD_PER_USD,
    ApiKey,
    ControllerSpec,
    LadderSpec,
    Platform,
    Tenant,
    Tier,
    TierKind,
    Version,
)

# Where a cell runs is not what it decides: the same files give the same digest on every machine.
_PLACE = ("listen", "state_dir", "tenants_dir", "database", "digest")


def effective(platform: Platform) -> dict[str, Any]:
    """Every setting in force, as the YAML files would write it. Plain JSON values."""
    return {
        "cell": platform.cell,
        "listen": {"host": platform.host, "port": platform.port},
        "tenants_dir": platform.tenants_dir,
        "state_dir": platform.state_dir,
        "database": re.sub(r"(://[^:/@]*):[^@]*@", r"\1:***@", platform.database),
        "gateway": msgspec.to_builtins(platform.gateway),
        "controller": _controller(platform.controller),
        "channel": msgspec.to_builtins(platform.channel),
        "tiers": {tier.name: _tier(tier) for tier in platform.tiers},
        "models": {model.name: {"tiers": list(model.tiers)} for model in platform.models},
        "ladder": _ladder(platform.ladder),
        "tenants": {tenant.name: _tenant(tenant) for tenant in platform.tenants},
        "demo_keys": list(platform.demo_keys),
        "digest": platform.digest,
    }


def rungway_digest(platform: Platform) -> str:
    """SHA-256 (hex) over the effective values, without key hashes and without where the cell runs."""
    values = {name: value for name, value in effective(platform).items() if name not in _PLACE}
    for tenant in values["tenants"].values():
        for key in tenant["keys"]:
            del key["sha256"]
    return _sha256(values)


def ladder_digest(ladder: LadderSpec) -> str:
    """SHA-256 (hex) over the ladder's values."""
    values = _ladder(ladder)
    del values["digest"]
    return _sha256(values)


def _sha256(values: dict[str, Any]) -> str:
    text = json.dumps(values, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def _usd(nusd: int | None) -> float | str:
    return "unlimited" if nusd is None else nusd / NUSD_PER_USD


def _limit(value: int | None) -> int | str:
    return "unlimited" if value is None else value


def _controller(spec: ControllerSpec) -> dict[str, Any]:
    values: dict[str, Any] = msgspec.to_builtins(spec)
    values["preempt"]["at"] = values["preempt"]["at"] or "never"
    values["shed"]["target_factor"] = values["shed"]["target_factor"] or "never"
    return values


def _tier(tier: Tier) -> dict[str, Any]:
    price = {name: _usd(value) for name, value in msgspec.structs.asdict(tier.price).items()}
    return {
        "kind": tier.kind.value,
        **({"rank": tier.rank} if tier.kind is TierKind.TEXT else {}),
        "price_usd_per_1k": price,
        "versions": {version.name: _version(version) for version in tier.versions},
    }


def _version(version: Version) -> dict[str, Any]:
    values: dict[str, Any] = msgspec.to_builtins(version)
    for name in ("name", "tier", "kind"):
        del values[name]
    values["replicas"] = {"min": values.pop("replicas_min"), "max": values.pop("replicas_max")}
    values["replica_cost_usd_per_hour"] = _usd(values.pop("replica_cost_nusd_per_hour"))
    values["kv_blocks"] = "auto" if version.kv_blocks is None else version.kv_blocks
    values["long_prefill_tokens"] = "auto" if version.long_prefill_tokens is None else version.long_prefill_tokens
    values["kv_soft_quota"] = "off" if version.kv_soft_quota is None else version.kv_soft_quota
    if version.fake is None:
        del values["fake"]
    return values


def _ladder(ladder: LadderSpec) -> dict[str, Any]:
    values: dict[str, Any] = msgspec.to_builtins(ladder)
    values["rungs"] = [{"name": rung.name, "enter": rung.enter} for rung in ladder.rungs]
    return values


def _tenant(tenant: Tenant) -> dict[str, Any]:
    quotas = {name: _limit(value) for name, value in msgspec.structs.asdict(tenant.quotas).items()}
    budget: dict[str, Any] = msgspec.to_builtins(tenant.budget)
    del budget["nusd"]
    isolation: dict[str, Any] = msgspec.to_builtins(tenant.isolation)
    values: dict[str, Any] = {
        "plan": tenant.plan,
        "keys": [_key(key) for key in tenant.keys],
        "class": str(tenant.tenant_class),
        "weight": tenant.weight,
        "models": list(tenant.models),
        "value_usd": {name: _usd(value) for name, value in tenant.value_nusd.items()},
        "quotas": quotas,
        "isolation": {
            **isolation,
            "shard_replicas": isolation["shard_replicas"] or "all",
            "reclaim_s": isolation["reclaim_s"] or "never",
        },
        "budget": {"usd": _usd(tenant.budget.nusd), **budget},
        "slo": msgspec.to_builtins(tenant.slo),
        "ladder": msgspec.to_builtins(tenant.ladder),
        "cache": msgspec.to_builtins(tenant.cache),
        "risk": {"high": {"tier_min": tenant.risk_high_tier_min}} if tenant.risk_high_tier_min else {},
        "suspended": tenant.suspended,
    }
    return values | ({"template": tenant.template} if tenant.template else {})


def _key(key: ApiKey) -> dict[str, Any]:
    values: dict[str, Any] = {"id": key.id, "sha256": f"{key.sha256[:8]}...", "scopes": list(key.scopes)}
    if key.expires_ns is not None:
        moment = datetime.fromtimestamp(key.expires_ns // 1_000_000_000, UTC)
        values["expires"] = moment.isoformat().replace("+00:00", "Z")
    return values | {"revoked": key.revoked}
