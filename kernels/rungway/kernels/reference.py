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


def geglu(gate_up: torch.Tensor) -> torch.Tensor:
    """out = gelu(gate) * up with gelu's tanh form; layout as in swiglu.

    Source: Shazeer, GLU Variants Improve Transformer, arXiv 2002.05202; gelu: Hendrycks and Gimpel, arXiv 1606.08415.
    """
    gate, up = gate_up.float().chunk(2, -1)
    return (torch.nn.functional.gelu(gate, approximate="tanh") * up).to(gate_up.dtype)


def rope_kv(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    frequencies: torch.Tensor,
    slots: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    norms: torch.Tensor | None = None,
    eps: float = 0.0,
) -> torch.Tensor:
    """Rotated queries [tokens, heads, dim]; rotated keys and plain values are written into the caches, in place.

    `qkv` [tokens, heads + 2 * kv_heads, dim] holds queries, keys, values; `k_cache`, `v_cache`
    [kv_heads, blocks, block_tokens, dim]. `slots` [tokens] integers: block * block_tokens + place in the block; where
    negative, nothing is written. `norms` [heads + kv_heads, dim]: weights of an RMSNorm of each query and key head, before
    rotation.
    Source: as in rope; norm of heads: Henry et al., arXiv 2010.04245.
    """
    kv_heads, _, block_tokens, _ = k_cache.shape
    q, k, v = torch.split(qkv, [qkv.shape[1] - 2 * kv_heads, kv_heads, kv_heads], 1)
    if norms is not None:
        q, k = (
            part.float() * torch.rsqrt(part.float().square().mean(-1, keepdim=True) + eps) * weight.float()
            for part, weight in zip((q, k), torch.split(norms, [q.shape[1], kv_heads]), strict=True)
        )
    q, k = (part.to(qkv.dtype) for part in rope(q.float(), k.float(), positions, frequencies))
    kept = slots >= 0
    block, place = slots[kept] // block_tokens, slots[kept] % block_tokens
    k_cache[:, block, place] = k[kept].transpose(0, 1).to(k_cache.dtype)
    v_cache[:, block, place] = v[kept].transpose(0, 1).to(v_cache.dtype)
    return q
