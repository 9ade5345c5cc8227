"""The kernels' formulae in plain torch: what tests compare with, and what runs where there is no GPU.

All arithmetic is float32, whatever the inputs; results have the inputs' dtype.
"""

from __future__ import annotations

import torch


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """h = x + residual; out = h / sqrt(mean(h^2) + eps) * weight, over the last dimension.

    `x`, `residual` [tokens, hidden], `weight` [hidden]. Returns (out, h): h is the next residual.
    Source: Zhang and Sennrich, Root Mean Square Layer Normalization, arXiv 1910.07467.
    """
    h = x.float() if residual is None else x.float() + residual.float()
    out = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps) * weight.float()
    return out.to(x.dtype), h.to(x.dtype)


def rope(
    q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, frequencies: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate the pair (v[i], v[i + dim/2]) by positions * frequencies[i].

    `q` [tokens, heads, dim], `k` [tokens, kv_heads, dim], `positions` [tokens] integers, `frequencies` [dim/2] float32
    in radians per token. Source: Su et al., RoFormer, arXiv 2104.09864 (pairs laid out in halves, as GPT-NeoX does).
    """
    angles = positions.float()[:, None, None] * frequencies.float()
    cos, sin = angles.cos(), angles.sin()

    def rotated(v: torch.Tensor) -> torch.Tensor:
        first, second = v.float().chunk(2, -1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(v.dtype)

    return rotated(q), rotated(k)


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """out = gate * sigmoid(gate) * up, where `gate_up` [tokens, 2 * size] holds gate, then up. Returns [tokens, size].

    Source: Shazeer, GLU Variants Improve Transformer, arXiv 2002.05202.
    """
    gate, up = gate_up.float().chunk(2, -1)
    return (gate * torch.sigmoid(gate) * up).to(gate_up.dtype)


def paged_decode_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """softmax(scale * q K^T) V for one query per sequence, keys and values gathered by block table.

    `q` [batch, heads, dim]; caches [kv_heads, blocks, block_tokens, dim]; query head h reads kv head
    h // (heads / kv_heads); `block_tables` [batch, blocks per sequence], `context_lens` [batch] integers. Only the
    first context_lens[b] tokens of a sequence are read; a row with context 0 is padding and gives zeros.
    Source: Kwon et al., PagedAttention, arXiv 2309.06180; grouped queries: Ainslie et al., arXiv 2305.13245.
    """
    batch, heads, dim = q.shape
    kv_heads, _, block_tokens, _ = k_cache.shape
    out = torch.zeros_like(q)
    for row in range(batch):
        length = int(context_lens[row])
        if length == 0:
            continue
        blocks = block_tables[row, : -(-length // block_tokens)].long()
        keys = k_cache[:, blocks].reshape(kv_heads, -1, dim)[:, :length].float()
        values = v_cache[:, blocks].reshape(kv_heads, -1, dim)[:, :length].float()
        queries = q[row].float().view(kv_heads, heads // kv_heads, dim)
        weights = torch.softmax(scale * queries @ keys.transpose(1, 2), -1)
        out[row] = (weights @ values).view(heads, dim).to(q.dtype)
    return out
