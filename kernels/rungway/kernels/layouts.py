"""How quantised weights lie in memory, and what a layer of them computes: what loaders, CPU paths and GPU kernels share.

    int8   codes  int8 [out, in], scales float32 [out]
           W[o, i] = codes[o, i] * scales[o]
    int4   packed uint8 [out, in / 2]: byte b of a row holds the codes (0..15) of inputs 2b in its low half and 2b + 1
           in its high half; scales and zeros [out, in / group], both of one float type; group = in / scales.shape[1]
           W[o, i] = (code[o, i] - zeros[o, i // group]) * scales[o, i // group]
           Zeros are numbers, not codes: 8 for symmetric weights, 0..16 otherwise (some checkpoints store zero - 1, so
           that 16 occurs), all exact in float16 and bfloat16. `in` is a multiple of `group`, `group` of 2.
    fp8    codes float8_e4m3fn [out, in]; scales float32 [out], one for each row, or [ceil(out / 128), ceil(in / 128)],
           one for each block of 128 x 128 (the last ones may be cut off)
           W[o, i] = codes[o, i] * scales[o]    or    codes[o, i] * scales[o // 128, i // 128]

Everything is contiguous. A layer computes y = x W^T (+ bias): `x` [tokens, in] in float32, float16 or bfloat16, products
summed in float32, y [tokens, out] in the type of x. Here all arithmetic is float32 and only the result is rounded.
"""

from __future__ import annotations

import torch

BLOCK = 128  # edge of a block of fp8 weights that shares one scale


def pack_int4(codes: torch.Tensor) -> torch.Tensor:
    """Codes 0..15 [out, in] of any integer type -> uint8 [out, in / 2]. `in` must be even."""
    pairs = codes.to(torch.uint8).view(codes.shape[0], -1, 2)
    return pairs[:, :, 0] | (pairs[:, :, 1] << 4)


def unpack_int4(packed: torch.Tensor) -> torch.Tensor:
    """uint8 [out, in / 2] -> codes 0..15 uint8 [out, in]."""
    return torch.stack([packed & 15, packed >> 4], -1).view(packed.shape[0], -1)


def dense_int4(packed: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor) -> torch.Tensor:
    """W in float32, [out, in]."""
    rows, groups = scales.shape
    codes = unpack_int4(packed).view(rows, groups, -1).float()
    return codes.sub_(zeros.float()[:, :, None]).mul_(scales.float()[:, :, None]).view(rows, -1)


def dense_fp8(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """W in float32, [out, in]."""
    if scales.dim() == 1:
        return codes.float().mul_(scales[:, None])
    rows, columns = codes.shape
    spread = scales.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]
    return codes.float().mul_(spread)


def int8_linear(
    x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """y = x W^T + bias with W in int8, scaled by row. Source: the weight-only form of Dettmers et al., arXiv 2208.07339."""
    return _product(x, codes.float() * scales[:, None], bias)


def int4_linear(
    x: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """y = x W^T + bias with W in int4, scaled by group. Source: Frantar et al., arXiv 2210.17323; Lin et al., arXiv
    2306.00978."""
    return _product(x, dense_int4(packed, scales, zeros), bias)


def fp8_linear(
    x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """y = x W^T + bias with W in fp8 e4m3, scaled by row or by block; x is not quantised. Source: Micikevicius et al.,
    arXiv 2209.05433; blocks: DeepSeek-AI, arXiv 2412.19437."""
    return _product(x, dense_fp8(codes, scales), bias)


def _product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    y = x.float() @ weight.T
    return (y if bias is None else y + bias.float()).to(x.dtype)
