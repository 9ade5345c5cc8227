"""Inputs for sampling: every filter, alone and with others, over plain logits, ties, masked tokens and penalised ones."""

from __future__ import annotations

import torch

from rungway.kernels.case import Args, Case, random

ASKS = [  # temperature, top-k, top-p, min-p
    (0.0, 0, 1.0, 0.0),
    (1.0, 0, 1.0, 0.0),
    (0.7, 5, 1.0, 0.0),
    (0.8, 50, 0.9, 0.0),
    (1.0, 0, 0.9, 0.0),
    (2.0, 0, 0.95, 0.1),
    (1.0, 0, 1.0, 0.05),
    (1.0, 1, 1.0, 0.0),
    (1.5, 0, 0.99999, 0.0),  # no bound suffices: the whole row is searched
]


def sample(rows: int, vocabulary: int, *, step: float = 0.0, penalised: bool = False, greedy: bool = False) -> Case:
    """`step`: logits are multiples of it (many are equal). `penalised`: the raw logits are others."""

    def make(dtype: torch.dtype) -> Args:
        logits = random(rows, vocabulary, dtype=torch.float32, seed=21) * 3
        if step:
            logits = (logits / step).round() * step
        logits[:, 3] = float("-inf")
        asks = [(0.0, 0, 1.0, 0.0) if greedy else ASKS[row % len(ASKS)] for row in range(rows)]
        columns = list(zip(*asks, strict=True)) if asks else [()] * 4
        heat, top_p, min_p = (torch.tensor(columns[at], dtype=torch.float32) for at in (0, 2, 3))
        points = torch.rand(rows, generator=torch.Generator().manual_seed(22), dtype=torch.float64)
        raw = random(rows, vocabulary, dtype=dtype, seed=23) if penalised else None
        return logits.to(dtype), heat, torch.tensor(columns[1], dtype=torch.int32), top_p, min_p, points, raw

    kind = "".join(["+ties" if step else "", "+raw" if penalised else "", "+greedy" if greedy else ""])
    return Case(f"{rows}x{vocabulary}{kind}", make, lambda dtype: rows * vocabulary * dtype.itemsize)


SMALL: dict[str, list[Case]] = {
    "sample": [sample(9, 1000), sample(9, 700, step=0.5, penalised=True), sample(3, 4097, greedy=True), sample(0, 64)],
}

LARGE: dict[str, list[Case]] = {
    "sample": [sample(64, 151936, greedy=True), sample(64, 151936), sample(1, 151936)],
}
