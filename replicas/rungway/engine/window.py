"""Spans as a sliding-window layer sees them: only the blocks that the window touches, and a mask within them.

The cache keeps all blocks of a sequence, as other layers and prefix hits need them; a windowed layer reads few of them.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from rungway.engine.ops import Span


def windowed(span: Span, positions: torch.Tensor, size: int, block_tokens: int, dtype: torch.dtype) -> Span:
    """`positions` [rows] of the span's tokens; a token sees keys in (position - size, position]. `dtype` of the mask."""
    narrowed = _chunk if span.chunk else _decode
    return narrowed(span, positions, size, block_tokens, dtype)


def _decode(span: Span, positions: torch.Tensor, size: int, block_tokens: int, dtype: torch.dtype) -> Span:
    width = span.blocks.shape[1]
    count = min(width, (size - 2) // block_tokens + 2)  # a window that starts anywhere in a block touches so many
    first = (positions - size + 1).clamp_(min=0) // block_tokens
    picked = first[:, None] + torch.arange(count, device=positions.device)
    keys = (picked[:, :, None] * block_tokens + torch.arange(block_tokens, device=positions.device)).flatten(1)
    blocks = span.blocks.gather(1, picked.clamp_(max=width - 1))
    # a block beyond the table stands in for the last one, at positions that nobody sees
    return replace(span, blocks=blocks, mask=_mask(positions, keys, size, dtype)[:, None, None])


def _chunk(span: Span, positions: torch.Tensor, size: int, block_tokens: int, dtype: torch.dtype) -> Span:
    first = max(0, int(positions[0]) - size + 1) // block_tokens
    blocks = span.blocks[:, first:]
    keys = torch.arange(first * block_tokens, span.blocks.shape[1] * block_tokens, device=positions.device)
    return replace(span, blocks=blocks, mask=_mask(positions, keys[None], size, dtype)[None, None])


def _mask(positions: torch.Tensor, keys: torch.Tensor, size: int, dtype: torch.dtype) -> torch.Tensor:
    """[rows, keys], 0 or -inf; `keys` [rows or 1, keys] are positions."""
    behind = positions[:, None] - keys
    mask = torch.zeros(behind.shape, dtype=dtype, device=positions.device)
    return mask.masked_fill_((behind < 0) | (behind >= size), float("-inf"))
