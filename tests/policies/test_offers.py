"""Offers under every rung: nothing degraded for high risk, floors and opt-outs kept, downgrades named exactly."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest

from policies.offer_kit import CHEAP, DEAR, LADDER, LARGE, MEDIUM, QUALITY, SMALL, ask, tenant, tier, view
from rungway.contracts import (
    Price,
    Tenant,
    TenantClass,
)
from rungway.policies.offers import Quote, TierView, quote
from rungway.policies.worth import shadow_price
from rungway.types import Action, Ask, Offer, OfferKind, Risk


def judge(
    of: Ask,
    who: Tenant | None = None,
    *,
    rung: int | dict[str, int] = 0,
    tiers: Sequence[TierView] | None = None,
    waited_ms: float = 0.0,
) -> Quote:
    rungs = rung if isinstance(rung, dict) else {"small": rung, "large": rung}
    views = tiers if tiers is not None else (view(SMALL), view(LARGE))
    return quote(of, who or tenant(), views, rungs, LADDER, QUALITY, {}, waited_ms=waited_ms)


def whys(result: Quote) -> dict[str, str]:
    return {rejected.tier: rejected.why for rejected in result.rejected}


def first(result: Quote) -> Offer:
    assert result.offers, result.rejected
    return result.offers[0]


def test_idle_platform_gives_the_best_offer_undegraded() -> None:
    result = judge(ask())
    assert first(result) == result.best
    assert (first(result).tier, first(result).rung, first(result).degraded) == ("large", 0, ())


def test_a_low_value_class_is_best_served_by_the_small_tier_and_that_is_no_downgrade() -> None:
    result = judge(ask(tenant_class=TenantClass.BATCH))
    assert (first(result).tier, first(result).degraded) == ("small", ())
    assert result.best is not None and result.best.tier == "small"
    assert all(not offer.degraded for offer in result.offers)  # large is more than best, not less


def test_asked_model_is_kept_at_rung_0() -> None:
    result = judge(ask(model="large", tiers=("large",)))
    assert [offer.tier for offer in result.offers] == ["large"]
    assert result.rejected == ()


@pytest.mark.parametrize("rung", [4, 5, 6])
def test_pressed_large_pool_hands_over_to_the_idle_small_one(rung: int) -> None:
    result = judge(ask(model="large", tiers=("large",)), rung={"large": rung})
    if rung < 6:
        assert whys(result)["large"] == "rung:small_tier"
    offer = first(result)
    assert (offer.kind, offer.tier, offer.degraded, offer.rung) == (OfferKind.MODEL, "small", ("small_tier",), 4)
    assert all(other.kind is OfferKind.MODEL for other in result.offers)  # no template while a model is open


def test_a_tenant_that_may_not_use_the_small_tier_waits_for_large() -> None:
    result = judge(ask(model="large", tiers=("large",)), tenant(models=("large",)), rung=4)
    assert (first(result).tier, first(result).degraded) == ("large", ())
    assert whys(result) == {"small": "tenant_models"}
    views = (view(SMALL), view(LARGE))
    opened = quote(
        ask(tiers=("large",)),
        tenant(models=("auto",)),
        views,
        {"large": 4},
        LADDER,
        QUALITY,
        {},
        tenant_tiers=frozenset(("small",)),
    )
    assert first(opened).tier == "small"


@pytest.mark.parametrize("terms", [{"floor": "context_trim"}, {"opt_out": ("small_tier",)}])
def test_floor_and_opt_out_keep_large_under_load(terms: dict[str, object]) -> None:
    contract = tenant(**terms)  # type: ignore[arg-type]
    for of in (ask(), ask(model="large", tiers=("large",))):
        result = judge(of, contract, rung=4, tiers=(view(SMALL), view(LARGE, saturation=5.0, wait_ms=9000.0)))
        assert [offer.tier for offer in result.offers] == ["large"]
    assert whys(judge(ask(), contract, rung=4))["small"].endswith(":small_tier")


def test_auto_moves_to_small_for_the_shadow_price_and_says_so() -> None:
    calm = judge(ask(), tiers=(view(SMALL), view(LARGE, saturation=0.5)))
    assert first(calm).tier == "large"
    result = judge(ask(), tiers=(view(SMALL), view(LARGE, saturation=4.0)))
    assert (first(result).tier, first(result).degraded, first(result).rung) == ("small", ("small_tier",), 4)
    assert result.offers[1].tier == "large" and result.offers[1].degraded == ()


def test_best_of_and_trim_caps_are_cumulative_and_named() -> None:
    long = ask(
        best_of=4,
        n=2,
        prompt_tokens={"small": 900, "large": 900},
        trimmed_tokens={"small": 250, "large": 250},
        model="large",
        tiers=("large",),
    )
    at = [first(judge(long, tenant(floor="context_trim"), rung=rung)) for rung in range(4)]
    assert [offer.degraded for offer in at] == [(), (), ("best_of_1",), ("best_of_1", "context_trim")]
    assert [offer.rung for offer in at] == [0, 0, 2, 3]
    assert [offer.best_of for offer in at] == [4, 4, 2, 2]
    assert [offer.prompt_tokens for offer in at] == [900, 900, 900, 250]
    assert [offer.context_limit for offer in at] == [None, None, None, 256]
    assert at[3].price_nusd < at[2].price_nusd < at[0].price_nusd


def test_caps_that_change_nothing_are_no_downgrade() -> None:
    for rung in range(4):
        assert first(judge(ask(), rung=rung)).degraded == ()
    only_small = judge(ask(model="small", tiers=("small",)), rung=4)
    assert (first(only_small).tier, first(only_small).degraded) == ("small", ())


def test_a_long_prompt_is_trimmed_into_the_small_tier_only_where_the_ladder_trims() -> None:
    cramped = tier("small", 0, CHEAP, max_context=512)
    long = ask(
        model="large",
        tiers=("large",),
        prompt_tokens={"small": 900, "large": 900},
        trimmed_tokens={"small": 250, "large": 250},
    )
    result = judge(long, rung={"large": 4}, tiers=(view(cramped), view(LARGE)))
    assert (first(result).tier, first(result).degraded) == ("small", ("context_trim", "small_tier"))
    kept = judge(long, tenant(opt_out=("context_trim",)), rung={"large": 4}, tiers=(view(cramped), view(LARGE)))
    assert (first(kept).tier, whys(kept)["small"]) == ("large", "context_length")


def test_prompt_that_fits_no_asked_tier_is_turned_away_at_every_rung() -> None:
    long = ask(prompt_tokens={"small": 9000, "large": 9000}, trimmed_tokens={"small": 250, "large": 250})
    for rung in range(8):
        result = judge(long, rung=rung)
        assert result.offers == () and result.best is None
        assert whys(result) == {"small": "context_length", "large": "context_length"}


def test_last_token_of_context() -> None:
    edge = ask(tiers=("large",), prompt_tokens={"large": 4095}, output_bound=None)
    assert first(judge(edge)).max_tokens == 1
    assert judge(ask(tiers=("large",), prompt_tokens={"large": 4096})).offers == ()


def test_output_bound_none_is_the_default_and_zero_is_zero() -> None:
    assert first(judge(ask(output_bound=None))).max_tokens == 256
    assert first(judge(ask(output_bound=0))).max_tokens == 0


def test_deadline() -> None:
    assert judge(ask(deadline_ms=100.0)).offers == ()
    assert whys(judge(ask(deadline_ms=100.0))) == {"small": "deadline", "large": "deadline"}
    loaded = (view(SMALL), view(LARGE, wait_ms=2000.0))
    result = judge(ask(deadline_ms=2000.0), tiers=loaded)
    assert (first(result).tier, first(result).degraded) == ("small", ("small_tier",))
    assert whys(result) == {"large": "deadline"}


def test_time_spent_waiting_does_not_make_a_smaller_tier_the_best() -> None:
    views = (view(SMALL, decode_ms=1.0), view(LARGE))
    result = judge(ask(deadline_ms=2000.0), tiers=views, waited_ms=1500.0)
    assert result.best is not None and result.best.tier == "large"
    assert first(result).degraded == ("small_tier",)
    assert judge(ask(deadline_ms=2000.0, risk=Risk.HIGH), tiers=views, waited_ms=1500.0).offers == ()


def test_a_tier_without_replicas_is_still_what_was_best() -> None:
    result = judge(ask(), tiers=(view(SMALL), view(LARGE, up=False)))
    assert (first(result).tier, first(result).degraded) == ("small", ("small_tier",))
    assert whys(result)["large"] == "no_replicas"


def test_cached_answer_rung() -> None:
    known = ask(cached=True)
    assert first(judge(known, rung=4)).kind is OfferKind.MODEL
    result = judge(known, rung=5)
    assert (first(result).kind, first(result).degraded, first(result).rung) == (OfferKind.CACHE, ("cached_answer",), 5)
    assert first(result).price_nusd == 0
    assert first(judge(known, tenant(cache_ladder=False), rung=5)).kind is OfferKind.MODEL
    assert first(judge(known, rung={"large": 5})).kind is OfferKind.MODEL  # small is free and comes first on the ladder
    assert first(judge(ask(cached=True, action=Action.IDEMPOTENT_WRITE), rung=5)).kind is OfferKind.MODEL


@pytest.mark.parametrize("rung", range(8))
def test_a_wanted_cache_answer_is_no_downgrade_at_any_rung(rung: int) -> None:
    result = judge(ask(cached=True, cache_wanted=True), rung=rung)
    assert (first(result).kind, first(result).degraded, first(result).rung) == (OfferKind.CACHE, (), 0)


def test_template_rung() -> None:
    result = judge(ask(), rung=6)
    assert [offer.kind for offer in result.offers] == [OfferKind.TEMPLATE]
    assert (first(result).degraded, first(result).rung) == (("template",), 6)
    assert [offer.kind for offer in judge(ask(cached=True), rung=6).offers] == [OfferKind.CACHE, OfferKind.TEMPLATE]
    for action in (Action.IDEMPOTENT_WRITE, Action.NON_IDEMPOTENT_WRITE):
        assert first(judge(ask(action=action), rung=6)).kind is OfferKind.MODEL
    assert first(judge(ask(), tenant(opt_out=("template",)), rung=6)).kind is OfferKind.MODEL


def test_a_fixed_text_never_stands_for_a_constrained_answer() -> None:
    """The rungs before it still apply: a smaller tier, and a cached answer to the very same request."""
    assert {offer.kind for offer in judge(ask(constrained=True), rung=6).offers} == {OfferKind.MODEL}
    assert first(judge(ask(constrained=True), rung=4)).tier == "small"
    assert first(judge(ask(constrained=True, cached=True), rung=5)).kind is OfferKind.CACHE
    assert judge(ask(constrained=True), rung=7).offers == ()


def test_defer_rung() -> None:
    for of in (ask(), ask(cached=True), ask(action=Action.IDEMPOTENT_WRITE)):
        result = judge(of, rung=7)
        assert result.offers == () and result.best is not None
        assert set(whys(result).values()) == {"deferred"}
    assert first(judge(ask(), tenant(floor="small_tier"), rung=7)).tier == "small"
    assert first(judge(ask(), rung={"large": 7})).tier == "small"
    assert first(judge(ask(), rung={"large": 7, "small": 6})).kind is OfferKind.TEMPLATE


def test_high_risk_waits_for_its_tier_at_every_rung() -> None:
    risky = ask(risk=Risk.HIGH, best_of=4, trimmed_tokens={"small": 10, "large": 10}, cached=True)
    for rung in range(8):
        result = judge(risky, tenant(high_min="large"), rung=rung, tiers=(view(SMALL), view(LARGE, saturation=9.0)))
        assert [(offer.tier, offer.best_of, offer.degraded) for offer in result.offers] == [("large", 4, ())]
        assert whys(result) == {"small": "risk_floor"}
    assert whys(judge(risky, tenant(high_min="absent")))["large"] == "risk_floor"
    assert whys(judge(risky))["small"] == "high_risk"


def test_three_tiers_step_down_through_the_middle() -> None:
    top = tier("large", 2, DEAR)
    tokens = {"small": 100, "medium": 100, "large": 100}
    of = ask(tiers=("large",), prompt_tokens=tokens, trimmed_tokens=tokens)
    who = tenant(models=("small", "medium", "large"))
    views = (view(SMALL), view(MEDIUM), view(top))
    assert [offer.tier for offer in quote(of, who, views, {}, LADDER, QUALITY, {}).offers] == ["large"]
    assert {offer.tier for offer in quote(of, who, views, {"large": 4}, LADDER, QUALITY, {}).offers} == {
        "small",
        "medium",
    }
    both = quote(of, who, views, {"large": 4, "medium": 4}, LADDER, QUALITY, {})
    assert [offer.tier for offer in both.offers] == ["small"]


def test_shadow_price_is_zero_then_convex() -> None:
    prices = [shadow_price(view(LARGE, saturation=step / 10)) for step in range(31)]
    assert prices[:6] == [0.0] * 6
    slopes = [b - a for a, b in pairwise(prices)]
    assert all(later >= earlier - 1e-18 for earlier, later in pairwise(slopes))
    assert prices[10] == pytest.approx(3_000_000 / 1000 * 50 / 1e9)  # at full: what a slot earns in a second
    free = tier("free", 0, Price(input=0, cached_input=0, output=0))
    assert shadow_price(view(free, saturation=2.0)) > 0.0
