"""Configuration after parsing: frozen values that policies, controller and gateways share.

Conventions: `None` in a limit means unlimited (`unlimited` in YAML; an absent key is the plan's default by now), `0` that
nothing. Money: integer nano-dollars (`_nusd`, 1e-9 USD), prices per 1,000 tokens. Units of time are in the names.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from rungway.contracts_processes import ChannelSpec as ChannelSpec
from rungway.contracts_processes import ControllerSpec as ControllerSpec
from rungway.contracts_processes import GatewaySpec as GatewaySpec
from rungway.engine_specs import FakeSpec as FakeSpec
from rungway.engine_specs import Speculative as Speculative

NUSD_PER_USD = 1_000_000_000
EMBED_STEPS_AHEAD = 64  # full steps of work that a replica for embeddings may hold


class TenantClass(StrEnum):
    INTERACTIVE = "interactive"
    STANDARD = "standard"
    BATCH = "batch"


CLASS_ORDER: tuple[TenantClass, ...] = (TenantClass.INTERACTIVE, TenantClass.STANDARD, TenantClass.BATCH)


class TierKind(StrEnum):
    """What a tier answers with: text, or a vector for each text."""

    TEXT = "text"
    EMBEDDING = "embedding"


class Price(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Nano-dollars per 1,000 tokens."""

    input: int
    cached_input: int
    output: int

    def cost_nusd(self, *, input_tokens: int, cached_tokens: int, output_tokens: int) -> int:
        """Price of one answer; `cached_tokens` are part of `input_tokens`. Rounds up to a whole nano-dollar."""
        fresh = input_tokens - cached_tokens
        total = fresh * self.input + cached_tokens * self.cached_input + output_tokens * self.output
        return -(-total // 1000)


class ApiKey(msgspec.Struct, frozen=True, kw_only=True):
    """A key as the platform knows it: never the text, only its SHA-256 (hex)."""

    id: str
    sha256: str
    expires_ns: int | None = None
    scopes: tuple[str, ...] = ("inference", "usage")
    revoked: bool = False


class Quotas(msgspec.Struct, frozen=True, kw_only=True):
    requests_per_minute: int | None
    tokens_per_minute: int | None
    concurrent_requests: int | None
    queue_max: int


class Isolation(msgspec.Struct, frozen=True, kw_only=True):
    """Shares are fractions of a pool's in-flight token capacity, 0 to 1."""

    in_flight_share_max: float = 0.5
    reserved_share: float = 0.0
    retry_budget_ratio: float = 0.2
    shard_replicas: int | None = None  # of each pool; None = all
    reclaim_s: float | None = 2.0  # for reserved_share; None = by new grants only, however long that takes


class Budget(msgspec.Struct, frozen=True, kw_only=True):
    nusd: int | None
    per: str = "month"  # day | week | month
    timezone: str = "UTC"
    at_limit: str = "refuse"  # degrade | refuse


class Slo(msgspec.Struct, frozen=True, kw_only=True):
    ttft_ms_p99: float
    tpot_ms_p99: float
    availability: float


class LadderTerms(msgspec.Struct, frozen=True, kw_only=True):
    """What a tenant lets the ladder do: the deepest rung allowed by name, and rungs never used for it."""

    floor: str = "defer"
    opt_out: tuple[str, ...] = ()


class CacheTerms(msgspec.Struct, frozen=True, kw_only=True):
    """`mode` is what a request gets that sends no x-rungway-cache header; `ladder` allows rung cached_answer."""

    mode: str = "off"  # off | exact
    ladder: bool = True
    ttl_s: float = 300.0
    entries_max: int = 1000


class Tenant(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    plan: str
    keys: tuple[ApiKey, ...]
    tenant_class: TenantClass
    weight: float
    models: tuple[str, ...]
    value_nusd: dict[str, int]
    quotas: Quotas
    isolation: Isolation
    budget: Budget
    slo: Slo
    ladder: LadderTerms
    cache: CacheTerms
    risk_high_tier_min: str | None = None
    suspended: bool = False
    template: str | None = None


class Version(msgspec.Struct, frozen=True, kw_only=True):
    """One model + weights + engine build of a tier: a pool of equal replicas."""

    name: str
    tier: str
    model: str
    backend: str  # native | fake | vllm | openai
    replicas_min: int
    replicas_max: int
    replica_cost_nusd_per_hour: int
    max_num_seqs: int
    max_context: int
    weight: float = 1.0
    default_max_tokens: int = 256
    max_num_batched_tokens: int = 512
    kv_blocks: int | None = None
    block_tokens: int = 16
    dtype: str = "auto"
    device: str = "auto"
    num_gpus: float = 0.0
    num_cpus: float = 0.1
    ray_actor_options: dict[str, object] = {}
    fake: FakeSpec | None = None
    prefix_keys_max: int = 4096
    prefix_key_blocks: int = 1
    constraint_bytes_max: int = 131_072
    constraint_compile_s: float = 5.0
    constraints_waiting_max: int = 256
    constraints_cached_max: int = 128
    schedule: str = "fcfs"  # fcfs | lpm
    long_prefill_tokens: int | None = None
    kv_watermark: float = 0.01
    kv_soft_quota: float | None = None
    tensor_parallel: int = 1
    tensor_parallel_timeout_s: float = 60.0
    speculative: Speculative = Speculative()
    graph_rows_max: int = 256
    kind: TierKind = TierKind.TEXT  # the tier's
    long_prefill_tokens_min: int = 4
    step_timeout_s: float = 120.0

    @property
    def embed_tokens_max(self) -> int:
        """Tokens of all inputs that requests for embeddings may have on a replica at a time, so the most of one request."""
        if self.kv_blocks is not None:
            return self.kv_blocks * self.block_tokens
        return EMBED_STEPS_AHEAD * self.max_num_batched_tokens

    @property
    def sources(self) -> tuple[str, ...]:
        """Where the weights of a native version are: its model and, where it has one, its draft model."""
        draft = self.speculative.model
        return (self.model,) if draft is None else (self.model, draft)

    @property
    def cache_block_tokens(self) -> int:
        """Tokens per block of the engine's prefix cache."""
        return (self.fake or FakeSpec()).block_tokens if self.backend == "fake" else self.block_tokens

    @property
    def pool(self) -> str:
        """Name of the pool: `tier/version`."""
        return f"{self.tier}/{self.name}"


class Tier(msgspec.Struct, frozen=True, kw_only=True):
    """A capability level. `rank` 0 is the smallest; a bigger rank is a more capable tier. Tiers for embeddings have rank 0:
    none stands in for another, as vectors of different models cannot be compared."""

    name: str
    rank: int
    price: Price
    versions: tuple[Version, ...]
    kind: TierKind = TierKind.TEXT


class ModelAlias(msgspec.Struct, frozen=True, kw_only=True):
    """A name that a client may put in `model`, and the tiers it may be served by."""

    name: str
    tiers: tuple[str, ...]


class RungSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Rung k of the ladder. `enter` is the pressure at which it applies when moving up."""

    index: int
    name: str
    enter: float


class LadderSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The declared ladder. `rungs[k].index == k`; rung 0 is `full`. `digest` names this version of it."""

    rungs: tuple[RungSpec, ...]
    leave: float = 0.7
    dwell_up_s: float = 10.0
    dwell_down_s: float = 60.0
    context_limit_tokens: int = 1024
    template: str = "The service is busy and cannot write a full answer now. Please try again in a moment."
    digest: str = ""


class Platform(msgspec.Struct, frozen=True, kw_only=True):
    """The whole configuration of a cell. `digest` is a SHA-256 over the effective values, without secrets."""

    cell: str
    host: str
    port: int
    state_dir: str
    tenants_dir: str
    database: str
    gateway: GatewaySpec
    controller: ControllerSpec
    channel: ChannelSpec
    tiers: tuple[Tier, ...]
    models: tuple[ModelAlias, ...]
    ladder: LadderSpec
    tenants: tuple[Tenant, ...]
    demo_keys: tuple[str, ...] = ()
    digest: str = ""

    def tier(self, name: str) -> Tier:
        return next(tier for tier in self.tiers if tier.name == name)

    def tenant(self, name: str) -> Tenant | None:
        return next((tenant for tenant in self.tenants if tenant.name == name), None)

    def versions(self) -> tuple[Version, ...]:
        return tuple(version for tier in self.tiers for version in tier.versions)
