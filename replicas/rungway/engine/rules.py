"""What an operator may set about an engine's scheduling."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Schedule(StrEnum):
    """Order inside a share: by age, or longest cached prefix first within bounds (lpm.py)."""

    FCFS = "fcfs"
    LPM = "lpm"


@dataclass(frozen=True, kw_only=True)
class Rules:
    """`long_prefill_tokens`: most tokens of one request's prefill in a step that others share, None = what was measured to
    leave decoding its pace (chunks.py), but `long_prefill_tokens_min` at least. `kv_watermark`: part of the KV blocks that an admission leaves free while others
    run. `kv_soft_quota`: part of the KV blocks, running and cached, that a share of weight 1 may hold before its blocks
    go first, None = no quota. `prefix_keys_max`: prefix blocks whose keys are told to the controller, 0 = none,
    one for every `prefix_key_blocks` of a text. `step_timeout_s`: a step that lasts longer has hung."""

    schedule: Schedule = Schedule.FCFS
    long_prefill_tokens: int | None = None
    long_prefill_tokens_min: int = 4
    kv_watermark: float = 0.01
    kv_soft_quota: float | None = None
    prefix_keys_max: int = 4096
    prefix_key_blocks: int = 1
    step_timeout_s: float = 120.0


DEFAULT_RULES = Rules()
