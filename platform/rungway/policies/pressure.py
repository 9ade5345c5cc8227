"""How hard a pool is pressed: one number for the ladder, and the signal that it came from.

1.0 is the point where promises start to break: the work that waits has used up its TTFT target, or the SLO's error
budget burns as fast as it is given. The number is the largest of four parts:

    queue_wait   queue_wait_ms / ttft_target_ms
    slo_burn     burn rate, at most DEGRADES_MAX
    kv_use       share of KV blocks in use       } occupancy: at most FULL_AND_HEALTHY
    in_flight    in_flight / capacity            } unless work has waited for WAITING_FROM of its target

A full pool that keeps nobody waiting is what the platform is for, so occupancy alone never enters a rung. It does hold
one (FULL_AND_HEALTHY lies above the ladder's default `leave`): a pool that is full while degraded has no slack to be
generous with, and leaving would only bring the queue back. The burn rate is capped because it says that answers are
bad, not that waiting ones exist: it may ask for cheaper answers, but answers without a model need a real queue.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

PRESSURE_MAX = 100.0
FULL_AND_HEALTHY = 0.89
WAITING_FROM = 0.5
DEGRADES_MAX = 1.9


class PressureSignal(StrEnum):
    """The closed set of reasons that a rung can have; also the order in which ties are named."""

    QUEUE_WAIT = "queue_wait"
    SLO_BURN = "slo_burn"
    KV_USE = "kv_use"
    IN_FLIGHT = "in_flight"


QUIET: tuple[float, str] = (0.0, PressureSignal.QUEUE_WAIT)
"""The pressure where nobody waits."""


@dataclass(frozen=True, slots=True)
class PoolSignals:
    """What a pool shows. `queue_wait_ms` is how long waiting work has waited by now (oldest or p90; 0 when nobody
    waits); `capacity` is the number of sequences that late binding allows, in the unit of `in_flight`; `kv_use` is 0 to
    1; `slo_burn` is the error-budget burn rate (1 = exactly as fast as granted)."""

    queue_wait_ms: float
    ttft_target_ms: float
    kv_use: float
    in_flight: float
    capacity: float
    slo_burn: float


def pressure(signals: PoolSignals) -> tuple[float, str]:
    """(pressure 0 to PRESSURE_MAX, the `PressureSignal` that set it).

    A pool without capacity has no occupancy: its pressure comes from the work that waits for it. A TTFT target of 0 is
    taken as 1 ms.
    """
    waited = max(signals.queue_wait_ms, 0.0) / max(signals.ttft_target_ms, 1.0)
    occupancy_max = PRESSURE_MAX if waited >= WAITING_FROM else FULL_AND_HEALTHY
    in_flight = signals.in_flight / signals.capacity if signals.capacity > 0 else 0.0
    parts = (
        (waited, PressureSignal.QUEUE_WAIT),
        (min(signals.slo_burn, DEGRADES_MAX), PressureSignal.SLO_BURN),
        (min(signals.kv_use, occupancy_max), PressureSignal.KV_USE),
        (min(in_flight, occupancy_max), PressureSignal.IN_FLIGHT),
    )
    value, name = max(parts, key=lambda part: part[0])
    return min(max(value, 0.0), PRESSURE_MAX), name
