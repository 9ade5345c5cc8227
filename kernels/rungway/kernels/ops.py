"""The kernels as functions, each going where its first argument is. Shapes and formulae: reference.py."""

from __future__ import annotations

import torch

from rungway.kernels.registry import get


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(normalised, x + residual); see reference.rms_norm."""
    out, h = get("rms_norm", x.device)(x, weight, eps, residual)
    return out, h


def rope(
    q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, frequencies: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rotated q, rotated k); see reference.rope."""
    q_out, k_out = get("rope", q.device)(q, k, positions, frequencies)
    return q_out, k_out


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up; see reference.swiglu."""
    out: torch.Tensor = get("swiglu", gate_up.device)(gate_up)
    return out


def paged_decode_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Attention of one query per sequence; see reference.paged_decode_attention."""
    attend = get("paged_decode_attention", q.device)
    out: torch.Tensor = attend(q, k_cache, v_cache, block_tables, context_lens, scale)
    return out
