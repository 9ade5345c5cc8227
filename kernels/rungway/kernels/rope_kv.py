"""Rotary position embedding of queries and keys, fused with the write of keys and values into the paged cache.

A program takes one token and some heads of the fused projection: each head is read once and goes where it belongs, rotated
or not. Models that normalise each query and key head (Qwen3, Gemma 3) have that done on the way.
"""

# mypy: allow-untyped-decorators
from __future__ import annotations

import torch
import triton
import triton.language as tl

HEADS_BLOCK = 16


@triton.jit
def _rope_kv(
    qkv_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    frequencies_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    norms_ptr: tl.tensor,
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    eps: tl.tensor,
    heads: tl.tensor,
    kv_heads: tl.tensor,
    stride_head: tl.tensor,
    stride_block: tl.tensor,
    stride_token: tl.tensor,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    HEADS_BLOCK: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    NORMED: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS_BLOCK + tl.arange(0, HEADS_BLOCK)
    pair = tl.arange(0, HALF_BLOCK)
    lanes = (pair < HALF)[None, :]
    every = heads + 2 * kv_heads
    at = (token * every + head)[:, None] * (2 * HALF) + pair[None, :]
    first = tl.load(qkv_ptr + at, mask=(head < every)[:, None] & lanes, other=0.0).to(tl.float32)
    second = tl.load(qkv_ptr + at + HALF, mask=(head < every)[:, None] & lanes, other=0.0).to(tl.float32)
    turned = (head < heads + kv_heads)[:, None]
    if NORMED:
        scale = tl.rsqrt((tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)) / (2 * HALF) + eps)
        weight_at = norms_ptr + head[:, None] * (2 * HALF) + pair[None, :]
        low = tl.load(weight_at, mask=turned & lanes, other=0.0).to(tl.float32)
        high = tl.load(weight_at + HALF, mask=turned & lanes, other=0.0).to(tl.float32)
        first = tl.where(turned, first * scale[:, None] * low, first)
        second = tl.where(turned, second * scale[:, None] * high, second)
    frequency = tl.load(frequencies_ptr + pair, mask=pair < HALF, other=0.0)
    angle = tl.load(positions_ptr + token).to(tl.float32) * frequency
    cos, sin = tl.cos(angle)[None, :], tl.sin(angle)[None, :]
    one = tl.where(turned, first * cos - second * sin, first).to(q_ptr.dtype.element_ty)
    two = tl.where(turned, second * cos + first * sin, second).to(q_ptr.dtype.element_ty)
    for_q = (head < heads)[:, None] & lanes
    into_q = q_ptr + (token * heads + head)[:, None] * (2 * HALF) + pair[None, :]
    tl.store(into_q, one, mask=for_q)
    tl.store(into_q + HALF, two, mask=for_q)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    into = (slot // BLOCK_TOKENS) * stride_block + (slot % BLOCK_TOKENS) * stride_token + pair[None, :]
    kept = (head >= heads) & (slot + head * 0 >= 0)  # a mask from a scalar alone is more than the interpreter takes
    for_k = (kept & (head < heads + kv_heads))[:, None] & lanes
    into_k = k_ptr + into + (head - heads).to(tl.int64)[:, None] * stride_head
    tl.store(into_k, one.to(k_ptr.dtype.element_ty), mask=for_k)
    tl.store(into_k + HALF, two.to(k_ptr.dtype.element_ty), mask=for_k)
    for_v = (kept & (head >= heads + kv_heads) & (head < every))[:, None] & lanes
    into_v = v_ptr + into + (head - heads - kv_heads).to(tl.int64)[:, None] * stride_head
    tl.store(into_v, one.to(v_ptr.dtype.element_ty), mask=for_v)
    tl.store(into_v + HALF, two.to(v_ptr.dtype.element_ty), mask=for_v)


def rope_kv(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    frequencies: torch.Tensor,
    slots: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    norms: torch.Tensor | None = None,
    eps: float = 0.0,
) -> torch.Tensor:
    """See reference.rope_kv. `qkv` and `norms` must be contiguous; the caches may be strided views of equal strides whose
    last dimension is dense."""
    tokens, every, dim = qkv.shape
    kv_heads, _, block_tokens, _ = k_cache.shape
    heads = every - 2 * kv_heads
    assert qkv.is_contiguous() and heads > 0 and dim % 2 == 0 and (norms is None or norms.is_contiguous())
    assert k_cache.stride() == v_cache.stride() and k_cache.stride(3) == 1
    q = qkv.new_empty((tokens, heads, dim))
    if tokens:
        _rope_kv[(tokens, triton.cdiv(every, HEADS_BLOCK))](
            qkv, positions, frequencies, slots, qkv if norms is None else norms, q, k_cache, v_cache, eps, heads,
            kv_heads, k_cache.stride(0), k_cache.stride(1), k_cache.stride(2),
            HALF=dim // 2, HALF_BLOCK=triton.next_power_of_2(dim // 2), HEADS_BLOCK=HEADS_BLOCK,
            BLOCK_TOKENS=block_tokens, NORMED=norms is not None, enable_fp_fusion=True, num_warps=4,
        )  # fmt: skip
    return q
