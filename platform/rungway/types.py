"""The nouns of one request, from what is asked to what it cost. Frozen, and sent between processes as they are.

What every request sends goes as arrays (`array_like`: half the bytes and time of maps), what people read in a decision
or audit entry (`Offer`, `Rejected`) and the ledger's rows keep their names.

Time on the wire is either a wall-clock `_ns` (for rows that people read) or a duration; monotonic stamps stay inside the
process that took them.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from rungway.contracts import Price, TenantClass, TierKind


class Risk(StrEnum):
    NORMAL = "normal"
    HIGH = "high"


class Action(StrEnum):
    PURE = "pure"
    READ = "read"
    IDEMPOTENT_WRITE = "idempotent_write"
    NON_IDEMPOTENT_WRITE = "non_idempotent_write"


class OfferKind(StrEnum):
    MODEL = "model"
    CACHE = "cache"
    TEMPLATE = "template"


class Ask(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """What the client wants, priced in tokens. Made by the gateway, judged by the controller.

    `prompt_tokens[tier]` is the exact prompt length for that tier's tokenizer; `trimmed_tokens[tier]` is its length
    after the rung `context_trim` (equal where nothing may be dropped). `output_bound` is the client's `max_tokens`
    per sequence or None; 0 where only the prompt is computed: for embeddings, whose prompt is all inputs together, and for scoring. `prefix_keys[tier]` names the prompt's leading blocks for the replicas of that tier
    (`engine/chain.py`), bounded, one per `key_tokens[tier]` tokens; tiers without any are left out. `deadline_ms` counts from the moment the gateway sent the Ask.
    """

    request_id: str
    gateway_id: str
    tenant: str
    key_id: str
    tenant_class: TenantClass
    model: str
    tiers: tuple[str, ...]
    prompt_tokens: dict[str, int]
    trimmed_tokens: dict[str, int]
    output_bound: int | None
    received_wall_ns: int
    endpoint: str = "chat"
    stream: bool = False
    risk: Risk = Risk.NORMAL
    action: Action = Action.READ
    n: int = 1
    best_of: int = 1
    deadline_ms: float | None = None
    session: str | None = None
    features: tuple[float, ...] = ()
    cached: bool = False  # the gateway holds a valid exact answer
    cache_wanted: bool = False  # the client or tenant asked for it, not only the ladder
    prefix_keys: dict[str, tuple[int, ...]] = {}
    constrained: bool = (
        False  # the answer has to fit a constraint or shows its prompt, so no fixed text can stand for it
    )
    key_tokens: dict[str, int] = {}
    kind: TierKind = TierKind.TEXT  # of the tiers that are asked for


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """One way to serve an Ask.

    `net_value_usd` = P(ok) x value - price - shadow price x time (float, for ordering only); `price_nusd` is the
    expected price. `rung` is the deepest rung that made this offer worse than the best one; `degraded` names all.
    """

    kind: OfferKind
    tier: str
    version: str
    prompt_tokens: int
    max_tokens: int
    n: int = 1
    best_of: int = 1
    context_limit: int | None = None
    price_nusd: int = 0
    p_ok: float = 1.0
    time_ms: float = 0.0
    net_value_usd: float = 0.0
    rung: int = 0
    degraded: tuple[str, ...] = ()


class Rejected(msgspec.Struct, frozen=True, kw_only=True):
    """An offer that was looked at and not given, with the limit that stood in its way."""

    tier: str
    kind: str
    why: str


class RateInfo(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """What the x-ratelimit headers say. None = unlimited. Resets are seconds until the bucket is full."""

    limit_requests: int | None = None
    remaining_requests: int | None = None
    reset_requests_s: float = 0.0
    limit_tokens: int | None = None
    remaining_tokens: int | None = None
    reset_tokens_s: float = 0.0


class Grant(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """The Ask is served: by this offer, on this replica (empty for cache and template), under this reservation."""

    request_id: str
    attempt: int
    offer: Offer
    replica_id: str
    reason: str
    reserved_tokens: int
    reserved_nusd: int
    rate: RateInfo
    price: Price
    priority: int = 0  # 0 interactive, 1 standard, 2 batch: the engine's band
    weight: float = 1.0
    queue_wait_ms: float = 0.0
    granted_wall_ns: int = 0
    config_digest: str = ""
    evictions: int = 0  # how often this request was stopped for others so far


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """The Ask is not served. `code` is an `outcomes.Code`; `retry_after_s` is whole seconds >= 1, or None if waiting
    does not help."""

    request_id: str
    code: str
    message: str
    retry_after_s: int | None
    rate: RateInfo
    rung: int = 0
    reason: str = ""
    rejected: tuple[Rejected, ...] = ()


class Usage(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Tokens of one attempt as the engine counted them; `output_tokens` is over all its sequences."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0


class AttemptEnd(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """The engine side of a settlement, sent by the replica and re-sent until acknowledged. `billing` lets the
    controller write a row even when it has never heard of the request."""

    request_id: str
    attempt: int
    replica_id: str
    usage: Usage
    finish: str  # stop | length | cancelled | error | lost
    billing: Billing
    started_wall_ns: int
    ended_wall_ns: int


class Billing(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Who pays for an attempt and at what price; travels with the work so that no usage is ever an orphan."""

    tenant: str
    key_id: str
    tenant_class: str
    risk: str
    action: str
    model: str
    tier: str
    version: str
    rung: int
    degraded: tuple[str, ...]
    reason: str
    price: Price
    gateway_id: str
    received_wall_ns: int
    session: str | None = None
    endpoint: str = "chat"


