"""The operations around the matrix products by this project's Triton kernels, through their registry, for CUDA. On CPU the
registry gives the kernels' references, so the same wiring is tested without a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rungway.kernels import ops as kernels

if TYPE_CHECKING:
    from rungway.engine.ops import Angles, Span


class KernelOps:
    decode_masks = False

    def norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return kernels.rms_norm(x, weight, eps)[0]

    def angles(self, positions: torch.Tensor, frequencies: torch.Tensor, dtype: torch.dtype) -> Angles:
        return positions, frequencies

    def place(
        self, qkv: torch.Tensor, heads: int, angles: Angles, stored: torch.Tensor, slots: torch.Tensor
    ) -> torch.Tensor:
        return kernels.rope_kv(qkv, *angles, slots, stored[0], stored[1])

    def swiglu(self, gate_up: torch.Tensor) -> torch.Tensor:
        return kernels.swiglu(gate_up)

    def geglu(self, gate_up: torch.Tensor) -> torch.Tensor:
        return kernels.geglu(gate_up)

    def decode(self, queries: torch.Tensor, stored: torch.Tensor, span: Span) -> torch.Tensor:
        scale = queries.shape[2] ** -0.5
        out = kernels.paged_decode_attention(
            queries, stored[0], stored[1], span.blocks, span.lengths, scale, window=span.window
        )
        return out.view(queries.shape[0], -1)

    def prefill(self, queries: torch.Tensor, stored: torch.Tensor, span: Span) -> torch.Tensor:
        count = queries.shape[0]
        starts = torch.tensor([0, count], device=queries.device)
        scale = queries.shape[2] ** -0.5
        out = kernels.paged_prefill_attention(
            queries.contiguous(), stored[0], stored[1], span.blocks, span.lengths, scale, starts, count, span.window
        )
        return out.view(count, -1)
