"""Linear layers with quantised weights and plain activations: weights are converted on their way to the tensor cores.

The transposed product W x^T: weights are the operand that may come from registers, and a few tokens are its narrow side. One
kernel for decode (16 tokens, the sum over inputs split among programs, parts added in a fixed order by a second kernel) and
prefill (tiles of up to 128 tokens). How the sum is split follows from the shape of the weight alone, never from the GPU.
Layouts: layouts.py. FP8 codes are read as bytes: a GPU without FP8 in hardware computes the same numbers.
"""

# mypy: allow-untyped-decorators
from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from rungway.kernels.devices import architecture
from rungway.kernels.layouts import BLOCK
from rungway.kernels.tiles import chosen

INT8, INT4, FP8 = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
_NAMES = ("int8_linear", "int4_linear", "fp8_linear")  # by kind
PROGRAMS = 256  # that a decode product is cut into, about two for each multiprocessor of a large GPU
SPLIT_MAX = 16


class Config(NamedTuple):
    """Tile of `outs` x `tokens`, `ins` of each step; the steps are dealt out to `split` programs."""

    outs: int
    tokens: int
    ins: int
    split: int
    warps: int
    stages: int


NEIGHBOURS = {"outs": (64, 128), "ins": (64, 128, 256), "warps": (4, 8), "stages": (2, 3, 4, 5)}
_RANGES = (16, 32, 64)


def plan(kernel: str, x: torch.Tensor, codes: torch.Tensor, *_rest: Any) -> tuple[tuple[int, ...], Config]:
    """As in decode_attention.py; the split is never part of a choice."""
    key = architecture(x), next((most for most in _RANGES if x.shape[0] <= most), 128)
    config = config_for(x.shape[0], codes.shape[0], x.shape[1])
    found = chosen(kernel, key)
    return key, config if found is None else Config(*found)._replace(split=config.split)


def config_for(tokens: int, outs: int, ins: int) -> Config:
    """Reasoned, not measured. By the number of tokens: 16 (decode), 32, 64 (small chunks, verification), 128 (prefill)."""
    if tokens > 64:
        return Config(outs=128, tokens=128, ins=64, split=1, warps=8, stages=3)
    if tokens > 16:
        return Config(outs=64, tokens=32 if tokens <= 32 else 64, ins=128, split=_split(outs, ins), warps=8, stages=3)
    return Config(outs=64, tokens=16, ins=128, split=_split(outs, ins), warps=4, stages=4)


