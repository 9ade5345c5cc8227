"""Linear layers with 4-bit weights, one scale and one zero for each group of inputs.

`quantised` makes such weights from plain ones: round to nearest, with the range of each group narrowed as far as that lowers
its squared error (a few clipped outliers cost less than a coarser grid for all the others).

On CPU the products are this project's own, with activations in 8 bits (native_int4.py), or else those of PyTorch's 4-bit
operator, with activations in bfloat16; it computes each row by itself, so that what a token gets depends on nothing else in its
batch. It is not public API, so this is the only module that knows it: it is checked and timed before use. On a GPU the products
are this project's kernel, and activations stay as they are. Elsewhere, `linear4` gives None and the caller takes a plain layer.
"""

from __future__ import annotations

import functools
import logging
import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import torch
import torch.nn.functional as F

from rungway.engine.native_int4 import NativeInt4Linear, native4_works, native_group
from rungway.engine.smoothing import weight_factors
from rungway.engine.stored import Int4Weight
from rungway.kernels import layouts
from rungway.kernels.registry import get

CPU_GROUPS = (256, 128, 64, 32)  # what the operator has
_CPU_ROWS = 16  # outputs come in multiples of this
_KERNEL_GROUP_MIN = 16
_TOP = 15
_SHRINKS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65)
_TIMES_SLOWER_MAX = 10.0  # than plain products; the vectorised operator is about 2, its plain loop about 100
_SHARES = (0.25, 0.5, 0.75)
_SAMPLED_ROWS = 256
_PIECE = 1 << 17  # weights searched at a time: they stay in the caches
_ROWS = 8  # tokens of the step that is timed

_log = logging.getLogger(__name__)


def group_for(inputs: int, wish: int) -> int | None:
    """The largest group up to `wish` that divides `inputs` (groups are halved until one does); None = none of them."""
    return next((group for group in CPU_GROUPS if group <= wish and inputs % group == 0), None)


