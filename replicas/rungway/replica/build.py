"""From a version's configuration to its engine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rungway.contracts import FakeSpec, Speculative, TierKind, Version
from rungway.engine import errors as engine_errors
from rungway.engine.fake import FakeEngine
from rungway.engine.fake_stream import FakeProfile
from rungway.engine.protocol import Engine
from rungway.engine.rules import Rules, Schedule
from rungway.errors import ModelError

if TYPE_CHECKING:
    from rungway.engine.drafting import Drafting
    from rungway.engine.embedding.encoder import Encoder


def build_engine(version: Version, models_dir: Path) -> Engine:
    """The engine of this version, not started; fetches and converts a native model if `models_dir` lacks it. Raises
    ModelError where the backend is not built in, the model cannot be had, or the fake profile is wrong."""
    if version.kind is TierKind.EMBEDDING:
        return _embedding(version, models_dir)
    match version.backend:
        case "fake":
            return _fake(version)
        case "native":
            return _native(version, models_dir)
    raise ModelError(f"{version.pool}: backend {version.backend} is not part of this build; native and fake are")


def _embedding(version: Version, models_dir: Path) -> Engine:
    from rungway.engine.embedding.engine import EmbeddingEngine

    return EmbeddingEngine(
        _encoder(version, models_dir),
        max_num_seqs=version.max_num_seqs,
        max_num_batched_tokens=version.max_num_batched_tokens,
        tokens_max=version.embed_tokens_max,
    )


def _encoder(version: Version, models_dir: Path) -> Encoder:
    if version.backend == "fake":
        from rungway.engine.embedding.fake import FakeEncoder

        profile = _profile(version)
        if profile.fail == "start":
            raise ModelError(f"{version.pool}: the fake engine is set to fail at start")
        return FakeEncoder(profile, max_context=version.max_context)
    if version.backend != "native":
        raise ModelError(f"{version.pool}: backend {version.backend} is not part of this build; native and fake are")
    # Imported here: torch takes seconds and hundreds of megabytes that a fake replica should not pay.
    from rungway.engine.embedding.bert import load_encoder
    from rungway.engine.loader import fetch_model

    try:
        path = fetch_model(version.model, models_dir)
        return load_encoder(path, max_context=version.max_context, dtype=version.dtype, device=version.device)
    except engine_errors.ModelError as error:
        raise ModelError(f"{version.pool}: {error}") from error


def _fake(version: Version) -> Engine:
    return FakeEngine(_profile(version), max_num_seqs=version.max_num_seqs, max_context=version.max_context)


def _profile(version: Version) -> FakeProfile:
    spec = version.fake or FakeSpec()
    try:
        return FakeProfile(
            prefill_ms_per_1k=spec.prefill_ms_per_1k,
            ttft_ms=spec.ttft_ms,
            tpot_ms=spec.tpot_ms,
            kv_blocks=spec.kv_blocks,
            block_tokens=spec.block_tokens,
            vocab=spec.vocab,
            fail=spec.fail,
            prefix_cache=spec.prefix_cache,
            prefix_keys_max=version.prefix_keys_max,
            prefix_key_blocks=version.prefix_key_blocks,
            kv_soft_quota=version.kv_soft_quota,
            step_tokens=version.max_num_batched_tokens if spec.shared_steps else None,
        )
    except ValueError as error:
        raise ModelError(f"{version.pool}: {error}") from error


def _native(version: Version, models_dir: Path) -> Engine:
    # Imported here: torch takes seconds and hundreds of megabytes that a fake replica should not pay.
    from rungway.engine.compiling import GrammarLimits
    from rungway.engine.engine import NativeEngine
    from rungway.engine.loader import fetch_model

    try:
        return NativeEngine.from_dir(
            fetch_model(version.model, models_dir),
            max_num_seqs=version.max_num_seqs,
            max_context=version.max_context,
            max_num_batched_tokens=version.max_num_batched_tokens,
            kv_blocks=version.kv_blocks,
            block_tokens=version.block_tokens,
            dtype=version.dtype,
            device=version.device,
            graph_rows_max=version.graph_rows_max,
            ranks=version.tensor_parallel,
            ranks_timeout_s=version.tensor_parallel_timeout_s,
            rules=rules_of(version),
            grammar=GrammarLimits(
                text_bytes_max=version.constraint_bytes_max,
                timeout_s=version.constraint_compile_s,
                waiting_max=version.constraints_waiting_max,
                cached_max=version.constraints_cached_max,
            ),
            drafting=_drafting(version.speculative, models_dir),
        )
    except engine_errors.ModelError as error:
        raise ModelError(f"{version.pool}: {error}") from error


def _drafting(spec: Speculative, models_dir: Path) -> Drafting | None:
    from rungway.engine.drafting import Drafting
    from rungway.engine.loader import fetch_model

    if spec.method == "off":
        return None
    model = fetch_model(spec.model, models_dir) if spec.method == "draft" and spec.model else None
    return Drafting(model, spec.tokens_max, spec.batch_max)


def rules_of(version: Version) -> Rules:
    """What a version sets about its engine's scheduling."""
    return Rules(
        schedule=Schedule(version.schedule),
        long_prefill_tokens=version.long_prefill_tokens,
        long_prefill_tokens_min=version.long_prefill_tokens_min,
        kv_watermark=version.kv_watermark,
        kv_soft_quota=version.kv_soft_quota,
        prefix_keys_max=version.prefix_keys_max,
        prefix_key_blocks=version.prefix_key_blocks,
        step_timeout_s=version.step_timeout_s,
    )
