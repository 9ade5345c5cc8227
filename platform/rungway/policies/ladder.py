"""The degradation ladder: which rung a pool stands on, as literal tables that `step` walks.

A rung is a named cap on offers (`RungName`; `offers.quote` applies them). Caps are cumulative: rung k applies caps 1..k,
less those that a tenant opted out of or that lie deeper than its floor. Which rung is in force follows from one number,
the pressure (see `pressure.py`), through `MOVES`. Hysteresis and dwell are as in docs/ladder.md, whose diagram is
`diagram()`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from rungway.contracts import LadderSpec, Tenant

# Start value of `since_ns`: no change yet, so that the first move need not wait for a dwell.
NEVER_NS = -(1 << 62)
# A pressure this many times the `enter` of the rung in force, asking for at least SURGE_RUNGS more rungs, does not wait
# for the dwell. The factor is far above the ripple that dwell is there to absorb (+-10 % is a factor of 1.22).
SURGE_FACTOR = 2.0
SURGE_RUNGS = 2
_NS_PER_S = 1_000_000_000


class RungName(StrEnum):
    """Every rung that a ladder may declare, in the default order."""

    FULL = "full"
    RERANK_OFF = "rerank_off"
    BEST_OF_1 = "best_of_1"
    CONTEXT_TRIM = "context_trim"
    SMALL_TIER = "small_tier"
    CACHED_ANSWER = "cached_answer"
    TEMPLATE = "template"
    DEFER = "defer"


CAPS: dict[RungName, str] = {
    RungName.FULL: "nothing is capped",
    RungName.RERANK_OFF: "no reranking; no offer of today reranks, so this caps nothing yet",
    RungName.BEST_OF_1: "best_of falls to n: no sampled sequence is thrown away",
    RungName.CONTEXT_TRIM: "old turns are dropped from prompts longer than the context limit",
    RungName.SMALL_TIER: "the smallest tier that the contract opens serves, whatever was asked for",
    RungName.CACHED_ANSWER: "a valid exact answer from the tenant's own cache is given even if none was asked for",
    RungName.TEMPLATE: "a fixed text instead of a model, except for actions that write and for constrained answers",
    RungName.DEFER: "nothing is offered: 503 with Retry-After",
}


class Signal(StrEnum):
    """What the pressure says about the rung in force."""

    SURGE = "surge"  # far above: SURGE_FACTOR times the enter in force and SURGE_RUNGS or more deeper
    RISE = "rise"  # a deeper rung's enter is reached
    HOLD = "hold"  # between leave and the next enter, or at rung 0 with nothing to leave
    FALL = "fall"  # below leave


class Dwell(StrEnum):
    """Whether the last change is long enough ago for a move in the signal's direction."""

    RUNNING = "running"
    OVER = "over"


class Move(StrEnum):
    STAY = "stay"
    JUMP = "jump to the target"
    ONE_DOWN = "one rung down"


MOVES: dict[tuple[Signal, Dwell], Move] = {
    (Signal.SURGE, Dwell.RUNNING): Move.JUMP,
    (Signal.SURGE, Dwell.OVER): Move.JUMP,
    (Signal.RISE, Dwell.RUNNING): Move.STAY,
    (Signal.RISE, Dwell.OVER): Move.JUMP,
    (Signal.HOLD, Dwell.RUNNING): Move.STAY,
    (Signal.HOLD, Dwell.OVER): Move.STAY,
    (Signal.FALL, Dwell.RUNNING): Move.STAY,
    (Signal.FALL, Dwell.OVER): Move.ONE_DOWN,
}


@dataclass(frozen=True, slots=True)
class LadderState:
    """Where one ladder stands. `rung` is the automatic rung and keeps moving under an override; `since_ns` is when it
    last changed. An override holds until `override_until_ns` (exclusive); None means none."""

    rung: int = 0
    since_ns: int = NEVER_NS
    override: int | None = None
    override_until_ns: int = 0

    @property
    def in_force(self) -> int:
        """The rung that offers are capped by, as of the last `step`."""
        return self.rung if self.override is None else self.override


@dataclass(frozen=True, slots=True)
class Transition:
    """A change of the rung in force. `why`: a `Signal`, or `override`, `override_cleared`, `override_expired`."""

    from_rung: int
    to_rung: int
    pressure: float
    why: str


