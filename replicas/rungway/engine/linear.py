"""Linear layers with the weight laid out once, not on every call.

On CPU, oneDNN re-packs a plain weight at each `F.linear`; packing it at load makes decode 1.5 to 4 times faster. The
packing operators are what PyTorch's own compiler lowers to, but not public API, so this is the only module that knows
them: they are checked against `F.linear` on first use and not used where they are missing or wrong.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F


class Linear:
    """y = x W^T + b, optionally + residual. `x`: [tokens, in], result [tokens, out], both of the weight's dtype."""

    __slots__ = ("_bias", "_packed", "_weight")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None, *, keep: bool = False) -> None:
        """`keep` holds on to the plain weight as well (a tied embedding needs its rows)."""
        self._bias = bias
        self._packed = _pack(weight) if weight.device.type == "cpu" and packing_works(weight.dtype) else None
        self._weight = weight if keep or self._packed is None else None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._packed is not None:
            return torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")  # type: ignore[no-any-return]
        assert self._weight is not None
        return F.linear(x, self._weight, self._bias)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """y + residual, in one pass where the packed form allows."""
        if self._packed is not None:
            return torch.ops.mkldnn._linear_pointwise.binary(x, residual, self._packed, self._bias, "add")  # type: ignore[no-any-return]
        assert self._weight is not None
        return F.linear(x, self._weight, self._bias).add_(residual)


def _pack(weight: torch.Tensor) -> torch.Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(weight, None)  # type: ignore[no-any-return]


@functools.cache
def packing_works(dtype: torch.dtype) -> bool:
    """Whether the packed operators exist here and agree with plain ones, for one dtype."""
    if dtype not in (torch.float32, torch.bfloat16):
        return False
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(96, 64, generator=generator).to(dtype)
    x = torch.randn(5, 64, generator=generator).to(dtype)
    bias, residual = torch.randn(96, generator=generator).to(dtype), torch.randn(5, 96, generator=generator).to(dtype)
    try:
        packed = _pack(weight)
        plain = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
        added = torch.ops.mkldnn._linear_pointwise.binary(x, residual, packed, bias, "add")
    except (RuntimeError, AttributeError):
        return False
    expected = F.linear(x.float(), weight.float(), bias.float())
    tolerance = 1e-4 if dtype is torch.float32 else 0.25
    return bool(
        torch.allclose(plain.float(), expected, atol=tolerance, rtol=tolerance / 10)
        and torch.allclose(added.float(), expected + residual.float(), atol=tolerance, rtol=tolerance / 10)
    )
