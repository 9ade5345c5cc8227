"""The shape of tenant files, of plans and of the key files that the command line writes."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from rungway import contracts
from rungway.contracts import TenantClass
from rungway.settings import rules
from rungway.settings.rules import CountOrZero, Flag, Limit, Positive, Share, Usd, UsdLimit
from rungway.settings.section import Section, refuse

_ISOLATION = contracts.Isolation()
_CACHE = contracts.CacheTerms()


class ValueUsd(Section):
    interactive: Usd = Field(default=20_000_000, description="Worth of one good answer of class interactive.")
    standard: Usd = Field(default=5_000_000, description="The same for class standard.")
    batch: Usd = Field(default=500_000, description="The same for class batch.")


class Quotas(Section):
    requests_per_minute: Limit = Field(default=600, description="Requests admitted per minute.")
    tokens_per_minute: Limit = Field(default=200_000, description="Prompt and output tokens per minute.")
    concurrent_requests: Limit = Field(default=16, description="Requests being served at one time.")
    queue_max: CountOrZero = Field(
        default=100, description="Requests that may wait. 0 = none; every queue has a bound."
    )


class Isolation(Section):
    in_flight_share_max: Share = Field(
        default=_ISOLATION.in_flight_share_max,
        description="Largest part of a pool's in-flight tokens that the tenant may hold.",
    )
    reserved_share: Share = Field(
        default=_ISOLATION.reserved_share,
        description="Part of a pool kept for the tenant; all tenants together at most 1.",
    )
    retry_budget_ratio: Share = Field(
        default=_ISOLATION.retry_budget_ratio, description="Retries allowed as a part of the tenant's requests."
    )
    shard_replicas: Annotated[int | None, rules.whole(1, words=("all",))] = Field(
        default=_ISOLATION.shard_replicas,
        description="Replicas of each pool that the tenant uses, chosen by hash (shuffle sharding).",
    )
    reclaim_s: Annotated[float | None, rules.number(0, above=True, words=("never",))] = Field(
        default=_ISOLATION.reclaim_s,
        description="Within this time the tenant gets its reserved_share back from those who use it meanwhile, by "
        "stopping their newest work if need be.",
    )

    @model_validator(mode="after")
    def _reserved_within_cap(self) -> Isolation:
        if self.reserved_share > self.in_flight_share_max:
            raise refuse("reserved_share", "is more than in_flight_share_max (allowed: at most that)")
        return self


class Budget(Section):
    usd: UsdLimit = Field(default=None, description="Money per window.")
    per: Annotated[str, rules.one_of("day", "week", "month")] = Field(default="month", description="The window.")
    timezone: Annotated[str, rules.zone()] = Field(default="UTC", description="Where the window's midnight is.")
    at_limit: Annotated[str, rules.one_of("degrade", "refuse")] = Field(
        default="refuse", description="What happens when the budget is used up: cheaper answers first, or none."
    )


class Slo(Section):
    ttft_ms_p99: Positive = Field(default=2000.0, description="Time to the first token, 99th percentile, milliseconds.")
    tpot_ms_p99: Positive = Field(
        default=200.0, description="Time per output token after the first, 99th percentile, ms."
    )
    availability: Share = Field(default=0.99, description="Part of admitted requests that end well.")


class TenantLadder(Section):
    floor: Annotated[str, rules.name_of("rungs")] = Field(
        default="", description="Deepest rung allowed for this tenant. Absent: the last rung of the ladder."
    )
    opt_out: Annotated[tuple[str, ...], rules.names_of("rungs")] = Field(
        default=(), description="Rungs never used for it."
    )


class TenantCache(Section):
    mode: Annotated[str, rules.one_of("off", "exact")] = Field(
        default=_CACHE.mode, description="Cache for requests without the header `x-rungway-cache`."
    )
    ladder: Flag = Field(default=_CACHE.ladder, description="Whether the rung `cached_answer` may use stored answers.")
    ttl_s: Positive = Field(default=_CACHE.ttl_s, description="How long an answer is kept, seconds.")
    entries_max: CountOrZero = Field(
        default=_CACHE.entries_max, description="Answers kept per gateway for this tenant."
    )


class RiskHigh(Section):
    tier_min: Annotated[str | None, rules.name_of("tiers")] = Field(
        default=None, description="Smallest tier for requests marked `x-rungway-risk: high`. Absent: any allowed tier."
    )


class Risk(Section):
    high: RiskHigh = Field(default_factory=RiskHigh, description="Terms for high-risk requests.")


class Terms(Section):
    """What a plan and a tenant file may both say."""

    tenant_class: Annotated[TenantClass, rules.CLASSES] = Field(
        default=TenantClass.STANDARD, alias="class", description="Default class; a request's header may only lower it."
    )
    weight: Positive = Field(default=1.0, description="Fair share under contention, relative to other tenants.")
    models: Annotated[tuple[str, ...] | None, rules.names_of("models", all_word=True)] = Field(
        default=None, description="Models the tenant may ask for. An alias of an allowed model is allowed. [] = none."
    )
    value_usd: ValueUsd = Field(default_factory=ValueUsd, description="Worth of one good answer, per class.")
    quotas: Quotas = Field(default_factory=Quotas, description="Rate limits and queue.")
    isolation: Isolation = Field(default_factory=Isolation, description="Limits that protect other tenants.")
    budget: Budget = Field(default_factory=Budget, description="Spending limit.")
    slo: Slo = Field(default_factory=Slo, description="Service level objectives.")
    ladder: TenantLadder = Field(default_factory=TenantLadder, description="What the degradation ladder may do.")
    cache: TenantCache = Field(default_factory=TenantCache, description="Answer cache.")
    risk: Risk = Field(default_factory=Risk, description="Terms by risk.")


class KeyEntry(Section):
    id: rules.KeyId = Field(description="Name of the key, unique over all tenants; this is what logs and rows show.")
    sha256: Annotated[str, rules.sha256_hex()] = Field(description="SHA-256 of the key, in hex.")
    expires: Annotated[int | None, rules.instant()] = Field(
        default=None, description="When it stops working. Without a zone it is UTC. Absent: never."
    )
    scopes: Annotated[tuple[str, ...], rules.words_of("inference", "usage", "admin")] = Field(
        default=("inference", "usage"), description="What it may do. `admin` only for the tenant `platform`."
    )
    revoked: Flag = Field(default=False, description="A revoked key is refused with `key_revoked`.")


class TenantFile(Terms):
    """tenants/NAME.yaml"""

    tenant: rules.TenantName = Field(description="The tenant's name; `platform` is the operators' own.")
    plan: Annotated[str, rules.name_of("plans")] = Field(
        default="default", description="Plan whose values fill what is absent."
    )
    keys: list[KeyEntry] = Field(default_factory=list, description="API keys, by hash.")
    suspended: Flag = Field(default=False, description="Refuse every request with `tenant_suspended`.")
    template: Annotated[str | None, rules.text("text of 1 to 4000 characters", r"(?s).{1,4000}")] = Field(
        default=None, description="Answer given on the rung `template`. Absent: the ladder's text."
    )


class KeysFile(Section):
    """state_dir/tenants/NAME.yaml: keys made by the command line, merged into the tenant's."""

    tenant: rules.TenantName = Field(description="Whose keys these are.")
    keys: list[KeyEntry] = Field(description="An entry with the id of a key in the tenant's file replaces it.")
