"""Linear layers with 8-bit weights, one scale for each output, and activations as they are: through the kernel registry.

This is `dtype: int8` on a GPU, where a decode step waits for weights to arrive and half the bytes are half the wait. On CPU the
registry has the plain formula; int8.py is what CPUs compute with.
"""

from __future__ import annotations

import torch

from rungway.kernels.registry import get

_PEAK = 127.0


class KernelInt8Linear:
    """y = x W^T + b, optionally + residual. `x` [tokens, in] of any float type, y [tokens, out] in `dtype`."""

    __slots__ = ("_bias", "_codes", "_dtype", "_scales")

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None = None, *, dtype: torch.dtype = torch.bfloat16
    ) -> None:
        scales = weight.float().abs().amax(1, keepdim=True).clamp_min_(1e-12) / _PEAK
        self._codes = (weight.float() / scales).round_().to(torch.int8)
        self._scales = scales[:, 0].contiguous()
        self._bias = bias
        self._dtype = dtype

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        multiply = get("int8_linear", x.device)
        y: torch.Tensor = multiply(x.contiguous(), self._codes, self._scales, self._bias)
        return y.to(self._dtype)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """y + residual, in the residual's type."""
        return self(x).add_(residual).to(residual.dtype)
