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
        kv_heads, head_dim = stored.shape[1], stored.shape[4]
        q, k, v = torch.split(qkv, [heads, kv_heads, kv_heads], dim=1)
        q, k = kernels.rope(q.contiguous(), k.contiguous(), *angles)
        flat = stored.view(2, kv_heads, -1, head_dim)
        flat[0].index_copy_(1, slots, k.transpose(0, 1))
        flat[1].index_copy_(1, slots, v.transpose(0, 1))
        return q

    def swiglu(self, gate_up: torch.Tensor) -> torch.Tensor:
        return kernels.swiglu(gate_up)

    def decode(self, queries: torch.Tensor, stored: torch.Tensor, span: Span) -> torch.Tensor:
        scale = queries.shape[2] ** -0.5
        out = kernels.paged_decode_attention(queries, stored[0], stored[1], span.blocks, span.lengths, scale)
        return out.view(queries.shape[0], -1)
