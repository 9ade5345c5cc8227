"""The shape of `tiers:` in the platform file."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, model_validator

from rungway import contracts
from rungway.settings import rules
from rungway.settings.rules import Count, NotNegative, Positive, Usd
from rungway.settings.section import Section, refuse

BACKENDS = ("native", "fake")
DTYPES = (
    "auto",
    "bfloat16",
    "float16",
    "float32",
    "int8",
    "int4",
    "int4-g32",
    "int4-g128",
    "int4-g32-sym",
    "int4-g128-sym",
)
EMBEDDING_DTYPES = ("auto", "float32", "bfloat16", "float16")
_FAKE = contracts.FakeSpec()
_SPECULATIVE = contracts.Speculative()


class Price(Section):
    input: Usd = Field(description="Uncached prompt tokens.")
    cached_input: Usd = Field(description="Prompt tokens that the prefix cache supplied.")
    output: Usd = Field(description="Output tokens.")


class Replicas(Section):
    min: Count = Field(default=1, description="Replicas always kept.")
    max: Count = Field(default=1, description="Replicas at most.")

    @model_validator(mode="after")
    def _in_order(self) -> Replicas:
        if self.min > self.max:
            raise refuse("min", f"{self.min} is more than max, {self.max} (allowed: min at most max)")
        return self


class Fake(Section):
    prefill_ms_per_1k: NotNegative = Field(
        default=_FAKE.prefill_ms_per_1k, description="Prefill time per 1,000 tokens, ms."
    )
    ttft_ms: NotNegative = Field(default=_FAKE.ttft_ms, description="Fixed time before the first token, ms.")
    tpot_ms: NotNegative = Field(default=_FAKE.tpot_ms, description="Time per output token, ms.")
    kv_blocks: Count = Field(default=_FAKE.kv_blocks, description="Blocks of its pretended KV cache.")
    block_tokens: Count = Field(default=_FAKE.block_tokens, description="Tokens per block.")
    vocab: Annotated[str, rules.one_of("words")] = Field(default=_FAKE.vocab, description="What a token is.")
    fail: Annotated[str | None, rules.text("text or null", null_ok=True)] = Field(
        default=None, description="A failure that every request meets; null = none."
    )
    prefix_cache: rules.Flag = Field(
        default=_FAKE.prefix_cache,
        description="Whether prompts that begin alike share blocks and prefill time, as in the native engine; a word is a token.",
    )
    shared_steps: rules.Flag = Field(
        default=_FAKE.shared_steps,
        description="Whether all sequences share steps of `max_num_batched_tokens`, as in the native engine: prompts are computed in chunks, and a long one slows its neighbours.",
    )


class Speculative(Section):
    method: Annotated[str, rules.one_of("off", "ngram", "draft")] = Field(
        default=_SPECULATIVE.method,
        description="Where drafts come from: the text itself (`ngram`) or a smaller model (`draft`). Answers stay the same.",
    )
    model: Annotated[str | None, rules.source(null_ok=True)] = Field(
        default=None, description="The draft model's weights; its tokenizer must be the version's own."
    )
    tokens_max: Annotated[int, rules.whole(1, 16)] = Field(
        default=_SPECULATIVE.tokens_max,
        description="Drafts of one sequence in a step, at most; the engine takes as many as pay, often none.",
    )
    batch_max: Count = Field(
        default=_SPECULATIVE.batch_max, description="No drafts while more sequences than this decode."
    )

    @model_validator(mode="after")
    def _whole(self) -> Speculative:
        if self.method == "draft" and not self.model:
            raise refuse("method", "method draft needs `model` (allowed: hf:, path: or pypi: source)")
        if self.method != "draft" and self.model:
            raise refuse("model", "is only for `method: draft`")
        return self


class Version(Section):
    model: Annotated[str, rules.source()] = Field(
        default="", description="Where the weights are. Not needed by `fake`."
    )
    backend: Annotated[str, rules.one_of(*BACKENDS)] = Field(default="native", description="The engine.")
    replicas: Replicas = Field(default_factory=Replicas, description="Size of the pool.")
    replica_cost_usd_per_hour: Usd = Field(
        default=0, description="What one replica costs us, for the ledger's cost view."
    )
    max_num_seqs: Count = Field(default=16, description="Sequences in one batch.")
    max_context: Count = Field(
        default=2048,
        description="Prompt and output tokens of one request; of an embedding tier, tokens of one input, at most the model's positions.",
    )
    weight: NotNegative = Field(default=1.0, description="Share of the tier's traffic among its versions.")
    default_max_tokens: Count = Field(default=256, description="Output bound where the client sends none.")
    max_num_batched_tokens: Count = Field(
        default=512, description="Tokens of one engine step (prefill chunk and decode; inputs of many requests)."
    )
    kv_blocks: Annotated[int | None, rules.whole(1, words=("auto",))] = Field(
        default=None,
        description="Blocks of KV cache. Of an embedding tier, which has none: times `block_tokens`, the tokens that requests may have on a replica at a time (auto: 64 steps).",
    )
    block_tokens: Count = Field(default=16, description="Tokens per KV block.")
    dtype: Annotated[str, rules.one_of(*DTYPES)] = Field(
        default="auto",
        description="Numbers of weights and activations. `auto`: a quantised checkpoint's own, else on CPU the fastest that passes a self-test at load; `float32` is exact. docs/quantisation.md has them all.",
    )
    device: Annotated[str, rules.text("`auto`, `cpu`, `cuda` or `cuda:N`", r"auto|cpu|cuda(:\d+)?")] = Field(
        default="auto", description="Where it runs."
    )
    num_gpus: NotNegative = Field(default=0.0, description="GPUs that Ray reserves for a replica.")
    num_cpus: NotNegative = Field(default=0.1, description="CPUs that Ray reserves for a replica.")
    ray_actor_options: Annotated[dict[str, Any], rules.plain_mapping()] = Field(
        default_factory=dict, description="More options for Ray, passed on as they are."
    )
    schedule: Annotated[str, rules.one_of("fcfs", "lpm")] = Field(
        default="fcfs",
        description="Order of a tenant's own requests in the engine: by age, or longest cached prefix first within bounds.",
    )
    long_prefill_tokens: Annotated[int | None, rules.whole(1, words=("auto",))] = Field(
        default=None,
        description="Most tokens of one prompt in a step that others share. `auto`: so many that a step with it takes about 2.25 times what its decodes would take alone with contexts as long as theirs are, as measured, and at most half a step.",
    )
    long_prefill_tokens_min: Count = Field(
        default=4, description="With `auto`: at least so many, whatever they cost, so that a prompt gets on."
    )
    kv_watermark: Annotated[float, rules.number(0, 0.5)] = Field(
        default=0.01, description="Part of the KV blocks that an admission leaves free while others run."
    )
    kv_soft_quota: Annotated[float | None, rules.number(0, 1, above=True, words=("off",))] = Field(
        default=None,
        description="Part of the KV blocks, cached ones included, that a tenant may hold per unit of its weight before its blocks are the first to go.",
    )
    step_timeout_s: Positive = Field(
        default=120.0,
        description="Longest step of a native engine; one that lasts longer has hung, and its replica is replaced.",
    )
    prefix_keys_max: Annotated[int, rules.whole(0, 65_536)] = Field(
        default=4096,
        description="Keys of prefix blocks that a replica tells the controller, for placement by locality; 0 = none.",
    )
    prefix_key_blocks: Annotated[int, rules.whole(1, 256)] = Field(
        default=1,
        description="Every how many blocks of a prompt have a key: more make longer beginnings known, in coarser steps.",
    )
    constraint_bytes_max: Count = Field(
        default=131_072, description="Largest constraint that a replica compiles, bytes; above the gateway's."
    )
    constraint_compile_s: Positive = Field(default=5.0, description="Longest time to compile a constraint.")
    constraints_waiting_max: Count = Field(
        default=256, description="Requests of a replica that may wait for their constraint at a time."
    )
    constraints_cached_max: Count = Field(default=128, description="Compiled constraints that a replica keeps.")
    tensor_parallel: Annotated[int, rules.whole(1, 64)] = Field(
        default=1,
        description="Processes that one replica divides the model over; on GPUs as many devices, and `num_gpus` of at least that.",
    )
    tensor_parallel_timeout_s: Positive = Field(
        default=60.0, description="How long one of them may take in a step before the replica is given up."
    )
    graph_rows_max: Annotated[int, rules.whole(0, 4096)] = Field(
        default=256, description="On a GPU: decode steps of up to so many rows are recorded as CUDA graphs; 0 = none."
    )
    fake: Fake | None = Field(default=None, description="Behaviour of the fake engine.")

    speculative: Speculative = Field(default_factory=Speculative, description="Several tokens in one step.")

    @model_validator(mode="after")
    def _fits(self) -> Version:
        if self.backend == "fake" and self.speculative.method != "off":
            raise refuse("speculative", "is only for `backend: native`")
        if self.backend == "native" and not self.model:
            raise refuse("backend", "backend native needs `model` (allowed: hf:, path: or pypi: source)")
        if self.backend != "fake" and self.fake is not None:
            raise refuse("fake", "is only for `backend: fake`")
        if self.tensor_parallel > 1 and self.backend != "native":
            raise refuse("tensor_parallel", "is only for `backend: native`")
        if self.tensor_parallel > 1 and 0 < self.num_gpus < self.tensor_parallel:
            raise refuse("tensor_parallel", f"needs `num_gpus` of at least {self.tensor_parallel}")
        if self.default_max_tokens > self.max_context:
            raise refuse("default_max_tokens", f"is more than max_context, {self.max_context}")
        return self


class Tier(Section):
    price_usd_per_1k: Price = Field(description="Price per 1,000 tokens; every one is written out, 0 = free.")
    kind: Annotated[contracts.TierKind, rules.one_of(*contracts.TierKind)] = Field(
        default=contracts.TierKind.TEXT,
        description="What it answers with: `text`, or `embedding` for POST /v1/embeddings. docs/embeddings.md.",
    )
    rank: Annotated[int | None, rules.whole(0, 1000)] = Field(
        default=None,
        description="Capability, bigger is better. Absent in all tiers: by price, the cheapest is the smallest. Not for embeddings.",
    )
    versions: dict[rules.Name, Version] = Field(
        min_length=1, description="Versions by name; each is a pool of replicas."
    )

    @model_validator(mode="after")
    def _of_its_kind(self) -> Tier:
        if self.kind == contracts.TierKind.TEXT:
            return self
        if self.rank is not None:
            raise refuse("rank", "is only for tiers of kind text: no embedding tier stands in for another")
        if len({(version.backend, version.model) for version in self.versions.values()}) > 1:
            raise refuse("versions", "must all have one model: vectors of different models cannot be compared")
        for version in self.versions.values():
            if version.speculative.method != "off" or version.tensor_parallel > 1:
                raise refuse("versions", "`speculative` and `tensor_parallel` are only for tiers of kind text")
            if version.dtype not in EMBEDDING_DTYPES:
                allowed = ", ".join(EMBEDDING_DTYPES)
                raise refuse("versions", f"dtype {version.dtype} is not for embeddings (allowed: {allowed})")
        return self
