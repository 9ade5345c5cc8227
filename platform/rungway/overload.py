"""What the controller does when there is more work than room: how it stops running work for other work, and whom it turns
away. Part of `contracts.ControllerSpec`."""

from __future__ import annotations

import msgspec


class PreemptSpec(msgspec.Struct, frozen=True, kw_only=True):
    """`at`: part of its first-token target that a request waits before lower classes give way to it (None = they never
    do). A request is stopped at most `evictions_max` times (0 = never, for nobody), and left alone for `rest_s` once it
    runs again. A place that was freed is kept for `claim_s` for the request that it was freed for."""

    at: float | None = 0.5
    evictions_max: int = 2
    rest_s: float = 5.0
    claim_s: float = 2.0


class Ramp(msgspec.Struct, frozen=True, kw_only=True):
    """Load = expected wait / first-token target. Nobody is turned away up to `begin`, everybody from `full` on."""

    begin: float
    full: float


# How often a late request is overtaken by its tenant's that are on time: at most one dispatch in so many and one is late.
LATE_TURN = 64
# Weighted tokens per unit of weight by which a tenant that has only late requests lets others of its class go ahead.
LATE_QUANTUM = 8192


class ShedSpec(msgspec.Struct, frozen=True, kw_only=True):
    """`target_factor`: a request without a deadline of its own that waits for longer than so many first-token targets, or
    would, is late: it goes behind those that are not, at most `late_turn` of its tenant's and `late_quantum_tokens` of others'
    overtake it, and the ladder answers it by its own wait (None = nobody is late). The ramps turn away, new requests by the
    wait that they expect and late ones by theirs: tenants over their share first; the others where theirs is full."""

    target_factor: float | None = 1.0
    late_turn: int = LATE_TURN
    late_quantum_tokens: int = LATE_QUANTUM
    interactive: Ramp = Ramp(begin=12.0, full=24.0)
    standard: Ramp = Ramp(begin=10.0, full=20.0)
    batch: Ramp = Ramp(begin=8.0, full=16.0)
