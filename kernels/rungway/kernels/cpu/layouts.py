"""How weights and caches lie in memory for the kernels, in torch."""

from __future__ import annotations

from typing import NamedTuple

import torch

from rungway.kernels.cpu import memory
from rungway.kernels.cpu.bindings import GROUP, LANES, PANEL

_OFFSET = 128  # codes of 8-bit weights, and activations beside 4-bit ones, are stored as unsigned
_MIDDLE = 8  # the zero of symmetric codes of 4 bits
_TIMES = 16  # what codes of 4 bits are multiplied with in the sums: they stand in the upper half of a byte


def padded(size: int, to: int = PANEL) -> int:
    return -(-size // to) * to


def pack_codes(codes: torch.Tensor) -> torch.Tensor:
    """[out, in] int8 -> [panels, inputs / 4, 64, 4] uint8, both sides padded to 64 with codes of 0."""
    return _packed(codes.to(torch.int16).add_(_OFFSET).to(torch.uint8), 4, _OFFSET)


def pack_halves(weight: torch.Tensor) -> torch.Tensor:
    """[out, in] bfloat16 -> [panels, inputs / 2, 64, 2], both sides padded to 64 with 0."""
    return _packed(weight.bfloat16(), 2, 0)


class Nibbles(NamedTuple):
    """Weights of 4 bits as nibbles.h reads them. `blocks` uint8 [panels, groups, bytes]; `scales` and `offsets` float32 by
    output, up to whole panels. `zeroed`: with a zero for each group."""

    blocks: torch.Tensor
    scales: torch.Tensor
    offsets: torch.Tensor
    zeroed: bool


def pack_nibbles(codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor) -> Nibbles:
    """W[o, i] = (codes[o, i] - zeros[o, i // group]) * scales[o, i // group], with codes 0..15 [out, in], whole zeros 0..16 and
    any finite scales [out, groups]; groups of 32 to 128 inputs by steps of 32.

    A scale becomes a float16 beside its output's power of two: exact for float16 and bfloat16 within 2^-14 of the output's
    largest, else off by at most 2^-25 of that.
    """
    outputs, inputs = codes.shape
    groups = scales.shape[1]
    rows = padded(outputs)
    signed = torch.zeros(rows, inputs, dtype=torch.int16)
    signed[:outputs] = codes.to(torch.int16) - _MIDDLE
    middles = torch.zeros(rows, groups, dtype=torch.int16)
    middles[:outputs] = _MIDDLE - zeros.to(torch.int16)
    zeroed = bool(middles.any())
    by = torch.zeros(rows, groups)
    by[:outputs] = scales.float()
    _, exponents = torch.frexp(by.abs().amax(1))
    short = torch.ldexp(by, -exponents[:, None]).half()
    sums = signed.view(rows, groups, -1).sum(2, dtype=torch.int64) + middles * (inputs // groups)
    offsets = (short.double() * sums).sum(1) * (_OFFSET * _TIMES)
    parts = [_by_panel(short)] + ([_by_panel(middles.to(torch.int8))] if zeroed else [])
    # panel, half, low or high, output, group, four inputs -> panel, group, four inputs, half, output
    quads = (signed & 15).to(torch.uint8).view(-1, 2, 2, LANES, groups, inputs // groups // 4, 4)
    packed = (quads[:, :, 0] | quads[:, :, 1] << 4).permute(0, 3, 4, 1, 2, 5)
    parts.append(packed.reshape(-1, groups, inputs // groups * PANEL // 2))
    blocks = torch.cat(parts, 2)
    kept = memory.zeros(tuple(blocks.shape), torch.uint8).copy_(blocks)
    return Nibbles(kept, torch.ldexp(torch.full((rows,), 1.0 / _TIMES), exponents), offsets.float(), zeroed)


def _by_panel(values: torch.Tensor) -> torch.Tensor:
    """[rows, groups] -> [panels, groups, 64], as bytes"""
    return values.view(-1, PANEL, values.shape[1]).transpose(1, 2).contiguous().view(torch.uint8)


def _packed(weight: torch.Tensor, together: int, filler: int) -> torch.Tensor:
    outputs, inputs = weight.shape
    whole = torch.full((padded(outputs), padded(inputs)), filler, dtype=weight.dtype)
    whole[:outputs, :inputs] = weight
    parts = whole.view(-1, PANEL, whole.shape[1] // together, together).transpose(1, 2)
    return memory.zeros(tuple(parts.shape), weight.dtype).copy_(parts)


def pad_row(row: torch.Tensor) -> torch.Tensor:
    """One float32 for each output, up to whole panels."""
    whole = torch.zeros(padded(len(row)))
    whole[: len(row)] = row
    return whole


def plain_cache(stored: torch.Tensor) -> torch.Tensor:
    """A cache that the kernels wrote, [2, kv_heads, blocks, block_tokens, dim], with one token after the other."""
    _, kv_heads, blocks, block_tokens, dim = stored.shape
    parts = stored.view(2, kv_heads, blocks, block_tokens // GROUP, GROUP * dim)
    keys = parts[0].view(*parts.shape[1:4], dim // 2, GROUP, 2).transpose(-3, -2)
    values = parts[1].view(*parts.shape[1:4], GROUP // 2, dim, 2).transpose(-2, -1)
    shape = (kv_heads, blocks, block_tokens, dim)
    return torch.stack([keys.reshape(shape), values.reshape(shape)])
