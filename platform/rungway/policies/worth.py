"""One offer at a time: what a tier, the cache or the template would give an Ask, at what price, and what it is worth.

    net value = P(ok) x value(class) - price x expected tokens - shadow price x expected service time

The shadow price is what a slot-second of a tier is worth to everybody else (`shadow_price`). `offers.py` decides which
offers are made. Not modelled, for want of a measurement: P(ok) is that of the tier, whatever best_of and trimming do to
it; and an idle tier is taken to decode at the speed that it shows now.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import NamedTuple

from rungway.contracts import NUSD_PER_USD, Tier, TierKind, Version
from rungway.policies.ladder import RungName
from rungway.policies.quality import p_of
from rungway.types import Ask, Offer, OfferKind

# A pool this full has no shadow price: the next Ask displaces nobody.
SHADOW_FREE_BELOW = 0.5
# Measured speeds are not believed beyond these, so that a broken report cannot divide by zero.
PREFILL_TOKENS_PER_S_MIN = 1.0
DECODE_MS_MIN = 0.001
# Deeper than any ladder: the index of a rung that the tenant does not allow.
NEVER = 1 << 30


class Why(StrEnum):
    """Why an offer that was looked at is not given. `floor`, `opt_out` and `rung` are followed by `:` and the rung."""

    NO_REPLICAS = "no_replicas"
    TENANT_MODELS = "tenant_models"  # the tenant may not use this tier
    RISK_FLOOR = "risk_floor"
    HIGH_RISK = "high_risk"  # it would be a downgrade, and the Ask is high risk
    NOT_COUNTED = "prompt_not_counted"  # no prompt length for this tier's tokenizer
    CONTEXT = "context_length"
    DEADLINE = "deadline"
    FLOOR = "floor"
    OPT_OUT = "opt_out"
    RUNG = "rung"
    DEFERRED = "deferred"


class TierView(NamedTuple):
    """One version of a tier as the controller sees it now.

    `saturation`: 1.0 = as much in flight as the pool takes, more when work waits. `decode_ms_per_token`: per sequence,
    as expected at the present batch. `queue_wait_ms`: expected wait of a new Ask. A tier without replicas (`up` False) is
    never offered, but it still counts for what the best offer would have been. `kv_tokens`: of the largest replica, as far
    as one is known (None): no answer goes beyond it.
    """

    tier: Tier
    version: Version
    saturation: float
    prefill_tokens_per_s: float
    decode_ms_per_token: float
    queue_wait_ms: float
    up: bool = True
    kv_tokens: int | None = None

    @property
    def window(self) -> int:
        """Most tokens of a prompt and its answer."""
        context = self.version.max_context
        return context if self.kv_tokens is None else min(context, self.kv_tokens)


class Terms(NamedTuple):
    """What every offer of one Ask is judged by. `allowed`: rung name -> index, of the rungs that may touch this Ask."""

    ask: Ask
    value_usd: float
    weak: float
    gap: float
    top_rank: int
    risk_rank: int
    context_limit: int
    predicted: Mapping[str, int]
    allowed: dict[str, int]
    waited_ms: float

    def caps(self, name: str, rung: int) -> bool:
        """Whether the cap `name` is in force at `rung`."""
        return self.allowed.get(name, NEVER) <= rung


def shadow_price(view: TierView) -> float:
    """USD per second of one sequence's service on this tier, given how full it is.

    What a slot earns in a second at full speed (output price x token rate; the replica's cost per slot where that is
    more), times a convex factor: 0 up to half full, 1 at full, 4 at one and a half times full, and so on.
    """
    over = max(view.saturation - SHADOW_FREE_BELOW, 0.0) / (1.0 - SHADOW_FREE_BELOW)
    if over == 0.0:
        return 0.0
    tokens_per_s = 1000.0 / max(view.decode_ms_per_token, DECODE_MS_MIN)
    earned_nusd = view.tier.price.output / 1000.0 * tokens_per_s
    cost_nusd = view.version.replica_cost_nusd_per_hour / 3600.0 / view.version.max_num_seqs
    return max(earned_nusd, cost_nusd) / NUSD_PER_USD * over * over


def model_offer(view: TierView, terms: Terms, *, cut: bool, trim: bool, loaded: bool, smaller: bool) -> Offer | Why:
    """One model offer under the given caps, or the hard filter that it fails."""
    ask, tier, version = terms.ask, view.tier, view.version
    prompt = ask.prompt_tokens.get(tier.name)
    if tier.rank < terms.risk_rank:
        return Why.RISK_FLOOR
    if prompt is None:
        return Why.NOT_COUNTED
    degraded: tuple[str, ...] = ()
    best_of = max(ask.best_of, ask.n)
    if cut and best_of > ask.n:
        best_of, degraded = ask.n, (RungName.BEST_OF_1,)
    context_limit = None
    if trim and (trimmed := ask.trimmed_tokens.get(tier.name, prompt)) < prompt:
        prompt, context_limit, degraded = trimmed, terms.context_limit, (*degraded, RungName.CONTEXT_TRIM)
    if smaller:
        degraded = (*degraded, RungName.SMALL_TIER)
    # Each text to embed was measured by the gateway and leaves no room for an answer; `prompt` is all of them.
    room = view.window - prompt if ask.kind is TierKind.TEXT else 0
    if room < 1 and ask.kind is TierKind.TEXT:
        return Why.CONTEXT
    max_tokens = min(version.default_max_tokens if ask.output_bound is None else ask.output_bound, room)
    expected = min(terms.predicted.get(tier.name, max_tokens), max_tokens)
    service_s = (
        prompt / max(view.prefill_tokens_per_s, PREFILL_TOKENS_PER_S_MIN) + expected * view.decode_ms_per_token / 1000.0
    )
    time_ms = service_s * 1000.0 + (view.queue_wait_ms + terms.waited_ms if loaded else 0.0)
    if ask.deadline_ms is not None and time_ms > ask.deadline_ms:
        return Why.DEADLINE
    price_nusd = tier.price.cost_nusd(input_tokens=prompt, cached_tokens=0, output_tokens=expected * best_of)
    p_ok = p_of(terms.weak, terms.gap, tier.rank, terms.top_rank)
    net = p_ok * terms.value_usd - price_nusd / NUSD_PER_USD
    if loaded:
        net -= shadow_price(view) * service_s * best_of
    return Offer(
        kind=OfferKind.MODEL,
        tier=tier.name,
        version=version.name,
        prompt_tokens=prompt,
        max_tokens=max_tokens,
        n=ask.n,
        best_of=best_of,
        context_limit=context_limit,
        price_nusd=price_nusd,
        p_ok=p_ok,
        time_ms=time_ms,
        net_value_usd=net,
        rung=max((terms.allowed.get(name, 0) for name in degraded), default=0),
        degraded=degraded
        if len(degraded) < 2
        else tuple(sorted(degraded, key=lambda name: terms.allowed.get(name, 0))),
    )


def idle_offer(view: TierView, terms: Terms) -> Offer | Why:
    """The full offer of an idle platform: no caps, no wait, no shadow price, and replicas even where there are none."""
    return model_offer(view, terms, cut=False, trim=False, loaded=False, smaller=False)


def cache_offer(terms: Terms, best: Offer | None, *, degraded: tuple[str, ...]) -> Offer:
    """The tenant's own earlier answer to the same request: free, at once, as good as the best offer."""
    p_ok = best.p_ok if best else p_of(terms.weak, terms.gap, terms.top_rank, terms.top_rank)
    return Offer(
        kind=OfferKind.CACHE,
        tier=best.tier if best else "",
        version=best.version if best else "",
        prompt_tokens=best.prompt_tokens if best else 0,
        max_tokens=0,
        n=terms.ask.n,
        p_ok=p_ok,
        net_value_usd=p_ok * terms.value_usd,
        rung=max((terms.allowed[name] for name in degraded), default=0),
        degraded=degraded,
    )


def template_offer(terms: Terms) -> Offer:
    """The fixed text: honest, free, and worth nothing."""
    name = RungName.TEMPLATE
    return Offer(
        kind=OfferKind.TEMPLATE,
        tier="",
        version="",
        prompt_tokens=0,
        max_tokens=0,
        n=terms.ask.n,
        p_ok=0.0,
        rung=terms.allowed[name],
        degraded=(name,),
    )
