"""From validated files to the frozen contracts that everything else reads."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from rungway import contracts
from rungway.settings.effective import ladder_digest, rungway_digest
from rungway.settings.schema import LadderFile, PlatformFile
from rungway.settings.schema_tenant import KeyEntry, TenantFile
from rungway.settings.schema_tiers import Tier, Version


def build_platform(
    shape: PlatformFile,
    ladder: LadderFile,
    tenants: tuple[contracts.Tenant, ...],
    base: Path,
    *,
    state_dir: Path | None,
) -> contracts.Platform:
    """`base` is the folder of the platform file: relative paths in it start there. `state_dir` overrides the file's."""
    platform = contracts.Platform(
        cell=shape.cell,
        host=shape.listen.host,
        port=shape.listen.port,
        state_dir=str((state_dir or base / Path(shape.state_dir).expanduser()).resolve()),
        tenants_dir=str((base / Path(shape.tenants_dir).expanduser()).resolve()),
        database=shape.database,
        gateway=contracts.GatewaySpec(**shape.gateway.model_dump()),
        controller=_controller(shape.controller.model_dump()),
        channel=contracts.ChannelSpec(**shape.channel.model_dump()),
        tiers=build_tiers(shape.tiers, base),
        models=build_models(shape),
        ladder=build_ladder(ladder),
        tenants=tenants,
        demo_keys=shape.demo_keys,
    )
    return msgspec.structs.replace(platform, digest=rungway_digest(platform))


def _controller(values: dict[str, Any]) -> contracts.ControllerSpec:
    """`values`: the section as plain data; its parts become what contracts hold."""
    return msgspec.convert(values, contracts.ControllerSpec)


def build_tiers(tiers: Mapping[str, Tier], base: Path) -> tuple[contracts.Tier, ...]:
    """Smallest first, ranks 0, 1, ...: by the declared rank, or by output price, then input price, then place. Tiers for
    embeddings come last, with rank 0."""
    texts = {name: tier for name, tier in tiers.items() if tier.kind == contracts.TierKind.TEXT}
    declared = any(tier.rank is not None for tier in texts.values())

    def size(item: tuple[str, Tier]) -> tuple[int, int]:
        price = item[1].price_usd_per_1k
        return (item[1].rank or 0, 0) if declared else (price.output, price.input)

    ranked = [(rank, name) for rank, (name, _) in enumerate(sorted(texts.items(), key=size))]
    ranked += [(0, name) for name in tiers if name not in texts]
    return tuple(build_tier(name, rank, tiers[name], base) for rank, name in ranked)


def build_tier(name: str, rank: int, tier: Tier, base: Path) -> contracts.Tier:
    versions = (build_version(name, key, version, base) for key, version in tier.versions.items())
    return contracts.Tier(
        name=name,
        rank=rank,
        price=contracts.Price(**tier.price_usd_per_1k.model_dump()),
        versions=tuple(msgspec.structs.replace(version, kind=tier.kind) for version in versions),
        kind=tier.kind,
    )


def build_version(tier: str, name: str, version: Version, base: Path) -> contracts.Version:
    values = version.model_dump(exclude={"replicas", "replica_cost_usd_per_hour", "fake", "model", "speculative"})
    fake = contracts.FakeSpec(**version.fake.model_dump()) if version.fake else None
    if version.backend == "fake" and fake is None:
        fake = contracts.FakeSpec()
    speculative = contracts.Speculative(**version.speculative.model_dump())
    if speculative.model:
        speculative = msgspec.structs.replace(speculative, model=_located(speculative.model, base))
    return contracts.Version(
        name=name,
        tier=tier,
        model=_located(version.model, base),
        speculative=speculative,
        replicas_min=version.replicas.min,
        replicas_max=version.replicas.max,
        replica_cost_nusd_per_hour=version.replica_cost_usd_per_hour,
        fake=fake,
        **values,
    )


def _located(source: str, base: Path) -> str:
    if not source.startswith("path:"):
        return source
    return f"path:{(base / Path(source.removeprefix('path:')).expanduser()).resolve()}"


def alias_target(models: Mapping[str, str], name: str) -> str | None:
    """Follows `alias` from `name` (`models` holds alias -> target) to a name that is no alias. None: it is a circle."""
    seen = {name}
    while name in models:
        name = models[name]
        if name in seen:
            return None
        seen.add(name)
    return name


def build_models(shape: PlatformFile) -> tuple[contracts.ModelAlias, ...]:
    """Tier names first, then the declared models; aliases come out with the tiers of what they stand for."""
    aliases = {name: model.alias for name, model in shape.models.items() if model.alias}
    tiers = {name: (name,) for name in shape.tiers} | {
        name: model.tiers for name, model in shape.models.items() if model.tiers
    }
    names = [*shape.tiers, *shape.models]
    return tuple(contracts.ModelAlias(name=name, tiers=tiers[alias_target(aliases, name) or name]) for name in names)


def allowed_models(shape: PlatformFile, allowed: tuple[str, ...] | None) -> tuple[str, ...]:
    """The listed names and every alias of them, in the platform's order; None = all."""
    aliases = {name: model.alias for name, model in shape.models.items() if model.alias}
    names = [*shape.tiers, *shape.models]
    if allowed is None:
        return tuple(names)
    grown = set(allowed)
    for _ in aliases:  # an alias of an alias needs another round; at most one per alias
        grown |= {name for name, target in aliases.items() if target in grown}
    return tuple(name for name in names if name in grown)


def build_ladder(ladder: LadderFile) -> contracts.LadderSpec:
    rungs = tuple(
        contracts.RungSpec(index=index, name=rung.name, enter=rung.enter) for index, rung in enumerate(ladder.rungs)
    )
    spec = contracts.LadderSpec(rungs=rungs, **ladder.model_dump(exclude={"rungs"}))
    return msgspec.structs.replace(spec, digest=ladder_digest(spec))


def build_key(entry: KeyEntry) -> contracts.ApiKey:
    return contracts.ApiKey(
        id=entry.id, sha256=entry.sha256, expires_ns=entry.expires, scopes=entry.scopes, revoked=entry.revoked
    )


def build_tenant(
    tenant: TenantFile, keys: tuple[contracts.ApiKey, ...], models: tuple[str, ...], ladder: LadderFile
) -> contracts.Tenant:
    """`tenant` is already merged with its plan; `models` is what it may ask for."""
    return contracts.Tenant(
        name=tenant.tenant,
        plan=tenant.plan,
        keys=keys,
        tenant_class=tenant.tenant_class,
        weight=tenant.weight,
        models=models,
        value_nusd=tenant.value_usd.model_dump(),
        quotas=contracts.Quotas(**tenant.quotas.model_dump()),
        isolation=contracts.Isolation(**tenant.isolation.model_dump()),
        budget=contracts.Budget(
            nusd=tenant.budget.usd,
            per=tenant.budget.per,
            timezone=tenant.budget.timezone,
            at_limit=tenant.budget.at_limit,
        ),
        slo=contracts.Slo(**tenant.slo.model_dump()),
        ladder=contracts.LadderTerms(floor=tenant.ladder.floor or ladder.rungs[-1].name, opt_out=tenant.ladder.opt_out),
        cache=contracts.CacheTerms(**tenant.cache.model_dump()),
        risk_high_tier_min=tenant.risk.high.tier_min,
        suspended=tenant.suspended,
        template=tenant.template,
    )
