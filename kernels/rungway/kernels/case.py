"""What a case is: arguments, and what the hardware must at least do for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

Args = tuple[Any, ...]


class Metric(Enum):
    """What a case's time is held against: bytes over the bandwidth of a copy, or operations over the rate of a product."""

    BYTES = "copy"
    FLOPS = "gemm"


@dataclass(frozen=True)
class Case:
    """`make(dtype)` gives the arguments on the CPU, seeded; `bytes_moved(dtype)` is the least traffic with memory;
    `flops()` counts multiplications and additions. `bar`: the fraction of `metric` that a GPU has to reach."""

    name: str
    make: Callable[[torch.dtype], Args]
    bytes_moved: Callable[[torch.dtype], int]
    flops: Callable[[], int] = lambda: 0
    bar: float | None = None
    metric: Metric = Metric.BYTES


def random(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Normally distributed, on the CPU."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
