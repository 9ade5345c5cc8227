"""The ladder's state machine: hysteresis, dwell, surges, overrides, and its whole state space on a small grid."""

from __future__ import annotations

import math
from itertools import pairwise, product
from pathlib import Path

import msgspec
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from policies.offer_kit import tenant
from rungway.contracts import LadderSpec, LadderTerms, RungSpec
from rungway.policies.ladder import (
    CAPS,
    MOVES,
    NEVER_NS,
    Dwell,
    LadderState,
    RungName,
    Signal,
    Transition,
    clear_override,
    diagram,
    effective_rung,
    set_override,
    step,
    target_rung,
)

ROOT = Path(__file__).parents[2]
S = 1_000_000_000
ENTERS = (0.0, 0.9, 0.95, 1.0, 1.1, 2.0, 4.0, 8.0)
SPEC = LadderSpec(rungs=tuple(RungSpec(index=k, name=name, enter=ENTERS[k]) for k, name in enumerate(RungName)))


def walk(
    pressures: list[float], tick_s: float = 1.0, state: LadderState | None = None
) -> tuple[LadderState, list[tuple[float, Transition]]]:
    """Step once per tick; returns the last state and (second, transition) of every change."""
    state = state or LadderState()
    moves = []
    for tick, pressure in enumerate(pressures):
        state, transition = step(state, pressure, round(tick * tick_s * S), SPEC)
        if transition is not None:
            moves.append((tick * tick_s, transition))
    return state, moves


def test_the_shipped_ladder_file_is_the_one_described() -> None:
    shipped = yaml.safe_load((ROOT / "config/ladders/default.yaml").read_text("utf-8"))
    assert [(row["name"], float(row["enter"])) for row in shipped["rungs"]] == list(zip(RungName, ENTERS, strict=True))
    assert set(shipped) == {"rungs", *LadderSpec.__struct_fields__} - {"digest"}
    assert [shipped[name] for name in ("leave", "dwell_up_s", "dwell_down_s")] == [0.7, 10, 60]
    assert shipped["template"] == LadderSpec(rungs=()).template


def test_every_signal_and_dwell_has_a_move_and_every_rung_a_cap() -> None:
    assert set(MOVES) == set(product(Signal, Dwell))
    assert set(CAPS) == set(RungName)


@pytest.mark.parametrize(
    ("pressure", "rung"), [(0.0, 0), (0.899, 0), (0.9, 1), (1.0, 3), (1.99, 4), (8.0, 7), (100.0, 7), (math.nan, 0)]
)
def test_target_is_the_deepest_rung_entered(pressure: float, rung: int) -> None:
    assert target_rung(pressure, SPEC) == rung


def test_the_first_move_is_immediate_and_may_jump() -> None:
    _, moves = walk([1.1])
    assert moves == [(0.0, Transition(0, 4, 1.1, "rise"))]


def test_further_up_waits_for_the_dwell() -> None:
    _, moves = walk([0.9] + [1.05] * 30)
    assert [(at, move.to_rung) for at, move in moves] == [(0.0, 1), (10.0, 3)]


def test_a_surge_does_not_wait() -> None:
    _, moves = walk([0.9, 1.0, 1.79, 1.8])
    assert [(at, move.to_rung, move.why) for at, move in moves] == [(0.0, 1, "rise"), (3.0, 4, "surge")]
    _, moves = walk([1.1, 2.5, 2.5])  # twice the enter in force, but only one rung deeper
    assert [at for at, _ in moves] == [0.0]


def test_down_is_one_rung_per_dwell_and_only_below_leave() -> None:
    _, moves = walk([8.0] + [0.7] * 100)
    assert len(moves) == 1
    _, moves = walk([8.0] + [0.69] * 500)
    assert [(at, move.to_rung) for at, move in moves] == [(0.0, 7)] + [(60.0 * k, 7 - k) for k in range(1, 8)]
    assert {move.why for _, move in moves[1:]} == {"fall"}


def test_after_coming_back_to_full_the_next_move_waits_again() -> None:
    _, moves = walk([0.9] + [0.0] * 60 + [0.95] * 20)
    assert [(at, move.to_rung) for at, move in moves] == [(0.0, 1), (60.0, 0), (70.0, 2)]


@pytest.mark.parametrize("threshold", [*ENTERS[1:], SPEC.leave])
@pytest.mark.parametrize("period_s", [1.0, 7.0, 30.0, 200.0])
def test_sawtooth_makes_at_most_one_transition_per_dwell(threshold: float, period_s: float) -> None:
    ticks = [index * 0.5 for index in range(30 * 60 * 2)]
    ramp = [threshold * (0.9 + 0.2 * ((at % period_s) / period_s)) for at in ticks]
    _, moves = walk(ramp, tick_s=0.5)
    times = [at for at, _ in moves]
    assert all(later - earlier >= SPEC.dwell_up_s for earlier, later in pairwise(times))
    assert all(move.why != "surge" for _, move in moves[1:])  # the first may start far above


