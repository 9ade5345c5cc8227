"""From what a person asks for to a played world: a trace under a configuration, or a random world from a seed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import msgspec

from rungway.contracts import Platform, Tenant, TierKind, Version
from rungway.simulate.crowd import Crowd
from rungway.simulate.errors import SimulationError
from rungway.simulate.faults import FaultKind, plan
from rungway.simulate.traces import read_trace
from rungway.simulate.workload import Arrival, speed_up
from rungway.simulate.world import World


@dataclass(frozen=True, slots=True)
class Wish:
    """`speed` compresses the trace's time; `start_s` and `duration_s` cut a piece of it (duration after compression)."""

    seed: int = 0
    speed: float = 1.0
    start_s: float = 0.0
    duration_s: float | None = None
    faults: dict[FaultKind, float] = field(default_factory=dict)
    costs: dict[str, str] = field(default_factory=dict)
    replicas: int | None = None
    tries_max: int = 1
    context: int | None = None
    like: str | None = None
    report_ms: float = 100.0
    deadline: bool = False
    crowd: Crowd | None = None


def play_trace(platform: Platform, trace: Path, wish: Wish) -> World:
    """Raises SimulationError for what cannot be played."""
    rng = Random(wish.seed)
    own_s = None if wish.duration_s is None else wish.duration_s * wish.speed
    piece = read_trace(trace, rng, start_s=wish.start_s, duration_s=own_s, crowd=wish.crowd)
    found = speed_up(piece, wish.speed, wish.duration_s)
    if not found:
        raise SimulationError(f"{trace} has no requests between {wish.start_s:g} s and the end that was asked for")
    platform = for_tenants(text_only(platform), sorted({arrival.tenant for arrival in found}), wish.like)
    if wish.context is not None:
        platform = with_context(platform, wish.context)
    if wish.deadline:
        found = [_with_deadline(arrival, platform) for arrival in found]
    world = World(
        platform,
        seed=wish.seed,
        costs=wish.costs,
        replicas=wish.replicas,
        tries_max=wish.tries_max,
        report_ms=wish.report_ms,
    )
    world.play(found, plan(wish.faults, found[-1].at_s, rng))
    return world


def text_only(platform: Platform) -> Platform:
    """Without the tiers for embeddings: no trace asks for any, and their replicas would only cost."""
    tiers = tuple(tier for tier in platform.tiers if tier.kind is TierKind.TEXT)
    names = {tier.name for tier in tiers}
    models = tuple(alias for alias in platform.models if names.issuperset(alias.tiers))
    return msgspec.structs.replace(platform, tiers=tiers, models=models)


def for_tenants(platform: Platform, names: Sequence[str], like: str | None) -> Platform:
    """The platform with a contract for every tenant of the trace: its own if the configuration has one of that name, else
    a copy of a tenant of `like` (names with commas between, in turn; default: the first one that may use a model)."""
    able = {tenant.name: tenant for tenant in platform.tenants if tenant.models}
    if not able:
        raise SimulationError("no tenant of the configuration may use a model")
    models: list[Tenant] = []
    for one in [next(iter(able))] if like is None else like.split(","):
        if one not in able:
            raise SimulationError(f"there is no tenant {one!r} that may use a model ({', '.join(able)})")
        models.append(able[one])
    strangers = [name for name in names if platform.tenant(name) is None]
    made = {
        name: _copy_of(models[number % len(models)], name, -(-len(strangers) // len(models)))
        for number, name in enumerate(strangers)
    }
    tenants = [made.get(name) or platform.tenant(name) for name in names]
    return msgspec.structs.replace(platform, tenants=tuple(tenant for tenant in tenants if tenant is not None))


def _copy_of(model: Tenant, name: str, copies: int) -> Tenant:
    """Copies have what the model has, but share its reserve: nobody could keep a tenth of a pool for each of a thousand."""
    isolation = msgspec.structs.replace(model.isolation, reserved_share=model.isolation.reserved_share / copies)
    return msgspec.structs.replace(model, name=name, keys=(), isolation=isolation)


def with_context(platform: Platform, tokens: int) -> Platform:
    """Every version with room for prompts of that length, and a KV cache that holds a full batch of average ones."""

    def widened(version: Version) -> Version:
        blocks = max(version.kv_blocks or 0, tokens * 4 // version.block_tokens)
        return msgspec.structs.replace(version, max_context=tokens, kv_blocks=blocks)

    tiers = tuple(
        msgspec.structs.replace(tier, versions=tuple(widened(version) for version in tier.versions))
        for tier in platform.tiers
    )
    return msgspec.structs.replace(platform, tiers=tiers)


def _with_deadline(arrival: Arrival, platform: Platform) -> Arrival:
    """A client that does not want what comes later than its contract promises: the target of the first token, and of
    every further one."""
    contract = platform.tenant(arrival.tenant)
    assert contract is not None
    limit_ms = contract.slo.ttft_ms_p99 + contract.slo.tpot_ms_p99 * arrival.output_tokens
    return Arrival(
        arrival.at_s,
        arrival.tenant,
        arrival.input_tokens,
        arrival.output_tokens,
        arrival.output_bound,
        deadline_ms=limit_ms,
        blocks=arrival.blocks,
    )
