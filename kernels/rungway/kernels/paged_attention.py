"""Decode attention over a paged KV cache: split along the context, all query heads of a kv head in one tile.

Each program takes one sequence, one kv head and one segment of SEGMENT tokens; a second kernel merges the segments'
(maximum, sum, weighted values). Segments are cut by position alone, so a sequence's result does not depend on its
batch, and a lone long sequence still fills the GPU. Segments past the context write (-inf, 0, 0) and merge as nothing.
Online softmax: Milakov and Gimelshein, arXiv 1805.02867; split along the context: Flash-Decoding (Dao et al., 2023).
"""

# mypy: allow-untyped-decorators
from __future__ import annotations

import torch
import triton
import triton.language as tl

SEGMENT = 512
TILE = 64


@triton.jit
def _attend(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    tables_ptr: tl.tensor,
    lens_ptr: tl.tensor,
    max_ptr: tl.tensor,
    sum_ptr: tl.tensor,
    acc_ptr: tl.tensor,
    scale: tl.tensor,
    heads: tl.tensor,
    table_width: tl.tensor,
    segments: tl.tensor,
    stride_head: tl.tensor,
    stride_block: tl.tensor,
    stride_token: tl.tensor,
    block_tokens: tl.tensor,
    GROUP: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    SEGMENT: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    row, kv_head, segment = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    context = tl.load(lens_ptr + row)
    member, lane = tl.arange(0, GROUP_BLOCK), tl.arange(0, DIM_BLOCK)
    head = kv_head * GROUP + member
    real = (member < GROUP)[:, None] & (lane < DIM)[None, :]
    q = tl.load(q_ptr + (row * heads + head)[:, None] * DIM + lane[None, :], mask=real, other=0.0)
    best = tl.full([GROUP_BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_BLOCK], tl.float32)
    acc = tl.zeros([GROUP_BLOCK, DIM_BLOCK], tl.float32)
    for tile in range(SEGMENT // TILE):
        start = segment * SEGMENT + tile * TILE
        if start < context:
            token = start + tl.arange(0, TILE)
            valid = token < context
            block = tl.load(tables_ptr + row * table_width + token // block_tokens, mask=valid, other=0).to(tl.int64)
            at = kv_head * stride_head + block * stride_block + (token % block_tokens) * stride_token
            there = valid[:, None] & (lane < DIM)[None, :]
            k = tl.load(k_ptr + at[:, None] + lane[None, :], mask=there, other=0.0)
            v = tl.load(v_ptr + at[:, None] + lane[None, :], mask=there, other=0.0)
            score = tl.dot(q, tl.trans(k), input_precision="ieee").to(tl.float32) * scale
            score = tl.where(valid[None, :], score, float("-inf"))
            new_best = tl.maximum(best, tl.max(score, axis=1))  # finite: a started tile has a valid token
            shrink = tl.exp(best - new_best)
            weight = tl.exp(score - new_best[:, None])
            total = total * shrink + tl.sum(weight, axis=1)
            acc = acc * shrink[:, None] + tl.dot(weight.to(v.dtype), v, input_precision="ieee").to(tl.float32)
            best = new_best
    out = (row * heads + head) * segments + segment
    tl.store(max_ptr + out, best, mask=member < GROUP)
    tl.store(sum_ptr + out, total, mask=member < GROUP)
    tl.store(acc_ptr + out[:, None] * DIM + lane[None, :], acc, mask=real)


@triton.jit
def _merge(
    max_ptr: tl.tensor,
    sum_ptr: tl.tensor,
    acc_ptr: tl.tensor,
    out_ptr: tl.tensor,
    segments: tl.tensor,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    SEGMENTS_BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    segment, lane = tl.arange(0, SEGMENTS_BLOCK), tl.arange(0, DIM_BLOCK)
    there = segment < segments
    best = tl.load(max_ptr + row * segments + segment, mask=there, other=float("-inf"))
    total = tl.load(sum_ptr + row * segments + segment, mask=there, other=0.0)
    top = tl.max(best, axis=0)
    weight = tl.where(best > float("-inf"), tl.exp(best - tl.where(top > float("-inf"), top, 0.0)), 0.0)
    at = (row * segments + segment)[:, None] * DIM + lane[None, :]
    acc = tl.load(acc_ptr + at, mask=there[:, None] & (lane < DIM)[None, :], other=0.0)
    below = tl.sum(weight * total, axis=0)
    out = tl.sum(weight[:, None] * acc, axis=0) / tl.where(below > 0.0, below, 1.0)
    tl.store(out_ptr + row * DIM + lane, out.to(out_ptr.dtype.element_ty), mask=lane < DIM)


def paged_decode_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """See reference.paged_decode_attention. `q`, `block_tables` contiguous; the caches may be strided views of equal
    strides whose last dimension is dense. Scratch: batch * heads * segments * (dim + 2) float32, where segments covers
    the width of `block_tables` (so that no length has to be read back from the GPU)."""
    batch, heads, dim = q.shape
    kv_heads, _, block_tokens, _ = k_cache.shape
    assert q.is_contiguous() and block_tables.is_contiguous() and heads % kv_heads == 0
    assert k_cache.stride() == v_cache.stride() and k_cache.stride(3) == 1
    out = torch.empty_like(q)
    if batch == 0:
        return out
    width, group = block_tables.shape[1], heads // kv_heads
    segments = max(1, triton.cdiv(width * block_tokens, SEGMENT))
    best = torch.empty((batch, heads, segments), dtype=torch.float32, device=q.device)
    total, acc = torch.empty_like(best), best.new_empty((batch, heads, segments, dim))
    dim_block = max(16, triton.next_power_of_2(dim))
    _attend[(batch, kv_heads, segments)](
        q, k_cache, v_cache, block_tables, context_lens, best, total, acc, scale, heads, width, segments,
        k_cache.stride(0), k_cache.stride(1), k_cache.stride(2), block_tokens,
        GROUP=group, GROUP_BLOCK=max(16, triton.next_power_of_2(group)), DIM=dim, DIM_BLOCK=dim_block,
        SEGMENT=SEGMENT, TILE=TILE, num_warps=4, num_stages=2,
    )  # fmt: skip
    _merge[(batch * heads,)](
        best, total, acc, out, segments,
        DIM=dim, DIM_BLOCK=dim_block, SEGMENTS_BLOCK=triton.next_power_of_2(segments), num_warps=4,
    )  # fmt: skip
    return out