def step(state: LadderState, pressure: float, now_ns: int, spec: LadderSpec) -> tuple[LadderState, Transition | None]:
    """Walk `MOVES` once. The transition is None when the rung in force stays.

    Under an override the automatic rung moves silently, so that the ladder is where the load wants it when the override
    ends. The step that finds an override expired does only that; the automatic rung moves at the next step.
    """
    if state.override is not None and now_ns >= state.override_until_ns:
        return _without_override(state, pressure, "override_expired")
    target = target_rung(pressure, spec)
    signal = signal_of(state.rung, target, pressure, spec)
    dwell_s = spec.dwell_down_s if signal is Signal.FALL else spec.dwell_up_s
    dwell = Dwell.OVER if now_ns - state.since_ns >= dwell_s * _NS_PER_S else Dwell.RUNNING
    move = MOVES[signal, dwell]
    if move is Move.STAY:
        return state, None
    rung = target if move is Move.JUMP else state.rung - 1
    moved = replace(state, rung=rung, since_ns=now_ns)
    if state.override is not None:
        return moved, None
    return moved, Transition(state.rung, rung, pressure, signal)


def at_rest(state: LadderState) -> bool:
    """On the first rung, by itself: without pressure `step` leaves it there."""
    return state.rung == 0 and state.override is None


def target_rung(pressure: float, spec: LadderSpec) -> int:
    """The deepest rung whose `enter` is reached; 0 when none is (or the pressure is not a number)."""
    return max((rung.index for rung in spec.rungs if rung.enter <= pressure), default=0)


def signal_of(rung: int, target: int, pressure: float, spec: LadderSpec) -> Signal:
    """Classify the pressure against the rung in force."""
    if target > rung:
        # From rung 0 the yardstick is the first rung's enter: 0 times anything is no yardstick.
        entered = spec.rungs[max(rung, 1)].enter
        surge = target - rung >= SURGE_RUNGS and pressure >= SURGE_FACTOR * entered
        return Signal.SURGE if surge else Signal.RISE
    return Signal.FALL if rung > 0 and pressure < spec.leave else Signal.HOLD


def set_override(
    state: LadderState, rung: int, until_ns: int, spec: LadderSpec, pressure: float = 0.0
) -> tuple[LadderState, Transition | None]:
    """Hold `rung` until `until_ns`, whatever the pressure. `rung` must be one of the ladder's."""
    assert 0 <= rung < len(spec.rungs), "the caller validates the rung"
    held = replace(state, override=rung, override_until_ns=until_ns)
    if rung == state.in_force:
        return held, None
    return held, Transition(state.in_force, rung, pressure, "override")


def clear_override(state: LadderState, pressure: float = 0.0) -> tuple[LadderState, Transition | None]:
    """End an override now; the automatic rung is in force again at once."""
    return _without_override(state, pressure, "override_cleared")


def _without_override(state: LadderState, pressure: float, why: str) -> tuple[LadderState, Transition | None]:
    plain = replace(state, override=None, override_until_ns=0)
    if plain.in_force == state.in_force:
        return plain, None
    return plain, Transition(state.in_force, plain.in_force, pressure, why)


def smaller_tier(spec: LadderSpec) -> int:
    """Index of the rung that gives the smaller tier; 0 when the ladder has none."""
    return next((rung.index for rung in spec.rungs if rung.name == RungName.SMALL_TIER), 0)


def clamped(state: LadderState, spec: LadderSpec) -> LadderState:
    """After a reload: no deeper than the ladder goes now."""
    deepest = len(spec.rungs) - 1
    override = None if state.override is None else min(state.override, deepest)
    return replace(state, rung=min(state.rung, deepest), override=override)


def floor_of(tenant: Tenant, spec: LadderSpec) -> int:
    """Index of the deepest rung that may touch the tenant: 0 when the ladder has none of that name, as for who left the
    configuration before the ladder changed and has work here still."""
    return next((rung.index for rung in spec.rungs if rung.name == tenant.ladder.floor), 0)


def effective_rung(rung: int, tenant: Tenant, spec: LadderSpec) -> int:
    """`rung`, but never deeper than the tenant's floor."""
    return min(rung, floor_of(tenant, spec)) if rung else 0


def diagram() -> str:
    """`MOVES` as a Mermaid state diagram: the states are a rung inside and past its dwell."""
    lines = [
        "stateDiagram-v2",
        "    direction LR",
        "    running: rung k, dwell running",
        "    over: rung k, dwell over",
    ]
    lines.append("    [*] --> over: rung 0, no change yet")
    lines.append("    running --> over: time passes")
    for (signal, dwell), move in MOVES.items():
        after = dwell if move is Move.STAY else Dwell.RUNNING
        lines.append(f"    {dwell} --> {after}: {signal} / {move}")
    return "\n".join(lines)
