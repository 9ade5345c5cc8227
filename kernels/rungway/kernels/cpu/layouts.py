"""How weights and caches lie in memory for the kernels, in torch."""

from __future__ import annotations

import torch

from rungway.kernels.cpu import memory
from rungway.kernels.cpu.bindings import GROUP, PANEL

_OFFSET = 128  # codes of weights are stored as unsigned


def padded(size: int, to: int = PANEL) -> int:
    return -(-size // to) * to


def pack_codes(codes: torch.Tensor) -> torch.Tensor:
    """[out, in] int8 -> [panels, inputs / 4, 64, 4] uint8, both sides padded to 64 with codes of 0."""
    return _packed(codes.to(torch.int16).add_(_OFFSET).to(torch.uint8), 4, _OFFSET)


def pack_halves(weight: torch.Tensor) -> torch.Tensor:
    """[out, in] bfloat16 -> [panels, inputs / 2, 64, 2], both sides padded to 64 with 0."""
    return _packed(weight.bfloat16(), 2, 0)


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
