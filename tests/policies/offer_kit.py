"""Builders of asks, tenants and tiers for the tests of offers, plain and at random."""

from __future__ import annotations

import random

import msgspec

from rungway.contracts import (
    Budget,
    CacheTerms,
    Isolation,
    LadderSpec,
    LadderTerms,
    Price,
    Quotas,
    RungSpec,
    Slo,
    Tenant,
    TenantClass,
    Tier,
    Version,
)
from rungway.policies.features import features
from rungway.policies.offers import TierView
from rungway.policies.quality import load_default
from rungway.types import Action, Ask

NAMES = (
    "full",
    "rerank_off",
    "best_of_1",
    "context_trim",
    "small_tier",
    "cached_answer",
    "template",
    "defer",
)
ENTERS = (0.0, 0.9, 0.95, 1.0, 1.1, 2.0, 4.0, 8.0)
LADDER = LadderSpec(
    rungs=tuple(RungSpec(index=k, name=name, enter=ENTERS[k]) for k, name in enumerate(NAMES)), context_limit_tokens=256
)
QUALITY = load_default()
FEATURES = features("How many apples are left when 3 of 10 are eaten? Explain why.", turns=1, max_tokens=64)
CHEAP = Price(input=200_000, cached_input=50_000, output=600_000)
DEAR = Price(input=1_000_000, cached_input=250_000, output=3_000_000)


def tier(name: str, rank: int, price: Price, max_context: int = 4096) -> Tier:
    version = Version(
        name=f"{name}-v1",
        tier=name,
        model="fake",
        backend="fake",
        replicas_min=1,
        replicas_max=1,
        replica_cost_nusd_per_hour=600_000_000,
        max_num_seqs=16,
        max_context=max_context,
    )
    return Tier(name=name, rank=rank, price=price, versions=(version,))


SMALL, LARGE = tier("small", 0, CHEAP), tier("large", 1, DEAR)
MEDIUM = tier("medium", 1, CHEAP)


def view(of: Tier, saturation: float = 0.0, wait_ms: float = 0.0, up: bool = True, decode_ms: float = 20.0) -> TierView:
    return TierView(of, of.versions[0], saturation, 5000.0, decode_ms, wait_ms, up)


def tenant(
    floor: str = "defer",
    opt_out: tuple[str, ...] = (),
    models: tuple[str, ...] = ("auto", "small", "large"),
    value: int = 20_000_000,
    high_min: str | None = None,
    cache_ladder: bool = True,
) -> Tenant:
    return Tenant(
        name="acme",
        plan="gold",
        keys=(),
        tenant_class=TenantClass.INTERACTIVE,
        weight=1.0,
        models=models,
        value_nusd={"interactive": value, "standard": value // 4, "batch": value // 40},
        quotas=Quotas(requests_per_minute=None, tokens_per_minute=None, concurrent_requests=None, queue_max=10),
        isolation=Isolation(),
        budget=Budget(nusd=None),
        slo=Slo(ttft_ms_p99=500, tpot_ms_p99=60, availability=0.999),
        ladder=LadderTerms(floor=floor, opt_out=opt_out),
        cache=CacheTerms(ladder=cache_ladder),
        risk_high_tier_min=high_min,
    )


def ask(**changes: object) -> Ask:
    plain = Ask(
        request_id="r",
        gateway_id="g",
        tenant="acme",
        key_id="k",
        tenant_class=TenantClass.INTERACTIVE,
        model="auto",
        tiers=("small", "large"),
        prompt_tokens={"small": 100, "large": 100},
        trimmed_tokens={"small": 100, "large": 100},
        output_bound=64,
        received_wall_ns=0,
        features=FEATURES,
    )
    return msgspec.structs.replace(plain, **changes)


def random_ask(rng: random.Random, **changes: object) -> Ask:
    prompt = {"small": rng.randint(1, 5000), "large": rng.randint(1, 5000)}
    n = rng.choice((1, 1, 2))
    return ask(
        tenant_class=rng.choice(tuple(TenantClass)),
        tiers=rng.choice((("small", "large"), ("small",), ("large",))),
        prompt_tokens=prompt,
        trimmed_tokens={name: min(length, rng.choice((128, 256, length))) for name, length in prompt.items()},
        output_bound=rng.choice((None, 1, 64, 4000)),
        action=rng.choice(tuple(Action)),
        n=n,
        best_of=rng.choice((n, n, 4)),
        deadline_ms=rng.choice((None, None, 500.0, 5000.0, 60000.0)),
        features=rng.choice(((), FEATURES)),
        cached=rng.random() < 0.3,
        cache_wanted=rng.random() < 0.3,
        **changes,
    )


def random_views(rng: random.Random) -> tuple[TierView, TierView]:
    small, large = (
        view(of, rng.choice((0.0, 0.7, 1.0, 3.0)), rng.choice((0.0, 300.0, 5000.0)), up=rng.random() > 0.05)
        for of in (SMALL, LARGE)
    )
    return small, large


TENANTS = [
    tenant(floor=floor, opt_out=opt_out, models=models, value=value, high_min=high_min)
    for floor in NAMES
    for opt_out in ((), ("small_tier",), ("context_trim", "template"))
    for models in (("auto", "small", "large"), ("large",))
    for value, high_min in ((20_000_000, "large"), (100_000, None), (0, None))
]
