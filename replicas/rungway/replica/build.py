"""From a version's configuration to its engine."""

from __future__ import annotations

from pathlib import Path

from rungway.contracts import FakeSpec, Version
from rungway.engine.fake import FakeEngine
from rungway.engine.fake_stream import FakeProfile
from rungway.engine.protocol import Engine
from rungway.errors import ModelError


def build_engine(version: Version, models_dir: Path) -> Engine:
    """The engine of this version, not started. Raises ModelError where the backend is not built in, the model cannot be
    had, or the fake profile is wrong."""
    if version.backend == "fake":
        return _fake(version)
    raise ModelError(f"{version.pool}: backend {version.backend} is not part of this build; it has fake")


def _fake(version: Version) -> FakeEngine:
    spec = version.fake or FakeSpec()
    try:
        profile = FakeProfile(
            prefill_ms_per_1k=spec.prefill_ms_per_1k,
            ttft_ms=spec.ttft_ms,
            tpot_ms=spec.tpot_ms,
            kv_blocks=spec.kv_blocks,
            block_tokens=spec.block_tokens,
            vocab=spec.vocab,
            fail=spec.fail,
        )
    except ValueError as error:
        raise ModelError(f"{version.pool}: {error}") from error
    return FakeEngine(profile, max_num_seqs=version.max_num_seqs, max_context=version.max_context)
