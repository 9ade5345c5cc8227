"""RMSNorm with the residual addition fused in: one read and one write of each row instead of three."""

# mypy: allow-untyped-decorators
from __future__ import annotations

import torch
import triton
import triton.language as tl

ELEMENTS = 2048  # of a program; narrow rows are taken several at a time


@triton.jit
def _rms_norm(
    x_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    out_ptr: tl.tensor,
    h_ptr: tl.tensor,
    tokens: tl.tensor,
    hidden: tl.tensor,
    eps: tl.tensor,
    HAS_RESIDUAL: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    inside = (row < tokens)[:, None] & (columns < hidden)[None, :]
    at = row.to(tl.int64)[:, None] * hidden + columns[None, :]
    h = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        h += tl.load(residual_ptr + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(h_ptr + at, h.to(h_ptr.dtype.element_ty), mask=inside)
    weight = tl.load(weight_ptr + columns, mask=columns < hidden, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(h * h, axis=1) / hidden + eps)
    out = h * scale[:, None] * weight[None, :]
    tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=inside)


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """See reference.rms_norm. `x` and `residual` must be contiguous; a whole row is held in registers. Without a residual
    the second result is `x` itself."""
    tokens, hidden = x.shape
    assert x.is_contiguous() and weight.is_contiguous() and (residual is None or residual.is_contiguous())
    out, h = torch.empty_like(x), x if residual is None else torch.empty_like(x)
    if tokens == 0:
        return out, h
    block = triton.next_power_of_2(hidden)
    rows = max(1, ELEMENTS // block)
    _rms_norm[(triton.cdiv(tokens, rows),)](
        x, x if residual is None else residual, weight, out, h, tokens, hidden, eps,
        HAS_RESIDUAL=residual is not None, ROWS=rows, BLOCK=block, enable_fp_fusion=True, num_warps=min(max(block * rows // 512, 1), 16),
    )  # fmt: skip
    return out, h