def _split(outs: int, ins: int) -> int:
    wanted = PROGRAMS // max(1, triton.cdiv(outs, 64))
    power: int = triton.next_power_of_2(wanted)
    return max(1, min(power, SPLIT_MAX, ins // 512))


@triton.jit
def _fp8_bits(code):  # type: ignore[no-untyped-def]
    """The float32 value of an e4m3 byte (NaN is not a code of a weight)."""
    wide = code.to(tl.int16)
    # exponent and mantissa fall into place as float16, 8 powers of two too small; denormals come out right as well
    bits = ((wide & 0x7F) << 7) | ((wide & 0x80) << 8)
    return bits.to(tl.float16, bitcast=True).to(tl.float32) * 256.0


@triton.jit
def _int4_weights(codes_ptr, scales_ptr, zeros_ptr, out, known, start, ins, GROUP: tl.constexpr, EVEN: tl.constexpr, OUTS: tl.constexpr, INS: tl.constexpr):  # type: ignore[no-untyped-def]  # fmt: skip
    """Float32 weights [OUTS, INS] from input `start` on."""
    byte = start // 2 + tl.arange(0, INS // 2)
    there = known[:, None] if EVEN else known[:, None] & (byte < ins // 2)[None, :]
    packed = tl.load(codes_ptr + out[:, None] * (ins // 2) + byte[None, :], mask=there, other=0)
    GROUPS: tl.constexpr = (INS + GROUP - 1) // GROUP
    group = start // GROUP + tl.arange(0, GROUPS)
    at = out[:, None] * (ins // GROUP) + group[None, :]
    whole = known[:, None] & (group < ins // GROUP)[None, :]
    zero = tl.load(zeros_ptr + at, mask=whole, other=0.0).to(tl.float32)
    scale = tl.load(scales_ptr + at, mask=whole, other=0.0).to(tl.float32)
    codes = tl.interleave(packed & 15, packed >> 4).to(tl.float32)
    spread = tl.reshape(codes, [OUTS, GROUPS, INS // GROUPS])
    return tl.reshape((spread - zero[:, :, None]) * scale[:, :, None], [OUTS, INS])


@triton.jit
def _linear(
    x_ptr: tl.tensor,
    codes_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    zeros_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    out_ptr: tl.tensor,
    tokens: tl.tensor,
    outs: tl.tensor,
    ins: tl.tensor,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EVEN: tl.constexpr,
    OUTS: tl.constexpr,
    TOKENS: tl.constexpr,
    INS: tl.constexpr,
    SPLIT: tl.constexpr,
) -> None:
    out = tl.program_id(0) * OUTS + tl.arange(0, OUTS)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    part = tl.program_id(2)
    known, asked = out < outs, token < tokens
    wide = out.to(tl.int64)
    columns = tl.arange(0, INS)
    x_at = x_ptr + token.to(tl.int64)[None, :] * ins
    acc = tl.zeros([OUTS, TOKENS], tl.float32)
    steps = tl.cdiv(ins, INS)
    each = tl.cdiv(steps, SPLIT)
    for step in range(part * each, tl.minimum(part * each + each, steps)):
        start = step * INS
        column = start + columns
        if EVEN:
            x = tl.load(x_at + column[:, None], mask=asked[None, :], other=0.0)
        else:
            x = tl.load(x_at + column[:, None], mask=asked[None, :] & (column < ins)[:, None], other=0.0)
        if KIND == INT4:
            weight = _int4_weights(codes_ptr, scales_ptr, zeros_ptr, wide, known, start, ins, GROUP, EVEN, OUTS, INS)
            acc = tl.dot(weight.to(x.dtype), x, acc, input_precision="ieee")
        else:
            there = known[:, None] if EVEN else known[:, None] & (column < ins)[None, :]
            codes = tl.load(codes_ptr + wide[:, None] * ins + column[None, :], mask=there, other=0)
            if KIND == INT8:
                acc = tl.dot(codes.to(x.dtype), x, acc, input_precision="ieee")
            elif GROUP == 0:
                acc = tl.dot(_fp8_bits(codes).to(x.dtype), x, acc, input_precision="ieee")
            else:
                at = scales_ptr + wide // GROUP * tl.cdiv(ins, GROUP) + start // GROUP
                scale = tl.load(at, mask=known, other=0.0)
                acc += tl.dot(_fp8_bits(codes).to(x.dtype), x, input_precision="ieee") * scale[:, None]
    place = token.to(tl.int64)[None, :] * outs + out[:, None]
    inside = known[:, None] & asked[None, :]
    if SPLIT > 1:
        tl.store(out_ptr + part.to(tl.int64) * tokens * outs + place, acc, mask=inside)
    else:
        if KIND != INT4 and GROUP == 0:
            acc = acc * tl.load(scales_ptr + out, mask=known, other=0.0)[:, None]
        if HAS_BIAS:
            acc += tl.load(bias_ptr + out, mask=known, other=0.0).to(tl.float32)[:, None]
        tl.store(out_ptr + place, acc.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _add_parts(
    parts_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    out_ptr: tl.tensor,
    outs: tl.tensor,
    stride: tl.tensor,
    HAS_SCALE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SPLIT: tl.constexpr,
    SIZE: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    out = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    known = out < outs
    total = tl.zeros([SIZE], tl.float32)
    for part in tl.static_range(SPLIT):
        total += tl.load(parts_ptr + part * stride + token * outs + out, mask=known, other=0.0)
    if HAS_SCALE:
        total = total * tl.load(scales_ptr + out, mask=known, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias_ptr + out, mask=known, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * outs + out, total.to(out_ptr.dtype.element_ty), mask=known)


def int8_linear(
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    config: Config | None = None,
) -> torch.Tensor:
    """See layouts.int8_linear. Everything contiguous."""
    return _launch(INT8.value, 0, x, codes, scales, scales, bias, config)


def int4_linear(
    x: torch.Tensor,
    packed: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    config: Config | None = None,
) -> torch.Tensor:
    """See layouts.int4_linear. Everything contiguous; groups are powers of two of at least 16."""
    group = x.shape[1] // scales.shape[1]
    assert group >= 16 and group & (group - 1) == 0 and scales.shape == zeros.shape
    return _launch(INT4.value, group, x, packed, scales, zeros, bias, config)


def fp8_linear(
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    config: Config | None = None,
) -> torch.Tensor:
    """See layouts.fp8_linear. Everything contiguous."""
    group = BLOCK if scales.dim() == 2 else 0
    return _launch(FP8.value, group, x, codes.view(torch.uint8), scales, scales, bias, config)


def _launch(
    kind: int,
    group: int,
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor,
    bias: torch.Tensor | None,
    config: Config | None,
) -> torch.Tensor:
    tokens, ins = x.shape
    outs = codes.shape[0]
    assert all(part.is_contiguous() for part in (x, codes, scales, zeros)) and (bias is None or bias.is_contiguous())
    y = x.new_empty((tokens, outs))
    if tokens == 0:
        return y
    config = config or plan(_NAMES[kind], x, codes)[1]
    split = config.split
    into = y if split == 1 else x.new_empty((split, tokens, outs), dtype=torch.float32)
    some = scales if bias is None else bias
    _linear[(triton.cdiv(outs, config.outs), triton.cdiv(tokens, config.tokens), split)](
        x, codes, scales, zeros, some, into, tokens, outs, ins,
        KIND=kind, GROUP=group, HAS_BIAS=bias is not None, EVEN=ins % config.ins == 0, OUTS=config.outs,
        TOKENS=config.tokens, INS=config.ins, SPLIT=split, enable_fp_fusion=True, num_warps=config.warps, num_stages=config.stages,
    )  # fmt: skip
    if split > 1:
        _add_parts[(tokens, triton.cdiv(outs, 1024))](
            into, scales, some, y, outs, tokens * outs, HAS_SCALE=kind != INT4.value and group == 0,
            HAS_BIAS=bias is not None, SPLIT=split, SIZE=1024, enable_fp_fusion=True, num_warps=4,
        )  # fmt: skip
    return y
