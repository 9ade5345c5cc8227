"""Offers: the ways to serve an Ask, best first, and what each gives up against the best one.

Hard filters come first: contract, risk floor, context, rungs, deadline; what they turn away is reported with the reason.
What is left is ordered by net value (`worth.py`). `best` is the offer of an idle platform at rung 0; an offer that is worse
than it in tier, best_of or context, or that needs no model although the client wants one, names the rungs that made it
so in `degraded`. Nothing leaves here that the tenant's floor or opt-outs forbid, and nothing degraded ever leaves for a
high-risk Ask: both are checked on the finished offer, whatever led to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from rungway.contracts import NUSD_PER_USD, LadderSpec, Tenant, TierKind
from rungway.policies.ladder import RungName, floor_of
from rungway.policies.quality import QualityModel
from rungway.policies.worth import NEVER, Terms, TierView, Why, cache_offer, idle_offer, model_offer, template_offer
from rungway.types import Action, Ask, Offer, OfferKind, Rejected, Risk

__all__ = ["Quote", "TierView", "Why", "permitted", "quote"]

_SIDE_EFFECTS = frozenset((Action.IDEMPOTENT_WRITE, Action.NON_IDEMPOTENT_WRITE))


class Quote(NamedTuple):
    """`offers`: permitted ones, best first. `best`: see the module's text; None when no tier of the contract could serve
    this Ask even on an idle platform (then only a cached answer that was asked for is offered)."""

    offers: tuple[Offer, ...]
    best: Offer | None
    rejected: tuple[Rejected, ...]


def permitted(tenant: Tenant, ladder: LadderSpec) -> dict[str, int]:
    """Rungs that may touch this tenant: name -> index, from 1 to its floor, without its opt-outs."""
    floor = floor_of(tenant, ladder)
    out = tenant.ladder.opt_out
    return {rung.name: rung.index for rung in ladder.rungs[1 : floor + 1] if rung.name not in out}


def quote(
    ask: Ask,
    tenant: Tenant,
    tiers: Sequence[TierView],
    rungs: Mapping[str, int],
    ladder: LadderSpec,
    quality: QualityModel,
    predicted_output: Mapping[str, int],
    *,
    tenant_tiers: frozenset[str] | None = None,
    allowed: dict[str, int] | None = None,
    waited_ms: float = 0.0,
) -> Quote:
    """All offers for `ask` now. `tiers` are of the kind that it asks for.

    `rungs`: rung in force for this Ask per tier (absent = 0). `predicted_output`: expected output tokens of one sequence
    per tier (absent = the bound). `tenant_tiers`: tiers that the tenant may use at all, for serving an Ask for a larger
    model by a smaller tier; None = the tier names in `tenant.models`. `allowed`: `permitted(tenant, ladder)` where the
    caller has it at hand. `waited_ms`: how much of `ask.deadline_ms` is spent; it
    counts against offers but not against `best`, so that a tier lost to waiting is still a downgrade.
    """
    high = ask.risk is Risk.HIGH
    weak, gap = quality.heads(ask.features)
    terms = Terms(
        ask=ask,
        value_usd=tenant.value_nusd.get(ask.tenant_class, 0) / NUSD_PER_USD,
        weak=weak,
        gap=gap,
        top_rank=max((view.tier.rank for view in tiers), default=0),
        risk_rank=_risk_rank(tenant, tiers) if high and ask.kind is TierKind.TEXT else 0,
        context_limit=ladder.context_limit_tokens,
        predicted=predicted_output,
        allowed=_touching(ask, permitted(tenant, ladder) if allowed is None else allowed),
        waited_ms=waited_ms,
    )
    idle = [(view, idle_offer(view, terms)) for view in tiers if view.tier.name in ask.tiers]
    full = [(view, offer) for view, offer in idle if isinstance(offer, Offer)]
    wanted = [cache_offer(terms, None, degraded=())] if _cache_open(ask) and ask.cache_wanted else []
    if not full:
        turned_away = tuple(_rejected(view, why) for view, why in idle if isinstance(why, Why))
        return Quote(tuple(wanted), wanted[0] if wanted else None, turned_away)
    best_view, best = max(full, key=lambda pair: (pair[1].net_value_usd, pair[0].tier.rank))
    usable = frozenset(tenant.models) if tenant_tiers is None else tenant_tiers
    judge = _Judge(terms, tenant, rungs, best_view.tier.rank, usable)
    judge.look_at(tiers)
    offers = judge.offers()
    if wanted:
        offers.append(cache_offer(terms, best, degraded=()))
    elif judge.ladder_cache(tenant):
        offers.append(cache_offer(terms, best, degraded=(RungName.CACHED_ANSWER,)))
    ranks = {view.tier.name: view.tier.rank for view in tiers}
    offers.sort(key=lambda offer: (-offer.net_value_usd, bool(offer.degraded), -ranks[offer.tier]))
    if judge.templated:
        offers.append(template_offer(terms))
    return Quote(tuple(offers), best, tuple(judge.rejected))


def _touching(ask: Ask, allowed: dict[str, int]) -> dict[str, int]:
    """Of the rungs that the tenant allows, those that may touch this Ask. A vector comes from the model that was asked for,
    whole, or not at all: of the ladder only `defer` is left for embeddings."""
    if ask.risk is Risk.HIGH:
        return {}
    if ask.kind is TierKind.EMBEDDING:
        return {name: index for name, index in allowed.items() if name == RungName.DEFER}
    return allowed


class _Judge:
    """Sorts the tiers into open ones (with an offer), ones that a rung shuts, and rejected ones."""

    __slots__ = (
        "_deferred",
        "_least_rung",
        "_open",
        "best_rank",
        "rejected",
        "rungs",
        "templated",
        "tenant",
        "terms",
        "usable",
    )

    def __init__(
        self, terms: Terms, tenant: Tenant, rungs: Mapping[str, int], best_rank: int, usable: frozenset[str]
    ) -> None:
        self.terms = terms
        self.tenant = tenant
        self.rungs = rungs
        self.best_rank = best_rank
        self.usable = usable
        self.rejected: list[Rejected] = []
        self.templated = False
        self._deferred = False
        self._least_rung = NEVER
        self._open: list[tuple[TierView, Offer]] = []

    def look_at(self, tiers: Sequence[TierView]) -> None:
        """Judge every tier of the contract, and smaller ones once rung small_tier opens them."""
        asked = self.terms.ask.tiers
        deepest = max((self.rungs.get(name, 0) for name in asked), default=0)
        downgrade = self.terms.caps(RungName.SMALL_TIER, deepest)
        shut_by: list[Why] = []
        for view in tiers:
            name, rung = view.tier.name, self.rungs.get(view.tier.name, 0)
            if name not in asked and not (downgrade and view.tier.rank < self.best_rank):
                continue
            result = self._judge(view, rung, deepest)
            if isinstance(result, Offer):
                self._open.append((view, result))
            elif isinstance(result, Rejected):
                self.rejected.append(result)
            else:
                shut_by.append(result)
                why = Why.DEFERRED if result is Why.DEFERRED else f"{Why.RUNG}:{RungName.TEMPLATE}"
                self.rejected.append(_rejected(view, why))
                self._least_rung = min(self._least_rung, rung)
        if not self._open and shut_by:
            self._deferred = all(why is Why.DEFERRED for why in shut_by)
            self.templated = not self._deferred

    def _judge(self, view: TierView, rung: int, deepest: int) -> Offer | Rejected | Why:
        """An offer, a rejection, or DEFERRED / RUNG when a rung shuts the tier for this Ask."""
        terms, ask = self.terms, self.terms.ask
        if not view.up:
            return _rejected(view, Why.NO_REPLICAS)
        if view.tier.name not in ask.tiers and view.tier.name not in self.usable:
            return _rejected(view, Why.TENANT_MODELS)
        if terms.caps(RungName.DEFER, rung):
            return Why.DEFERRED
        if ask.action not in _SIDE_EFFECTS and not ask.constrained and terms.caps(RungName.TEMPLATE, rung):
            return Why.RUNG
        trim = terms.caps(RungName.CONTEXT_TRIM, rung)
        smaller = view.tier.rank < self.best_rank
        # A smaller tier may lack room for a prompt that the asked one holds: where that tier's rung trims, so may this.
        fits = ask.prompt_tokens.get(view.tier.name, 0) < view.window
        if smaller and not fits:
            trim = terms.caps(RungName.CONTEXT_TRIM, max(rung, deepest))
        offer = model_offer(
            view, terms, cut=terms.caps(RungName.BEST_OF_1, rung), trim=trim, loaded=True, smaller=smaller
        )
        if isinstance(offer, Why):
            return _rejected(view, offer)
        forbidden = self._forbidden(offer.degraded)
        if forbidden is not None:
            return _rejected(view, forbidden)
        self._least_rung = min(self._least_rung, rung)
        return offer

    def _forbidden(self, degraded: Iterable[str]) -> str | None:
        """The last gate: what in `degraded` this Ask may not be given, or None."""
        for name in degraded:
            if name not in self.terms.allowed:
                if self.terms.ask.risk is Risk.HIGH:
                    return Why.HIGH_RISK
                return f"{Why.OPT_OUT if name in self.tenant.ladder.opt_out else Why.FLOOR}:{name}"
        return None

    def offers(self) -> list[Offer]:
        """Open model offers. A tier at small_tier or deeper gives way where a smaller one is open."""
        if not self._open:
            return []
        smallest = min(view.tier.rank for view, _ in self._open)
        kept = []
        for view, offer in self._open:
            capped = self.terms.caps(RungName.SMALL_TIER, self.rungs.get(view.tier.name, 0))
            if capped and view.tier.rank > smallest:
                self.rejected.append(_rejected(view, f"{Why.RUNG}:{RungName.SMALL_TIER}"))
            else:
                kept.append(offer)
        return kept

    def ladder_cache(self, tenant: Tenant) -> bool:
        """Whether the ladder offers the cached answer: every tier that could serve is that deep, and none defers it."""
        if self._deferred or self._least_rung == NEVER or not tenant.cache.ladder:
            return False
        return _cache_open(self.terms.ask) and self.terms.caps(RungName.CACHED_ANSWER, self._least_rung)


def _cache_open(ask: Ask) -> bool:
    """An action with side effects is never answered from memory."""
    return ask.cached and ask.action not in _SIDE_EFFECTS


def _risk_rank(tenant: Tenant, tiers: Sequence[TierView]) -> int:
    """Lowest rank for a high-risk Ask. A declared minimum that is not among the tiers lets none through."""
    if tenant.risk_high_tier_min is None:
        return 0
    return next((view.tier.rank for view in tiers if view.tier.name == tenant.risk_high_tier_min), NEVER)


def _rejected(view: TierView, why: str) -> Rejected:
    return Rejected(tier=view.tier.name, kind=OfferKind.MODEL, why=why)
