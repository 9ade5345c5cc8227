"""Properties of offers over random asks: high risk, floors and opt-outs, exact marks, shadow price."""

from __future__ import annotations

import random

import msgspec

from policies.offer_kit import LADDER, LARGE, NAMES, QUALITY, SMALL, TENANTS, random_ask, random_views, view
from rungway.policies.offers import quote
from rungway.types import Ask, Offer, OfferKind, Risk


def test_high_risk_is_never_degraded_over_100k_asks_at_every_rung() -> None:
    rng = random.Random(11)
    served = 0
    for _ in range(100_000):
        who, views = rng.choice(TENANTS), random_views(rng)
        of = random_ask(rng, risk=Risk.HIGH)
        reference = None
        for rung in range(8):
            result = quote(of, who, views, {"small": rung, "large": rng.randrange(8)}, LADDER, QUALITY, {})
            for offer in result.offers:
                assert offer.degraded == () and offer.rung == 0
                assert offer.kind is OfferKind.MODEL or (offer.kind is OfferKind.CACHE and of.cache_wanted)
                if offer.kind is OfferKind.MODEL:
                    assert offer.tier in of.tiers
                    assert who.risk_high_tier_min is None or offer.tier == "large"
                    assert offer.best_of == max(of.best_of, of.n) and offer.context_limit is None
            assert reference is None or result == reference  # no rung touches it
            reference = result
        served += bool(reference and reference.offers)
    assert served > 20_000


def test_floor_opt_out_and_marks_are_exact() -> None:
    rng = random.Random(12)
    seen: set[tuple[str, ...]] = set()
    for _ in range(30_000):
        who, views, of = rng.choice(TENANTS), random_views(rng), random_ask(rng)
        rungs = {"small": rng.randrange(8), "large": rng.randrange(8)}
        result = quote(of, who, views, rungs, LADDER, QUALITY, {})
        floor = NAMES.index(who.ladder.floor)
        for offer in result.offers:
            seen.add(offer.degraded)
            assert not set(offer.degraded) & set(who.ladder.opt_out)
            assert offer.rung <= floor
            assert offer.rung == max((NAMES.index(name) for name in offer.degraded), default=0)
            assert list(offer.degraded) == sorted(offer.degraded, key=NAMES.index)
            assert (offer.degraded == ()) == same_as_best(of, offer, result.best)
            if offer.kind is OfferKind.MODEL:
                assert offer.prompt_tokens + offer.max_tokens <= 4096
                assert offer.tier in of.tiers or offer.tier in who.models
                assert of.deadline_ms is None or offer.time_ms <= of.deadline_ms
        assert all(offer.kind is not OfferKind.TEMPLATE for offer in result.offers[:-1])
    assert {(), ("small_tier",), ("best_of_1", "context_trim", "small_tier"), ("template",), ("cached_answer",)} <= seen


def same_as_best(of: Ask, offer: Offer, best: Offer | None) -> bool:
    if offer.kind is OfferKind.CACHE:
        return of.cache_wanted
    if offer.kind is OfferKind.TEMPLATE or best is None:
        return False
    return (
        not (offer.tier == "small" and best.tier == "large")
        and offer.best_of == best.best_of
        and offer.context_limit is None
    )


def test_a_higher_shadow_price_never_raises_the_large_share() -> None:
    rng = random.Random(13)
    asks = [msgspec.structs.replace(random_ask(rng), tiers=("small", "large"), cached=False) for _ in range(1500)]
    whos = [rng.choice(TENANTS) for _ in asks]
    for rung in (0, 2, 4, 6):
        before: list[bool] | None = None
        for saturation in (0.0, 0.5, 0.8, 1.0, 1.5, 2.5, 6.0):
            views = (view(SMALL, 0.6), view(LARGE, saturation))
            rungs = {"small": 0, "large": rung}
            results = [quote(a, t, views, rungs, LADDER, QUALITY, {}) for a, t in zip(asks, whos, strict=True)]
            large = [bool(r.offers) and r.offers[0].tier == "large" for r in results]
            assert before is None or all(not now or was for was, now in zip(before, large, strict=True))
            if before is None and rung == 0:
                assert 0 < sum(large) < len(large)
            before = large
