"""A small random world per seed: platform, tenants, workload. What `rungway simulate --seed N` runs without a trace."""

from __future__ import annotations

from functools import cache
from random import Random
from typing import Any

import msgspec

from rungway.contracts import (
    Budget,
    CacheTerms,
    ChannelSpec,
    ControllerSpec,
    FakeSpec,
    GatewaySpec,
    Isolation,
    LadderSpec,
    LadderTerms,
    ModelAlias,
    Platform,
    Price,
    Quotas,
    RungSpec,
    Slo,
    Tenant,
    TenantClass,
    Tier,
    Version,
)
from rungway.leases import LeaseSpec
from rungway.overload import Ramp, ShedSpec
from rungway.policies.quality import QualityModel, load_default
from rungway.simulate.faults import FaultKind, plan
from rungway.simulate.workload import Arrival, Stream, arrivals
from rungway.simulate.world import World
from rungway.types import Action

RUNGS = (
    ("full", 0.0),
    ("rerank_off", 0.9),
    ("best_of_1", 0.95),
    ("context_trim", 1.0),
    ("small_tier", 1.1),
    ("cached_answer", 2.0),
    ("template", 4.0),
    ("defer", 8.0),
)
LADDER = LadderSpec(
    rungs=tuple(RungSpec(index=index, name=name, enter=enter) for index, (name, enter) in enumerate(RUNGS)),
    context_limit_tokens=256,
    dwell_up_s=2.0,
    dwell_down_s=5.0,
)
TIGHT = ShedSpec(
    target_factor=1.0,
    interactive=Ramp(begin=0.8, full=1.2),
    standard=Ramp(begin=0.7, full=1.1),
    batch=Ramp(begin=0.6, full=1.0),
)
SMALL = Price(input=1_000_000, cached_input=200_000, output=2_000_000)
LARGE = Price(input=10_000_000, cached_input=2_000_000, output=20_000_000)


@cache
def quality() -> QualityModel:
    """The shipped model, read once: hundreds of worlds use it."""
    return load_default()


def tenant(name: str, **changes: Any) -> Tenant:
    """An interactive tenant without limits."""
    base = Tenant(
        name=name,
        plan="sim",
        keys=(),
        tenant_class=TenantClass.INTERACTIVE,
        weight=1.0,
        models=("auto", "small", "large"),
        value_nusd={"interactive": 20_000_000, "standard": 5_000_000, "batch": 500_000},
        quotas=Quotas(requests_per_minute=None, tokens_per_minute=None, concurrent_requests=None, queue_max=10_000),
        isolation=Isolation(in_flight_share_max=1.0),
        budget=Budget(nusd=None),
        slo=Slo(ttft_ms_p99=1000, tpot_ms_p99=100, availability=0.999),
        ladder=LadderTerms(),
        cache=CacheTerms(),
    )
    return msgspec.structs.replace(base, **changes)


def version(tier: str, **changes: Any) -> Version:
    """A fake engine of 8 slots at 20 ms a step."""
    base = Version(
        name="sim",
        tier=tier,
        model="",
        backend="fake",
        replicas_min=2,
        replicas_max=4,
        replica_cost_nusd_per_hour=600_000_000,
        max_num_seqs=8,
        max_context=4096,
        fake=FakeSpec(prefill_ms_per_1k=40.0, ttft_ms=5.0, tpot_ms=20.0, kv_blocks=1024),
    )
    return msgspec.structs.replace(base, **changes)


def platform(*tenants: Tenant, tiers: tuple[Tier, ...] | None = None, **spec: Any) -> Platform:
    """Two tiers on two replicas each. `spec`: changes of the controller's settings."""
    both = (
        Tier(name="small", rank=0, price=SMALL, versions=(version("small"),)),
        Tier(name="large", rank=1, price=LARGE, versions=(version("large"),)),
    )
    chosen = both if tiers is None else tiers
    return Platform(
        cell="sim",
        host="127.0.0.1",
        port=0,
        state_dir="",
        tenants_dir="",
        database="sqlite",
        gateway=GatewaySpec(replicas=2),
        controller=msgspec.structs.replace(ControllerSpec(), **spec),
        channel=ChannelSpec(),
        tiers=chosen,
        models=(ModelAlias(name="auto", tiers=tuple(tier.name for tier in chosen)),),
        ladder=LADDER,
        tenants=tenants,
        digest="sim",
    )


