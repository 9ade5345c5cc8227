"""Sampling by this project's kernel: the whole batch in two launches, one copy of tokens and log-probabilities back. On CPU the
registry gives the kernel's reference, so the same wiring is tested without a GPU."""

from __future__ import annotations

import torch

from rungway.engine.protocol import Sampling
from rungway.kernels import ops as kernels


def draw(
    processed: torch.Tensor, raw: torch.Tensor, asks: list[Sampling], points: list[float]
) -> tuple[list[int], list[float]]:
    """(token, log-probability under `raw`) for each row of `processed` [rows, vocabulary]; `points` are numbers in 0 .. 1."""
    device = processed.device

    def column(values: list[float], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype).to(device, non_blocking=True)

    tokens, logprobs = kernels.sample(
        processed.contiguous(),
        column([ask.temperature for ask in asks], torch.float32),
        column([ask.top_k for ask in asks], torch.int32),
        column([ask.top_p for ask in asks], torch.float32),
        column([ask.min_p for ask in asks], torch.float32),
        column(points, torch.float64),
        None if processed is raw else raw.contiguous(),
    )
    return tokens.tolist(), logprobs.tolist()
