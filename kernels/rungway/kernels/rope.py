"""Rotary position embedding of queries and keys in one launch; angles are made in the kernel, no table is read."""

# mypy: allow-untyped-decorators
from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _rope(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    q_out_ptr: tl.tensor,
    k_out_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    frequencies_ptr: tl.tensor,
    heads: tl.tensor,
    kv_heads: tl.tensor,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    HEADS_BLOCK: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    pair = tl.arange(0, HALF_BLOCK)
    head = tl.arange(0, HEADS_BLOCK)
    frequency = tl.load(frequencies_ptr + pair, mask=pair < HALF, other=0.0)
    angle = tl.load(positions_ptr + token).to(tl.float32) * frequency
    cos, sin = tl.cos(angle)[None, :], tl.sin(angle)[None, :]
    within = head[:, None] * (2 * HALF) + pair[None, :]
    for_q = (head < heads)[:, None] & (pair < HALF)[None, :]
    at = token * heads * (2 * HALF) + within
    first = tl.load(q_ptr + at, mask=for_q, other=0.0).to(tl.float32)
    second = tl.load(q_ptr + at + HALF, mask=for_q, other=0.0).to(tl.float32)
    tl.store(q_out_ptr + at, (first * cos - second * sin).to(q_out_ptr.dtype.element_ty), mask=for_q)
    tl.store(q_out_ptr + at + HALF, (second * cos + first * sin).to(q_out_ptr.dtype.element_ty), mask=for_q)
    for_k = (head < kv_heads)[:, None] & (pair < HALF)[None, :]
    at = token * kv_heads * (2 * HALF) + within
    first = tl.load(k_ptr + at, mask=for_k, other=0.0).to(tl.float32)
    second = tl.load(k_ptr + at + HALF, mask=for_k, other=0.0).to(tl.float32)
    tl.store(k_out_ptr + at, (first * cos - second * sin).to(k_out_ptr.dtype.element_ty), mask=for_k)
    tl.store(k_out_ptr + at + HALF, (second * cos + first * sin).to(k_out_ptr.dtype.element_ty), mask=for_k)


def rope(
    q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, frequencies: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """See reference.rope. All inputs must be contiguous; kv_heads <= heads."""
    tokens, heads, dim = q.shape
    kv_heads = k.shape[1]
    assert q.is_contiguous() and k.is_contiguous() and kv_heads <= heads and dim % 2 == 0
    q_out, k_out = torch.empty_like(q), torch.empty_like(k)
    if tokens:
        _rope[(tokens,)](
            q, k, q_out, k_out, positions, frequencies, heads, kv_heads,
            HALF=dim // 2, HALF_BLOCK=triton.next_power_of_2(dim // 2), HEADS_BLOCK=triton.next_power_of_2(heads),
            enable_fp_fusion=True, num_warps=4,
        )  # fmt: skip
    return q_out, k_out
