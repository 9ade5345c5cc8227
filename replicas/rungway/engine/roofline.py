"""What a step has to move and to multiply, part by part, and how long this machine needs for that at least.

Bytes count each weight once per step and each activation once in and once out; keys and values once per sequence. A part's
limit is the larger of bytes over bandwidth and operations over the products' best rate (Williams et al., "Roofline", 2009).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

import torch

from rungway.engine.families.spec import Architecture
from rungway.engine.formats import Precision, Role

Clock = Callable[[], float]
_TRIES = 7


class Part(StrEnum):
    """Where the time of a step goes. `place`: rotary embedding and writing keys and values. `assembly`: a step's tensors, block
    tables, embedding, and Python between the other parts. `scheduler`: also appending, detokenising, deltas."""

    QKV = "qkv"
    PLACE = "place"
    ATTENTION = "attention"
    OUT = "out"
    GATE_UP = "gate_up"
    GATE = "gate"
    DOWN = "down"
    HEAD = "head"
    NORMS = "norms"
    ASSEMBLY = "assembly"
    SAMPLING = "sampling"
    SCHEDULER = "scheduler"


class Work(NamedTuple):
    """Of one part in one step; both 0 for parts that only cost time."""

    moved_bytes: float
    operations: float


@dataclass(frozen=True)
class StepShape:
    """`rows` sequences with `context` keys each before the step; `tokens` new ones of each."""

    rows: int
    context: int
    tokens: int = 1


def shapes(arch: Architecture) -> dict[Role, tuple[int, int, int]]:
    """(how many, outputs, inputs) of each kind of linear layer of a dense decoder."""
    heads, width = arch.heads * arch.head_dim, arch.kv_heads * arch.head_dim
    return {
        Role.QKV: (arch.layers, heads + 2 * width, arch.hidden),
        Role.OUT: (arch.layers, arch.hidden, heads),
        Role.GATE_UP: (arch.layers, 2 * arch.intermediate, arch.hidden),
        Role.DOWN: (arch.layers, arch.hidden, arch.intermediate),
        Role.HEAD: (1, arch.vocab_size, arch.hidden),
    }


def weight_bits(role: Role, precision: Precision, inputs: int) -> float:
    """Bits of one weight, with its share of scales and zeros. Where a layer may be 8 bits and was made 16 because that is faster
    here, 8 are counted: what is said of bandwidth is then too low, never too high."""
    if role in precision.int4:
        return 4 + 32 / precision.group
    if role in precision.int8:
        return 8 + 32 / inputs
    return 8 * precision.cache.itemsize


def weight_bytes(arch: Architecture, precision: Precision) -> float:
    """What every step reads at least: all linear layers, the head included."""
    return sum(
        count * outputs * inputs * weight_bits(role, precision, inputs) / 8
        for role, (count, outputs, inputs) in shapes(arch).items()
    )


def step_work(arch: Architecture, precision: Precision, step: StepShape) -> dict[Part, Work]:
    """Of a whole step, all layers. A prefill asks for one row of logits per sequence."""
    tokens, size = step.rows * step.tokens, precision.hidden.itemsize
    work = {}
    for role, (count, outputs, inputs) in shapes(arch).items():
        rows = step.rows if role is Role.HEAD else tokens
        weights = count * outputs * inputs
        moved = weights * weight_bits(role, precision, inputs) / 8 + count * rows * (inputs + outputs) * size
        work[Part(role.value)] = Work(moved, 2.0 * rows * weights)
    qkv = (arch.heads + 2 * arch.kv_heads) * arch.head_dim
    key_bytes = 2 * arch.kv_heads * arch.head_dim * precision.cache.itemsize
    keys = step.context + step.tokens
    pairs = step.rows * (step.tokens * step.context + step.tokens * (step.tokens + 1) / 2)
    work[Part.PLACE] = Work(arch.layers * tokens * (2 * qkv * size + key_bytes), 0.0)
    work[Part.ATTENTION] = Work(
        arch.layers * (step.rows * keys * key_bytes + 2 * tokens * arch.heads * arch.head_dim * size),
        4.0 * arch.layers * pairs * arch.heads * arch.head_dim,
    )
    work[Part.GATE] = Work(arch.layers * tokens * 3 * arch.intermediate * size, 0.0)
    work[Part.NORMS] = Work((2 * arch.layers * tokens + step.rows) * 2 * arch.hidden * size, 0.0)
    work[Part.SAMPLING] = Work(step.rows * arch.vocab_size * 4.0, 0.0)
    return work


@dataclass(frozen=True)
class Row:
    """One part: seconds measured, the limit, and which of the two limits it is."""

    part: Part
    spent_s: float
    work: Work
    limit_s: float
    bound: str  # memory | products | none

    @property
    def fraction(self) -> float:
        """Of the limit that is reached; 0 where there is none."""
        return self.limit_s / self.spent_s if self.spent_s > 0 else 0.0


def against_limits(spent: dict[Part, float], work: dict[Part, Work], bandwidth: float, products: float) -> list[Row]:
    """`bandwidth` bytes/s, `products` operations/s, both measured. In the order of Part."""
    rows = []
    for part in Part:
        if part not in spent:
            continue
        its = work.get(part, Work(0.0, 0.0))
        memory_s, products_s = its.moved_bytes / bandwidth, its.operations / products
        bound = "none" if not (memory_s or products_s) else "memory" if memory_s >= products_s else "products"
        rows.append(Row(part, spent[part], its, max(memory_s, products_s), bound))
    return rows


def read_bandwidth(size: int, clock: Clock = time.perf_counter) -> float:
    """Bytes/s at which a buffer of `size` bytes is read, by the better of two operations, best of a few passes."""
    buffer = torch.ones(max(1, size // 4))
    actions: list[Callable[[], object]] = [buffer.sum, lambda: torch.dot(buffer, buffer)]
    return 4 * buffer.numel() / min(best_s(action, clock) for action in actions)


def best_s(action: Callable[[], object], clock: Clock = time.perf_counter) -> float:
    """Least duration of a few runs; never 0."""
    times = []
    for _ in range(_TRIES):
        started = clock()
        action()
        times.append(clock() - started)
    return max(min(times), 1e-9)