def billing_of(ask: Ask, grant: Grant) -> Billing:
    """Who pays for a granted Ask and at what price: the tier that serves it, not the one that was asked for."""
    offer = grant.offer
    return Billing(
        tenant=ask.tenant,
        key_id=ask.key_id,
        tenant_class=ask.tenant_class,
        risk=ask.risk,
        action=ask.action,
        model=ask.model,
        tier=offer.tier,
        version=offer.version,
        rung=offer.rung,
        degraded=offer.degraded,
        reason=grant.reason,
        price=grant.price,
        gateway_id=ask.gateway_id,
        received_wall_ns=ask.received_wall_ns,
        session=ask.session,
        endpoint=ask.endpoint,
    )


class Finish(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """The client side of a settlement, sent by the gateway once per request and re-sent until acknowledged.

    `delivered[k]` = output tokens that the gateway received from attempt k. Times in milliseconds; None where the
    request never got that far.
    """

    request_id: str
    outcome: str
    code: str | None = None
    attempts: int = 0
    delivered: dict[int, int] = {}
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None
    cache: str = "off"  # hit-exact | hit-semantic | miss | off


class LedgerRow(msgspec.Struct, frozen=True, kw_only=True):
    """One per request that was judged, on whatever path it ended. `decision` is JSON: inputs, thresholds, offers
    and why the others were not given (what `rungway explain` prints)."""

    request_id: str
    started_wall_ns: int
    ended_wall_ns: int
    tenant: str
    key_id: str
    tenant_class: str
    risk: str
    action: str
    endpoint: str
    model: str
    tier: str
    version: str
    rung: int
    degraded: str
    reason: str
    outcome: str
    code: str
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    wasted_tokens: int
    cost_nusd: int
    price_input: int
    price_cached_input: int
    price_output: int
    attempts: int
    replica_id: str
    gateway_id: str
    session: str
    cache: str
    queue_wait_ms: float
    ttft_ms: float | None
    tpot_ms: float | None
    e2e_ms: float | None
    slo_met: int | None
    decision: str


class AuditEntry(msgspec.Struct, frozen=True, kw_only=True):
    """What goes into the hash chain. `kind`: downgrade | refusal | eviction | rung | override | reload | rollout. `detail` is
    JSON with sorted keys. The ledger adds sequence number, previous hash and hash."""

    wall_ns: int
    kind: str
    tenant: str
    request_id: str
    rung: int
    detail: str
