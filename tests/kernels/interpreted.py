"""Run by test_triton.py in a process with TRITON_INTERPRET=1: every kernel against its reference, on the CPU.

The interpreter is silently wrong in bfloat16 (it computes on the bit patterns), so cases run in float32 and float16; it
does not check bounds, so inputs lie in larger buffers of NaN: what is read beyond their ends shows in the result.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from rungway.kernels import cases
from rungway.kernels.registry import KERNELS

assert os.environ.get("TRITON_INTERPRET") == "1", "test_triton.py runs this file"

ALL = [(name, case) for name, kernel in KERNELS.items() for case in kernel.small]
TOLERANCE = {torch.float32: {"rtol": 1e-4, "atol": 1e-5}, torch.float16: {"rtol": 2e-3, "atol": 2e-3}}


def guarded(value: Any) -> Any:
    """The same tensor in the middle of a buffer of NaN (integers: of a huge number)."""
    if not isinstance(value, torch.Tensor):
        return value
    pad = 257
    alien = float("nan") if value.is_floating_point() else 2**30
    buffer = torch.full((value.numel() + 2 * pad,), alien, dtype=value.dtype)
    inner = buffer[pad : pad + value.numel()].view(value.shape)
    inner.copy_(value)
    return inner


def compare(got: Any, expected: Any, dtype: torch.dtype) -> None:
    got, expected = (x if isinstance(x, tuple) else (x,) for x in (got, expected))
    for one, other in zip(got, expected, strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other, **TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
@pytest.mark.parametrize(("name", "case"), ALL, ids=[f"{name}-{case.name}" for name, case in ALL])
def test_interpreted_kernel_matches_its_reference(name: str, case: cases.Case, dtype: torch.dtype) -> None:
    args = case.make(dtype)
    if name == "rope" and dtype == torch.float16 and "131072" in case.name:
        args = (*args[:2], args[2] % 4096, args[3])  # angles are float32 either way; keep the half-precision case small
    before = [arg.clone() if isinstance(arg, torch.Tensor) else arg for arg in args]
    got = KERNELS[name].triton()(*(guarded(arg) for arg in args))
    compare(got, KERNELS[name].reference(*before), dtype)


def test_strided_caches_are_read_in_place() -> None:
    q, k, v, *rest = cases.paged_decode_attention(4, 2, 32, [5, 40]).make(torch.float32)
    joined = torch.stack([k, v], 1)  # [kv_heads, 2, blocks, ...]: neither half is contiguous
    got = KERNELS["paged_decode_attention"].triton()(q, joined[:, 0], joined[:, 1], *rest)
    compare(got, KERNELS["paged_decode_attention"].reference(q, k, v, *rest), torch.float32)


def test_attention_does_not_depend_on_the_batch() -> None:
    attend = KERNELS["paged_decode_attention"].triton()
    q, k, v, tables, lens, scale = cases.paged_decode_attention(4, 2, 32, [70, 3, 600]).make(torch.float32)
    together = attend(q, k, v, tables, lens, scale)
    for row in range(3):
        alone = attend(q[row : row + 1], k, v, tables[row : row + 1].contiguous(), lens[row : row + 1], scale)
        assert torch.equal(alone[0], together[row])