def quantised(weight: torch.Tensor, group: int, *, symmetric: bool = False) -> Int4Weight:
    """4-bit codes of `weight` [out, in]; `in` must be a multiple of `group`. `symmetric`: every zero is code 8."""
    rows, columns = weight.shape
    step = max(1, _PIECE // columns)
    pieces = [_searched(weight[at : at + step].float(), group, symmetric) for at in range(0, rows, step)]
    packed, scales, zeros = (torch.cat([piece[index] for piece in pieces]) for index in range(3))
    return Int4Weight(packed, scales, zeros)


def _searched(weight: torch.Tensor, group: int, symmetric: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(packed, scales, zeros) with, for each group, the range of least squared error."""
    rows, columns = weight.shape
    groups = weight.view(rows, columns // group, group)
    low, high = groups.amin(-1, keepdim=True).clamp_(max=0), groups.amax(-1, keepdim=True).clamp_(min=0)
    width = torch.maximum(-low, high) * 2 if symmetric else high - low
    best = torch.full_like(width, float("inf"))
    codes, scales, zeros = torch.zeros_like(groups), torch.ones_like(width), torch.full_like(width, 8.0)
    for shrink in _SHRINKS:
        # scales are stored in bfloat16: codes have to fit what they will be multiplied with
        scale = (width * (shrink / _TOP)).clamp_(min=1e-12).bfloat16().float()
        zero = torch.full_like(scale, 8.0) if symmetric else (-low * shrink / scale).round_().clamp_(0, _TOP)
        guess = (groups / scale).round_().add_(zero).clamp_(0, _TOP)
        error = (guess - zero).mul_(scale).sub_(groups).square_().sum(-1, keepdim=True)
        better = error < best
        best = torch.where(better, error, best)
        codes = torch.where(better, guess, codes)
        scales, zeros = torch.where(better, scale, scales), torch.where(better, zero, zeros)
    packed = layouts.pack_int4(codes.to(torch.uint8).view(rows, columns))
    return packed, scales[:, :, 0].bfloat16(), zeros[:, :, 0].bfloat16()


def best_factors(
    weight: torch.Tensor, squares: torch.Tensor, group: int, *, symmetric: bool = False
) -> torch.Tensor | None:
    """By what to divide the input channels and multiply the columns of `weight` before it is quantised, so that the
    product loses least; None = leave them. `squares` [in]: what each channel carried (smoothing.Seen). How far columns
    follow it is tried on some of the rows: in large groups a few long columns cost their neighbours more than they gain."""
    sample = weight[:: max(1, weight.shape[0] // _SAMPLED_ROWS)].float()
    best, least = None, _loss(sample, torch.ones_like(squares), squares, group, symmetric)
    for share in _SHARES:
        by = weight_factors(squares, weight, share)
        loss = _loss(sample, by, squares, group, symmetric)
        if loss < least:
            best, least = by, loss
    return best


def _loss(weight: torch.Tensor, by: torch.Tensor, squares: torch.Tensor, group: int, symmetric: bool) -> float:
    """Squared error of the products, taken as if channels had nothing to do with each other."""
    off = quantised(weight * by, group, symmetric=symmetric).dense().div_(by).sub_(weight)
    return float((off.square_() * squares).sum())


class Layer4(Protocol):
    """A linear layer: y = x W^T + b, and y + residual."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor: ...


class _Layer:
    """y = x W^T + b, optionally + residual; `x` [tokens, in] of any float type, y [tokens, out] in `dtype`."""

    def __init__(self, weight: Int4Weight, bias: torch.Tensor | None, dtype: torch.dtype) -> None:
        self._order = weight.order
        self._bias = None if bias is None else bias.float()
        self._dtype = dtype

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y = self._product(x if self._order is None else x.index_select(1, self._order))
        return (y if self._bias is None else y.float().add_(self._bias)).to(self._dtype)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """y + residual, in the residual's type."""
        return self(x).add_(residual).to(residual.dtype)

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


class CpuInt4Linear(_Layer):
    """Through PyTorch's operator. Raises RuntimeError for a shape that it does not have."""

    def __init__(
        self, weight: Int4Weight, bias: torch.Tensor | None = None, *, dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__(weight, bias, dtype)
        group = _cpu_group(weight)
        if group is None:
            raise RuntimeError(f"no 4-bit operator for groups of {weight.group} in {weight.shape}")
        scales = weight.scales.float().repeat_interleave(weight.group // group, 1)
        zeros = weight.zeros.float().repeat_interleave(weight.group // group, 1)
        # the operator's product is (code - 8) * scale + shift
        self._scales = torch.stack([scales, (8.0 - zeros) * scales], -1).transpose(0, 1).bfloat16().contiguous()
        codes = layouts.unpack_int4(weight.packed).int()
        self._packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
        self._group = group

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(
            x.bfloat16().contiguous(), self._packed, self._group, self._scales
        )
        return y


class KernelInt4Linear(_Layer):
    """Through the kernel registry: Triton on a GPU, the plain formula on CPU. It takes groups of powers of two: others are
    split, and refused with RuntimeError where that is not possible."""

    def __init__(
        self, weight: Int4Weight, bias: torch.Tensor | None = None, *, dtype: torch.dtype = torch.bfloat16
    ) -> None:
        super().__init__(weight, bias, dtype)
        group = _kernel_group(weight)
        if group is None:
            raise RuntimeError(f"no 4-bit kernel for groups of {weight.group}")
        parts = weight.group // group
        self._weight = replace(
            weight,
            scales=weight.scales.repeat_interleave(parts, 1).contiguous(),
            zeros=weight.zeros.repeat_interleave(parts, 1).contiguous(),
        )

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        weight = self._weight
        multiply = get("int4_linear", x.device)
        y: torch.Tensor = multiply(x.contiguous(), weight.packed, weight.scales, weight.zeros)
        return y


def linear4(weight: Int4Weight, bias: torch.Tensor | None, dtype: torch.dtype) -> Layer4 | None:
    """A layer for where `weight` lies; None where 4-bit products cannot be had for it."""
    if weight.packed.device.type == "cuda":
        return KernelInt4Linear(weight, bias, dtype=dtype) if _kernel_group(weight) is not None else None
    if native_group(weight) is not None and native4_faster():
        return NativeInt4Linear(weight, bias, dtype=dtype)
    return CpuInt4Linear(weight, bias, dtype=dtype) if _cpu_group(weight) is not None and int4_works() else None


def int4_ready(device: torch.device) -> bool:
    """Whether 4-bit products can be had on this device at all."""
    return device.type == "cuda" or native4_works() or int4_works()


@functools.cache
def native4_faster() -> bool:
    """Whether this project's own kernels are right here and no slower than PyTorch's operator, if that works at all."""
    if not native4_works():
        return False
    if not int4_works():
        return True
    size, group = 1024, 128
    codes, ones = torch.full((size, size), 9), torch.ones(size, size // group)
    weight, x = Int4Weight(layouts.pack_int4(codes), ones, 8.0 * ones), torch.ones(_ROWS, size)
    own, other = NativeInt4Linear(weight), CpuInt4Linear(weight)
    own_s, other_s = _least_s(lambda: own(x)), _least_s(lambda: other(x))
    _log.info("4-bit layers, %d tokens: %.3f ms by own CPU kernels, %.3f by torch", _ROWS, own_s * 1e3, other_s * 1e3)
    return own_s <= other_s


def _kernel_group(weight: Int4Weight) -> int | None:
    """The largest power of two, at most 256, that divides this weight's groups; the kernel has none below 16."""
    group = math.gcd(weight.group, 256)
    return group if group >= _KERNEL_GROUP_MIN else None


def _cpu_group(weight: Int4Weight) -> int | None:
    """The operator's group size for this weight: larger groups are split, since it has none above 256."""
    rows, columns = weight.shape
    if rows % _CPU_ROWS:
        return None
    return next((group for group in CPU_GROUPS if weight.group % group == 0 and columns % group == 0), None)


@functools.cache
def int4_works() -> bool:
    """Whether the CPU operator exists here, agrees with plain products for each group size, keeps tokens apart, and is the
    vectorised one (on processors that it was not written for it falls back to a plain loop)."""
    return all(_agrees(group) for group in CPU_GROUPS) and _fast()


def _fast() -> bool:
    size, group = 512, 128
    codes = torch.full((size, size), 9)
    ones = torch.ones(size, size // group)
    layer = CpuInt4Linear(Int4Weight(layouts.pack_int4(codes), ones, 8.0 * ones), dtype=torch.bfloat16)
    x, dense = torch.ones(4, size).bfloat16(), torch.ones(size, size).bfloat16()
    return _least_s(lambda: layer(x)) <= _TIMES_SLOWER_MAX * _least_s(lambda: F.linear(x, dense))


def _least_s(action: Callable[[], object]) -> float:
    """Least processor time of a few calls."""
    spent = []
    for _ in range(7):
        started = time.process_time()
        action()
        spent.append(time.process_time() - started)
    return min(spent)


def _agrees(group: int) -> bool:
    generator = torch.Generator().manual_seed(1)
    codes = torch.randint(0, 16, (32, 2 * group), generator=generator)
    scales = torch.rand(32, 2, generator=generator).add_(0.5).bfloat16()
    zeros = torch.randint(0, 17, (32, 2), generator=generator).bfloat16()
    weight = Int4Weight(layouts.pack_int4(codes), scales, zeros)
    x = torch.randn(5, 2 * group, generator=generator).bfloat16()
    loud = x.clone()
    loud[4] *= 50.0
    try:
        layer = CpuInt4Linear(weight)
        got, beside_loud, alone = layer(x), layer(loud), layer(x[:1])
    except (RuntimeError, AttributeError, NotImplementedError):
        return False
    expected = x.float() @ weight.dense().T
    close = (got - expected).abs().max() < 0.02 * expected.abs().max()
    return bool(close and torch.equal(got[:4], beside_loud[:4]) and torch.equal(got[:1], alone))
