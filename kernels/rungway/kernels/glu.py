"""Gated units over a fused gate-and-up projection: two reads and one write, no intermediate in memory."""

# mypy: allow-untyped-decorators
from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 1024


@triton.jit
def _glu(gate_up_ptr: tl.tensor, out_ptr: tl.tensor, size: tl.tensor, GELU: tl.constexpr, BLOCK: tl.constexpr) -> None:
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < size
    source = gate_up_ptr + row * 2 * size + columns
    gate = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(source + size, mask=inside, other=0.0).to(tl.float32)
    # gelu's (1 + tanh(z)) / 2 is sigmoid(2 z)
    turn = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate) if GELU else gate
    out = gate / (1.0 + tl.exp(-tl.maximum(turn, -80.0))) * up  # the exponential stays finite
    tl.store(out_ptr + row * size + columns, out.to(out_ptr.dtype.element_ty), mask=inside)


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """See reference.swiglu. `gate_up` must be contiguous."""
    return _launch(gate_up, gelu=False)


def geglu(gate_up: torch.Tensor) -> torch.Tensor:
    """See reference.geglu. `gate_up` must be contiguous."""
    return _launch(gate_up, gelu=True)


def _launch(gate_up: torch.Tensor, *, gelu: bool) -> torch.Tensor:
    tokens, twice = gate_up.shape
    assert gate_up.is_contiguous() and twice % 2 == 0
    size = twice // 2
    out = gate_up.new_empty((tokens, size))
    if tokens:
        _glu[(tokens, triton.cdiv(size, BLOCK))](
            gate_up, out, size, GELU=gelu, BLOCK=BLOCK, enable_fp_fusion=True, num_warps=4
        )
    return out
