"""Parts of a `contracts.Version` that say how its engine behaves."""

from __future__ import annotations

import msgspec


class FakeSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Behaviour of the fake engine; times in milliseconds."""

    prefill_ms_per_1k: float = 20.0
    ttft_ms: float = 5.0
    tpot_ms: float = 5.0
    kv_blocks: int = 4096
    block_tokens: int = 16
    vocab: str = "words"
    fail: str | None = None
    prefix_cache: bool = False
    shared_steps: bool = False


class Speculative(msgspec.Struct, frozen=True, kw_only=True):
    """Speculative decoding of a native engine. `model` is the draft model's source, for method `draft` only."""

    method: str = "off"  # off | ngram | draft
    model: str | None = None
    tokens_max: int = 5
    batch_max: int = 4