def test_a_wide_sawtooth_is_bounded_by_the_dwell_down() -> None:
    _, moves = walk([1.0 if tick % 2 else 0.6 for tick in range(1800)])
    downs = [at for at, move in moves if move.to_rung < move.from_rung]
    assert downs and all(later - earlier >= SPEC.dwell_down_s for earlier, later in pairwise(downs))


def test_model_check_of_every_reachable_state() -> None:
    """Explore (rung, seconds since the last change) under every pressure of a grid; check each edge."""
    grid = [0.0, 0.69, 0.7, 0.8, 0.9, 0.95, 1.0, 1.1, 1.8, 2.0, 2.2, 4.0, 8.0, 100.0]
    cap_s = 61
    start = (0, cap_s)
    seen, frontier = {start}, [start]
    edges = 0
    while frontier:
        rung, age_s = frontier.pop()
        for pressure in grid:
            now = 1000 * S
            before = LadderState(rung=rung, since_ns=now - age_s * S)
            after, transition = step(before, pressure, now, SPEC)
            edges += 1
            if transition is None:
                assert after == before
                moved = (rung, min(age_s + 1, cap_s))
            else:
                assert (transition.from_rung, transition.to_rung) == (rung, after.rung)
                assert after.since_ns == now
                check_edge(transition, age_s, pressure)
                moved = (after.rung, 1)
            if moved not in seen:
                seen.add(moved)
                frontier.append(moved)
    assert {rung for rung, _ in seen} == set(range(8))
    assert edges > 5000


def check_edge(move: Transition, age_s: int, pressure: float) -> None:
    if move.to_rung < move.from_rung:
        assert move.to_rung == move.from_rung - 1
        assert pressure < SPEC.leave and age_s >= SPEC.dwell_down_s
        return
    assert move.to_rung == max(k for k in range(8) if ENTERS[k] <= pressure) > move.from_rung
    if move.why == "surge":
        assert pressure >= 2 * ENTERS[max(move.from_rung, 1)] and move.to_rung >= move.from_rung + 2
    else:
        assert age_s >= SPEC.dwell_up_s


@given(st.lists(st.floats(0, 10), min_size=1, max_size=60), st.integers(1, 90))
def test_random_walks_stay_on_the_ladder_and_come_back(pressures: list[float], tick_s: int) -> None:
    state, _ = walk(pressures, tick_s=tick_s)
    assert 0 <= state.rung <= 7
    now = (len(pressures) * tick_s) * S
    for _ in range(7):
        now += 60 * S
        state, _ = step(state, 0.0, now, SPEC)
    assert state.rung == 0


def test_a_clock_that_went_back_changes_nothing() -> None:
    state = LadderState(rung=3, since_ns=100 * S)
    assert step(state, 0.0, 50 * S, SPEC) == (state, None)


def test_override_holds_whatever_the_pressure_and_expires() -> None:
    state, transition = set_override(LadderState(), 4, 100 * S, SPEC)
    assert transition == Transition(0, 4, 0.0, "override")
    state, transition = step(state, 9.0, 50 * S, SPEC)
    assert transition is None and (state.in_force, state.rung) == (4, 7)  # the automatic rung moves underneath
    state, transition = step(state, 9.0, 100 * S, SPEC)
    assert transition == Transition(4, 7, 9.0, "override_expired")
    assert state.override is None and state.in_force == 7


def test_override_cleared_is_back_to_automatic_at_once() -> None:
    state, _ = set_override(LadderState(), 7, 100 * S, SPEC)
    state, transition = clear_override(state)
    assert transition == Transition(7, 0, 0.0, "override_cleared")
    assert state == LadderState(since_ns=NEVER_NS)
    assert clear_override(state) == (state, None)


def test_override_to_the_rung_in_force_is_no_transition() -> None:
    state, transition = set_override(LadderState(rung=2, since_ns=0), 2, 10 * S, SPEC)
    assert transition is None and state.override == 2
    state, transition = set_override(state, 0, 10 * S, SPEC)
    assert transition == Transition(2, 0, 0.0, "override")
    with pytest.raises(AssertionError):
        set_override(state, 8, 10 * S, SPEC)


def test_effective_rung_is_capped_at_the_floor() -> None:
    for floor in RungName:
        contract = tenant(floor=floor)
        for rung in range(8):
            assert effective_rung(rung, contract, SPEC) == min(rung, list(RungName).index(floor))


def test_a_floor_that_the_ladder_does_not_have_lets_nothing_through() -> None:
    short = msgspec.structs.replace(SPEC, rungs=SPEC.rungs[:3])
    assert [effective_rung(rung, tenant(floor=RungName.DEFER), short) for rung in range(3)] == [0, 0, 0]
    assert [effective_rung(rung, tenant(floor=short.rungs[2].name), short) for rung in range(3)] == [0, 1, 2]


def test_the_documented_diagram_and_caps_are_current() -> None:
    page = (ROOT / "docs/ladder.md").read_text("utf-8")
    assert f"```mermaid\n{diagram()}\n```" in page
    for index, name in enumerate(RungName):
        assert f"| {index} | `{name}` | {ENTERS[index]:g} | {CAPS[name]} |" in page


def test_ladder_terms_default_to_the_whole_ladder() -> None:
    assert LadderTerms().floor == RungName.DEFER and LadderTerms().opt_out == ()
