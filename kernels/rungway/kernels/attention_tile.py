"""One step of online softmax over a tile of keys in a paged cache: what decode and prefill attention share.

Scores are kept in units of log2, so that a power of two takes the place of each exponential. Online softmax: Milakov and
Gimelshein, arXiv 1805.02867. Soft cap: cap * tanh(score / cap), as in Gemma 2 (arXiv 2408.00118).
"""

# mypy: allow-untyped-decorators
from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def nothing_seen(ROWS: tl.constexpr, DIM_BLOCK: tl.constexpr) -> Any:
    """(best, total, acc) of rows before their first key."""
    best = tl.full([ROWS], float("-inf"), tl.float32)
    return best, tl.zeros([ROWS], tl.float32), tl.zeros([ROWS, DIM_BLOCK], tl.float32)


@triton.jit
def attend_tile(
    q: tl.tensor,
    best: tl.tensor,
    total: tl.tensor,
    acc: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    table_ptr: tl.tensor,
    start: tl.tensor,
    context: tl.tensor,
    last: tl.tensor,
    scale: tl.tensor,
    soft_cap: tl.tensor,
    window: tl.tensor,
    stride_block: tl.tensor,
    stride_token: tl.tensor,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    TILE: tl.constexpr,
    MASKED: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
) -> Any:
    """(best, total, acc) after keys start .. start + TILE. `q` [rows, DIM_BLOCK]; row r sees keys up to `last[r]`, and with
    WINDOWED only `window` of them. Without MASKED all keys of the tile exist and are seen by every row."""
    token = start + tl.arange(0, TILE)
    lane = tl.arange(0, DIM_BLOCK)
    if MASKED:
        block = tl.load(table_ptr + token // BLOCK_TOKENS, mask=token < context, other=0).to(tl.int64)
    else:
        block = tl.load(table_ptr + token // BLOCK_TOKENS).to(tl.int64)
    at = (block * stride_block + (token % BLOCK_TOKENS) * stride_token)[:, None] + lane[None, :]
    if MASKED or DIM != DIM_BLOCK:
        there = (token < context)[:, None]
        if DIM != DIM_BLOCK:
            there = there & (lane < DIM)[None, :]
        k = tl.load(k_ptr + at, mask=there, other=0.0)
        v = tl.load(v_ptr + at, mask=there, other=0.0)
    else:
        k = tl.load(k_ptr + at)
        v = tl.load(v_ptr + at)
    score = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    if CAPPED:
        # cap * tanh(score / cap), tanh by one exponential that cannot overflow into NaN
        score = soft_cap * (1.0 - 2.0 / (tl.exp2(score * (2.0 * LOG2E / soft_cap)) + 1.0))
    score = score * LOG2E
    if MASKED:
        seen = token[None, :] <= last[:, None]
        if WINDOWED:
            seen = seen & (token[None, :] > last[:, None] - window)
        score = tl.where(seen, score, float("-inf"))
    new_best = tl.maximum(best, tl.max(score, axis=1))
    # a row that has seen no key yet must stay at (-inf, 0, 0): -inf - -inf would be NaN
    pivot = tl.where(new_best > float("-inf"), new_best, 0.0) if MASKED else new_best
    shrink = tl.exp2(best - pivot)
    weight = tl.exp2(score - pivot[:, None])
    total = total * shrink + tl.sum(weight, axis=1)
    acc = tl.dot(weight.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
    return new_best, total, acc


class Shape(NamedTuple):
    """Sizes of one call of an attention kernel; `width` in blocks per sequence."""

    tokens: int
    heads: int
    dim: int
    kv_heads: int
    block_tokens: int
    batch: int
    width: int


def shape_of(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, block_tables: torch.Tensor) -> Shape:
    """Raises AssertionError for a layout that the kernels do not read."""
    kv_heads, _, block_tokens, dim = k_cache.shape
    shape = Shape(
        q.shape[0], q.shape[1], q.shape[2], kv_heads, block_tokens, block_tables.shape[0], block_tables.shape[1]
    )
    assert q.is_contiguous() and block_tables.is_contiguous() and dim == shape.dim and shape.heads % kv_heads == 0
    assert k_cache.shape == v_cache.shape and k_cache.stride() == v_cache.stride() and k_cache.stride(3) == 1
    return shape
