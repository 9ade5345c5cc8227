"""Configuration of the processes, after parsing. The rest, and the conventions: contracts.py, which has these names, too."""

from __future__ import annotations

import msgspec

from rungway.leases import LeaseSpec
from rungway.overload import PreemptSpec, ShedSpec

_CLASS_SHARES = {"interactive": 0.6, "standard": 0.3, "batch": 0.1}


class GatewaySpec(msgspec.Struct, frozen=True, kw_only=True):
    replicas: int = 1
    body_bytes_max: int = 4_000_000
    request_timeout_s: float = 600.0
    revocation_bound_s: float = 2.0
    idempotency_ttl_s: float = 600.0
    idempotency_entries_max: int = 10_000
    stream_buffer_deltas_max: int = 4096
    controller_wait_s: float = 20.0
    inter_token_timeout_s: float = 30.0
    retries_max: int = 2
    flights_max: int = 10_000
    constraint_bytes_max: int = 65_536
    constraint_check_s: float = 2.0
    prefix_keys_max: int = 32
    embedding_inputs_max: int = 2048
    completion_prompts_max: int = 128
    prompt_logprobs_max: int = 20
    prompt_logprobs_values_max: int = 65_536


class ControllerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of the controller. Shares are minimum shares of dispatch per class while that class is backlogged."""

    class_shares: dict[str, float] = msgspec.field(default_factory=lambda: dict(_CLASS_SHARES))
    queue_timeout_s: float = 60.0
    replica_stale_s: float = 1.0
    in_flight_factor: float = 1.1
    breaker_failures: int = 20
    breaker_open_s: float = 2.0
    retry_budget_floor: int = 3
    orphan_wait_s: float = 10.0
    lost_wait_s: float = 30.0
    settled_memory: int = 50_000
    tick_ms: float = 50.0
    order: str = "vtc"  # vtc | dlpm (policies/locality.py)
    locality_quantum_tokens: int = 8192
    locality_imbalance_max: float = 0.5
    preempt: PreemptSpec = PreemptSpec()
    shed: ShedSpec = ShedSpec()
    lease: LeaseSpec = LeaseSpec()


class ChannelSpec(msgspec.Struct, frozen=True, kw_only=True):
    heartbeat_ms: float = 250.0
    lost_after_ms: float = 2000.0
    window_batches: int = 256
    buffer_bytes_max: int = 64_000_000
