"""SwiGLU over a fused gate-and-up projection: two reads and one write, no intermediate in memory."""

# mypy: allow-untyped-decorators
from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 1024


@triton.jit
def _swiglu(gate_up_ptr: tl.tensor, out_ptr: tl.tensor, size: tl.tensor, BLOCK: tl.constexpr) -> None:
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < size
    source = gate_up_ptr + row * 2 * size + columns
    gate = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(source + size, mask=inside, other=0.0).to(tl.float32)
    out = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out_ptr + row * size + columns, out.to(out_ptr.dtype.element_ty), mask=inside)


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """See reference.swiglu. `gate_up` must be contiguous."""
    tokens, twice = gate_up.shape
    assert gate_up.is_contiguous() and twice % 2 == 0
    size = twice // 2
    out = gate_up.new_empty((tokens, size))
    if tokens:
        _swiglu[(tokens, triton.cdiv(size, BLOCK))](gate_up, out, size, BLOCK=BLOCK, num_warps=4)
    return out
