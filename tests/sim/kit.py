"""Worlds for the tests of the simulator: one tier, contracts without limits unless a test gives them some."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rungway.contracts import FakeSpec, GatewaySpec, LadderTerms, Platform, Slo, Tenant, Tier, Version
from rungway.simulate import scenario
from rungway.simulate.world import World

ROOT = Path(__file__).resolve().parents[2]
FOREVER_S = 100_000.0


def trace(name: str) -> Path:
    """A file of the public traces, or the test is skipped: they are no part of the project."""
    folder = Path(os.environ.get("RUNGWAY_TRACES") or ROOT.parent / "shared" / "traces")
    if not (folder / name).exists():
        pytest.skip(f"no traces: set RUNGWAY_TRACES to a folder with {name}")
    return folder / name


def patient(name: str, **changes: Any) -> Tenant:
    """A tenant that waits for ever for a full answer: what is seen then is the queue alone."""
    terms = {"slo": Slo(ttft_ms_p99=1e9, tpot_ms_p99=1e9, availability=0.99), **changes}
    return scenario.tenant(name, models=("small",), ladder=LadderTerms(floor="full"), **terms)


def engine(slots: int = 16, tpot_ms: float = 20.0, *, kv_tokens: int = 65_536, **changes: Any) -> Version:
    """A replica that decodes `slots` sequences at one token per `tpot_ms` each."""
    fake = FakeSpec(prefill_ms_per_1k=20.0, ttft_ms=0.0, tpot_ms=tpot_ms, kv_blocks=kv_tokens // 16)
    return scenario.version("small", max_num_seqs=slots, fake=fake, replicas_min=1, **changes)


def one_tier(
    *tenants: Tenant, version: Version | None = None, request_timeout_s: float = 600.0, **spec: Any
) -> Platform:
    """`spec`: the controller's settings. Late binding is exact (factor 1), ticks are few: a test's time is precious."""
    tier = Tier(name="small", rank=0, price=scenario.SMALL, versions=(version or engine(),))
    settings: dict[str, Any] = {"in_flight_factor": 1.0, "tick_ms": 250.0, **spec}
    platform = scenario.platform(*tenants, tiers=(tier,), **settings)
    return msgspec.structs.replace(platform, gateway=GatewaySpec(replicas=1, request_timeout_s=request_timeout_s))


def world(platform: Platform, *, seed: int = 1, **more: Any) -> World:
    return World(platform, seed=seed, quality=scenario.quality(), **more)
