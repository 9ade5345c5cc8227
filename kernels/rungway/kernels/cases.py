"""Inputs for every kernel: small ones with all the corners for tests, large ones for timing. Seeded, made on the CPU."""

from __future__ import annotations

import torch

from rungway.kernels import cases_attention, cases_linear, cases_sampling
from rungway.kernels.case import Args, Case, random
from rungway.kernels.cases_attention import attention as attention


def rms_norm(tokens: int, hidden: int, residual: bool, bar: float | None = None) -> Case:
    def make(dtype: torch.dtype) -> Args:
        x = random(tokens, hidden, dtype=dtype, seed=1)
        weight = random(hidden, dtype=dtype, seed=2)
        return x, weight, 1e-5, random(tokens, hidden, dtype=dtype, seed=3) if residual else None

    def traffic(dtype: torch.dtype) -> int:
        return (tokens * hidden * (4 if residual else 2) + hidden) * dtype.itemsize

    return Case(f"{tokens}x{hidden}{'+residual' if residual else ''}", make, traffic, bar=bar)


def glu(tokens: int, size: int, bar: float | None = None) -> Case:
    def make(dtype: torch.dtype) -> Args:
        return (random(tokens, 2 * size, dtype=dtype, seed=1) * 4,)

    return Case(f"{tokens}x{size}", make, lambda dtype: 3 * tokens * size * dtype.itemsize, bar=bar)


_GLU = [glu(1, 64), glu(3, 1536), glu(2, 1023), glu(0, 64)]

SMALL: dict[str, list[Case]] = {
    "rms_norm": [
        rms_norm(1, 64, residual=False),
        rms_norm(35, 96, residual=True),
        rms_norm(2, 1000, residual=True),
        rms_norm(3, 4096, residual=False),
        rms_norm(0, 64, residual=True),
    ],
    "swiglu": _GLU,
    "geglu": _GLU,
    **cases_attention.SMALL,
    **cases_linear.SMALL,
    **cases_sampling.SMALL,
}

LARGE: dict[str, list[Case]] = {
    "rms_norm": [
        rms_norm(8192, 4096, residual=True, bar=0.85),
        rms_norm(8192, 8192, residual=True, bar=0.85),
        rms_norm(32768, 896, residual=True, bar=0.85),
        rms_norm(64, 4096, residual=True),
    ],
    "swiglu": [glu(8192, 14336, bar=0.85), glu(64, 14336)],
    "geglu": [glu(8192, 14336, bar=0.85)],
    **cases_attention.LARGE,
    **cases_linear.LARGE,
    **cases_sampling.LARGE,
}
