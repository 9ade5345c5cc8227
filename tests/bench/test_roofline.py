"""The arithmetic of a step's bytes and operations, checked by hand; and a stopwatch that changes nothing it times."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from engine.native_kit import random_model
from rungway.engine.architecture import read_architecture
from rungway.engine.families.spec import Architecture
from rungway.engine.formats import INT8, INT8_PART, Role, four_bits, plain
from rungway.engine.model import Decoder
from rungway.engine.ops import PlainOps
from rungway.engine.roofline import (
    Part,
    StepShape,
    Work,
    against_limits,
    best_s,
    read_bandwidth,
    shapes,
    step_work,
    weight_bits,
    weight_bytes,
)
from rungway.engine.selftest import read_through
from rungway.engine.stopwatch import Stopwatch, TimedMaker, TimedOps

CPU = torch.device("cpu")
FLOAT = plain(torch.float32)


@pytest.fixture(scope="module")
def model() -> Any:
    return random_model("qwen2")


@pytest.fixture(scope="module")
def arch(model: Any) -> Architecture:
    return read_architecture(model.config.to_dict())  # 3 layers of 48, 6 and 2 heads of 8, MLP of 96, 300 words


def test_the_layers_are_those_of_the_model(model: Any, arch: Architecture) -> None:
    counted = sum(count * outputs * inputs for count, outputs, inputs in shapes(arch).values())
    matrices = [value for name, value in model.state_dict().items() if value.dim() == 2 and "embed" not in name]
    assert counted == sum(value.numel() for value in matrices)  # the tied head is among them once
    assert weight_bytes(arch, FLOAT) == 4 * counted


def test_bits_of_a_weight_follow_its_role() -> None:
    four = four_bits("int4", CPU)
    assert four is not None
    assert weight_bits(Role.DOWN, INT8, 64) == 8.5 and weight_bits(Role.DOWN, plain(torch.bfloat16), 64) == 16
    assert weight_bits(Role.DOWN, INT8_PART, 64) == 16 and weight_bits(Role.OUT, INT8_PART, 64) == 8.5
    assert weight_bits(Role.QKV, four, 64) == 5


def test_a_decode_step_by_hand(arch: Architecture) -> None:
    work = step_work(arch, FLOAT, StepShape(rows=2, context=9))
    assert work[Part.DOWN] == Work(3 * (48 * 96 * 4 + 2 * (48 + 96) * 4), 2 * 2 * 3 * 48 * 96)
    assert work[Part.HEAD] == Work(300 * 48 * 4 + 2 * (48 + 300) * 4, 2 * 2 * 300 * 48)
    key_bytes = 2 * 2 * 8 * 4
    assert work[Part.ATTENTION] == Work(3 * (2 * 10 * key_bytes + 2 * 2 * 48 * 4), 4 * 3 * 2 * 10 * 48)


def test_a_prefill_reads_weights_once_and_asks_for_one_row_of_logits(arch: Architecture) -> None:
    one, many = (step_work(arch, FLOAT, StepShape(rows=1, context=0, tokens=tokens)) for tokens in (1, 100))
    assert many[Part.HEAD] == one[Part.HEAD]
    assert many[Part.QKV].operations == 100 * one[Part.QKV].operations
    assert many[Part.QKV].moved_bytes < 100 * one[Part.QKV].moved_bytes
    assert many[Part.ATTENTION].operations == 5050 * one[Part.ATTENTION].operations  # a triangle


def test_the_larger_limit_binds() -> None:
    spent = {Part.QKV: 4.0, Part.OUT: 2.0, Part.SCHEDULER: 1.0}
    work = {Part.QKV: Work(200.0, 10.0), Part.OUT: Work(10.0, 2000.0)}
    qkv, out, scheduler = against_limits(spent, work, bandwidth=100.0, products=1000.0)
    assert (qkv.limit_s, qkv.bound, qkv.fraction) == (2.0, "memory", 0.5)
    assert (out.limit_s, out.bound, out.fraction) == (2.0, "products", 1.0)
    assert (scheduler.limit_s, scheduler.bound, scheduler.fraction) == (0.0, "none", 0.0)


def test_bandwidth_counts_each_byte_once() -> None:
    ticks = itertools.count()
    assert read_bandwidth(4000, lambda: float(next(ticks))) == 4000.0  # every pass takes one tick
    assert best_s(lambda: None, lambda: 0.0) > 0


def test_a_stopwatch_gives_what_lies_between_two_parts_to_the_part_that_it_is() -> None:
    now = [0.0]
    watch = Stopwatch(lambda: now[0])

    def spend(part: Part, inside: float, after: float) -> None:
        entered = watch.enter(part)
        now[0] += inside
        watch.leave(part, entered)
        now[0] += after

    for part, inside, after in (
        (Part.QKV, 1, 9),
        (Part.PLACE, 2, 5),
        (Part.OUT, 1, 9),
        (Part.GATE_UP, 3, 4),
        (Part.DOWN, 1, 9),
    ):
        spend(part, inside, after)
    expected = {Part.QKV: 1, Part.PLACE: 2, Part.ATTENTION: 5, Part.OUT: 1, Part.GATE_UP: 3, Part.GATE: 4, Part.DOWN: 1}
    assert watch.spent == expected
    watch.reset()
    assert watch.spent == {}


def test_a_timed_model_answers_the_same_and_times_every_part(model: Any, arch: Architecture) -> None:
    weights = model.state_dict().__getitem__
    watch = Stopwatch()
    with torch.inference_mode():
        ordinary = Decoder(arch, weights, FLOAT, CPU, PlainOps())
        timed = Decoder(arch, weights, FLOAT, CPU, TimedOps(PlainOps(), watch), TimedMaker(FLOAT, watch))
        ids = list(range(2, 40))
        assert torch.equal(read_through(ordinary, ids), read_through(timed, ids))
    parts = set(Part) - {Part.ASSEMBLY, Part.SAMPLING, Part.SCHEDULER}
    assert watch.spent.keys() == parts and all(spent > 0 for spent in watch.spent.values())
