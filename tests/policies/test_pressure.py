"""Pressure: which signal counts when, and that a full pool without a queue degrades nobody."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rungway.policies.pressure import PRESSURE_MAX, PoolSignals, PressureSignal, pressure

IDLE = PoolSignals(queue_wait_ms=0, ttft_target_ms=500, kv_use=0, in_flight=0, capacity=16, slo_burn=0)
FIRST_ENTER = 0.9


def test_an_idle_pool_has_no_pressure() -> None:
    assert pressure(IDLE) == (0.0, PressureSignal.QUEUE_WAIT)


def test_a_full_pool_with_nobody_waiting_enters_no_rung() -> None:
    value, why = pressure(replace(IDLE, in_flight=17, capacity=17, kv_use=1.0))
    assert 0.7 < value < FIRST_ENTER and why == PressureSignal.KV_USE  # holds a rung, enters none
    assert pressure(replace(IDLE, in_flight=17, capacity=17))[1] == PressureSignal.IN_FLIGHT


@pytest.mark.parametrize(("waited_ms", "expected"), [(1, 0.89), (249, 0.89), (250, 1.0), (499, 1.0), (600, 1.2)])
def test_occupancy_counts_once_work_has_waited_half_its_target(waited_ms: float, expected: float) -> None:
    assert pressure(replace(IDLE, queue_wait_ms=waited_ms, in_flight=16))[0] == pytest.approx(expected)


def test_the_largest_part_names_the_reason() -> None:
    assert pressure(replace(IDLE, queue_wait_ms=550)) == (1.1, "queue_wait")
    assert pressure(replace(IDLE, queue_wait_ms=300, kv_use=0.95, in_flight=8)) == (0.95, "kv_use")
    assert pressure(replace(IDLE, queue_wait_ms=300, kv_use=0.5, in_flight=16)) == (1.0, "in_flight")
    assert pressure(replace(IDLE, slo_burn=1.2)) == (1.2, "slo_burn")


def test_burn_alone_asks_for_cheaper_answers_but_never_for_none() -> None:
    assert pressure(replace(IDLE, slo_burn=50.0))[0] < 2.0
    assert pressure(replace(IDLE, slo_burn=50.0, queue_wait_ms=2000)) == (4.0, "queue_wait")


def test_edges() -> None:
    assert pressure(replace(IDLE, queue_wait_ms=1e12))[0] == PRESSURE_MAX
    assert pressure(replace(IDLE, queue_wait_ms=10, ttft_target_ms=0))[0] == 10.0
    assert pressure(replace(IDLE, in_flight=5, capacity=0)) == (0.0, "queue_wait")
    assert pressure(replace(IDLE, queue_wait_ms=1000, in_flight=0, capacity=0)) == (2.0, "queue_wait")


amount = st.floats(0, 1e6)


@given(amount, amount, st.floats(0, 1), amount, amount, amount)
def test_bounded_and_monotone_in_the_wait(a: float, target: float, kv: float, b: float, c: float, burn: float) -> None:
    signals = PoolSignals(a, target, kv, b, c, burn)
    value, why = pressure(signals)
    assert 0.0 <= value <= PRESSURE_MAX and math.isfinite(value)
    assert why in set(PressureSignal)
    assert pressure(replace(signals, queue_wait_ms=a * 2 + 1))[0] >= value
