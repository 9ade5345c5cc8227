"""The operations around the matrix products by this project's Triton kernels, through their registry, for CUDA. On CPU the
registry gives the kernels' references, so the same wiring is tested without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from rungway.kernels import ops as kernels

if TYPE_CHECKING:
    from rungway.engine.ops import Angles, Span


class KernelOps:
    decode_masks = False
    adds_in_norm = True

    def norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return kernels.rms_norm(x, weight, eps, residual)

    def angles(self, positions: torch.Tensor, frequencies: torch.Tensor, dtype: torch.dtype) -> Angles:
        return positions, frequencies

    def place(
        self,
        qkv: torch.Tensor,
        heads: int,
        angles: Angles,
        stored: torch.Tensor,
        slots: torch.Tensor,
        norms: torch.Tensor | None = None,
        eps: float = 0.0,
    ) -> torch.Tensor:
        return kernels.rope_kv(qkv, *angles, slots, stored[0], stored[1], norms, eps)

    def swiglu(self, gate_up: torch.Tensor) -> torch.Tensor:
        return kernels.swiglu(gate_up)

    def geglu(self, gate_up: torch.Tensor) -> torch.Tensor:
        return kernels.geglu(gate_up)

    def decode(self, queries: torch.Tensor, stored: torch.Tensor, span: Span) -> torch.Tensor:
        return _attend(kernels.paged_decode_attention, queries, stored, span)

    def prefill(self, queries: torch.Tensor, stored: torch.Tensor, span: Span) -> torch.Tensor:
        return _attend(kernels.paged_prefill_attention, queries, stored, span)


def _attend(
    attention: Callable[..., torch.Tensor], queries: torch.Tensor, stored: torch.Tensor, span: Span
) -> torch.Tensor:
    rows, _, dim = queries.shape
    out = attention(
        queries, stored[0], stored[1], span.blocks, span.lengths, dim**-0.5, span.starts, span.most, span.window
    )
    return out.view(rows, -1)
