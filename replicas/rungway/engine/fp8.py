"""Linear layers with weights in 8-bit floats (e4m3), on GPUs.

Weights scaled by row go through `torch._scaled_mm`, with activations quantised token by token, where the hardware multiplies
8-bit floats (compute capability 8.9 and up). Others, weights scaled by block, and all on older GPUs, go through this
project's kernel, which widens the codes on their way and leaves activations as they are. There is no such product on
CPU: `linear8` gives None there, and the caller dequantises.
"""

from __future__ import annotations

import functools

import torch

from rungway.engine.stored import Fp8Weight
from rungway.kernels.registry import get

_PEAK = 448.0  # largest e4m3 number
_CAPABILITY = (8, 9)
_ALIGNED = 16  # sizes that the scaled product takes


def on_tokens(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes [tokens, in], scales [tokens, 1] float32): each token in the full range of e4m3."""
    scales = x.float().abs().amax(1, keepdim=True).clamp_min_(1e-12) / _PEAK
    return (x.float() / scales).clamp_(-_PEAK, _PEAK).to(torch.float8_e4m3fn), scales


class Fp8Linear:
    """y = x W^T + b, optionally + residual; y [tokens, out] in `dtype`."""

    __slots__ = ("_bias", "_dtype", "_scaled", "_weight")

    def __init__(
        self,
        weight: Fp8Weight,
        bias: torch.Tensor | None = None,
        *,
        dtype: torch.dtype = torch.bfloat16,
        scaled: bool = False,
    ) -> None:
        """`scaled`: through `torch._scaled_mm`, for weights that are scaled by row."""
        self._weight = weight
        self._bias = bias
        self._dtype = dtype
        self._scaled = scaled

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        weight = self._weight
        if not self._scaled:
            multiply = get("fp8_linear", x.device)
            y: torch.Tensor = multiply(x.contiguous(), weight.codes, weight.scales)
        else:
            codes, scales = on_tokens(x)
            y = torch._scaled_mm(codes, weight.codes.t(), scales, weight.scales[None], out_dtype=torch.bfloat16)
        return (y if self._bias is None else y + self._bias).to(self._dtype)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """y + residual, in the residual's type."""
        return self(x).add_(residual).to(residual.dtype)


def linear8(weight: Fp8Weight, bias: torch.Tensor | None, dtype: torch.dtype) -> Fp8Linear | None:
    """A layer for where `weight` lies; None where there is no such product."""
    device = weight.codes.device
    if not fp8_ready(device):
        return None
    fits = weight.scales.dim() == 1 and not any(size % _ALIGNED for size in weight.shape)
    if fits and in_hardware(device) and scaled_works(device):
        return Fp8Linear(weight, bias, dtype=dtype, scaled=True)
    return Fp8Linear(weight, bias, dtype=dtype)


def fp8_ready(device: torch.device) -> bool:
    """Whether products with 8-bit floats can be had on this device at all."""
    return device.type == "cuda"


def in_hardware(device: torch.device) -> bool:
    """Whether the device multiplies 8-bit floats itself."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= _CAPABILITY


@functools.cache
def scaled_works(device: torch.device) -> bool:
    """Whether the scaled product exists for one scale a row and agrees with a plain one."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(5, 64, generator=generator).to(device)
    codes = torch.randn(48, 64, generator=generator).to(torch.float8_e4m3fn).to(device)
    scales = torch.rand(48, generator=generator).add_(0.5).to(device)
    weight = Fp8Weight(codes, scales)
    try:
        got = Fp8Linear(weight, scaled=True)(x).float()
    except (RuntimeError, AttributeError, NotImplementedError, ValueError):
        return False
    expected = x @ weight.dense().T
    return bool((got - expected).abs().max() < 0.1 * expected.abs().max())
