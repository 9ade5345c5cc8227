"""The kernels as functions, each going where its first argument is: Triton on CUDA, else the reference. Shapes and formulae:
reference.py, attention_reference.py, layouts.py, sampling_reference.py."""

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
    """Rotated q; keys and values go into the caches. See reference.rope_kv."""
    function = get("rope_kv", qkv.device)
    q: torch.Tensor = function(qkv, positions, frequencies, slots, k_cache, v_cache, norms, eps)
    return q


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up; see reference.swiglu."""
    out: torch.Tensor = get("swiglu", gate_up.device)(gate_up)
    return out


def geglu(gate_up: torch.Tensor) -> torch.Tensor:
    """gelu(gate) * up; see reference.geglu."""
    out: torch.Tensor = get("geglu", gate_up.device)(gate_up)
    return out


def paged_decode_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
    query_starts: torch.Tensor | None = None,
    max_queries: int = 1,
    window: int = 0,
    soft_cap: float = 0.0,
) -> torch.Tensor:
    """Attention of one or a few queries per sequence; see attention_reference.paged_attention."""
    attend = get("paged_decode_attention", q.device)
    out: torch.Tensor = attend(
        q, k_cache, v_cache, block_tables, context_lens, scale, query_starts, max_queries, window, soft_cap
    )
    return out


def paged_prefill_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
    query_starts: torch.Tensor,
    max_queries: int,
    window: int = 0,
    soft_cap: float = 0.0,
) -> torch.Tensor:
    """Attention of many queries per sequence; see attention_reference.paged_attention."""
    attend = get("paged_prefill_attention", q.device)
    out: torch.Tensor = attend(
        q, k_cache, v_cache, block_tables, context_lens, scale, query_starts, max_queries, window, soft_cap
    )
    return out


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    uniform: torch.Tensor,
    raw: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(tokens, log-probabilities); see sampling_reference.sample."""
    function = get("sample", logits.device)
    tokens, logprobs = function(logits, temperature, top_k, top_p, min_p, uniform, raw)
    return tokens, logprobs