def random_tenant(name: str, rng: Random) -> Tenant:
    """A contract with some limits and some terms, drawn."""
    return tenant(
        name,
        tenant_class=rng.choice(tuple(TenantClass)),
        weight=float(rng.choice((1, 1, 2, 3, 5))),
        quotas=Quotas(
            requests_per_minute=rng.choice((None, 60, 300)),
            tokens_per_minute=rng.choice((None, 20_000, 200_000)),
            concurrent_requests=rng.choice((None, 2, 8)),
            queue_max=rng.choice((5, 50, 500)),
        ),
        isolation=Isolation(
            in_flight_share_max=rng.choice((0.25, 0.5, 1.0)), reserved_share=rng.choice((0.0, 0.0, 0.2))
        ),
        budget=Budget(
            nusd=rng.choice((None, None, 20_000_000, 300_000_000)),
            per="day",
            at_limit=rng.choice(("degrade", "refuse")),
        ),
        ladder=LadderTerms(floor=rng.choice(("defer", "small_tier")), opt_out=rng.choice(((), ("context_trim",)))),
        risk_high_tier_min=rng.choice((None, "large")),
    )


def random_world(seed: int, kinds: dict[FaultKind, float], duration_s: float) -> World:
    """Build and play one seed to its end; `world.watch.broken` says what did not hold."""
    rng = Random(seed)
    tenants = [random_tenant(f"t{number}", rng) for number in range(rng.randint(2, 6))]
    spec: dict[str, Any] = {
        "queue_timeout_s": rng.choice((3.0, 10.0)),
        "orphan_wait_s": 3.0,
        "lost_wait_s": 6.0,
        "in_flight_factor": rng.choice((1.0, 1.1)),
        "lease": LeaseSpec(ttl_s=3.0 if seed % 4 == 0 else 30.0, share=0.5),
    }
    if seed % 3 == 0:  # without a draw: a seed keeps its workload
        spec["shed"] = TIGHT
    world = World(platform(*tenants, **spec), seed=seed, tries_max=rng.choice((1, 3)), backoff_s=0.2, quality=quality())
    load = rng.choice((0.5, 1.0, 3.0))
    streams = [_stream(each, load * 16.0 / len(tenants), duration_s, rng) for each in tenants]
    wanted = [_spiced(arrival, rng) for arrival in arrivals(streams, rng)]
    world.play(wanted, plan(kinds, duration_s, rng))
    return world


def _stream(contract: Tenant, per_s: float, duration_s: float, rng: Random) -> Stream:
    return Stream(
        contract.name,
        per_s * rng.choice((0.3, 1.0, 1.7)),
        input_tokens=rng.choice(((10, 100), (200, 1500))),
        output_tokens=rng.choice(((1, 20), (20, 120))),
        end_s=duration_s,
        risk_high_share=rng.choice((0.0, 0.3)),
        deadline_ms=rng.choice((None, None, 4000.0)),
        cancel_share=rng.choice((0.0, 0.2)),
        model=rng.choice(contract.models),
    )


def _spiced(arrival: Arrival, rng: Random) -> Arrival:
    action = rng.choice((Action.READ, Action.READ, Action.PURE, Action.NON_IDEMPOTENT_WRITE))
    bound = None if rng.random() < 0.2 else max(1, arrival.output_tokens + rng.choice((-5, 0, 40)))
    return Arrival(
        arrival.at_s,
        arrival.tenant,
        arrival.input_tokens,
        arrival.output_tokens,
        bound,
        risk=arrival.risk,
        action=action,
        model=arrival.model,
        deadline_ms=arrival.deadline_ms,
        leaves_ms=arrival.leaves_ms,
        session=f"s{rng.randrange(20)}" if rng.random() < 0.3 else None,
    )
