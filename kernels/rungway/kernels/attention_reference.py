"""The formula of paged attention in plain torch; see reference.py."""

from __future__ import annotations

import torch


def paged_attention(
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
    """softmax(cap(scale * q K^T)) V for the newest tokens of each sequence, keys and values gathered by block table.

    `q` [tokens, heads, dim]: rows query_starts[b] : query_starts[b + 1] are the last tokens of sequence b (at most
    `max_queries`); None = one row for each. Caches [kv_heads, blocks, block_tokens, dim]; query head h reads kv head
    h // (heads / kv_heads). `block_tables` [batch, blocks per sequence], `context_lens` [batch] and `query_starts`
    [batch + 1] are integers. A sequence has context_lens[b] keys, its queries among them; a query at position p sees
    keys up to p, with `window` > 0 only those above p - window. cap(x) = soft_cap * tanh(x / soft_cap) where
    `soft_cap` > 0, else x. Rows of no query, and of sequences with context 0, are zero.
    Source: Kwon et al., PagedAttention, arXiv 2309.06180; grouped queries: Ainslie et al., arXiv 2305.13245.
    """
    tokens, heads, dim = q.shape
    kv_heads = k_cache.shape[0]
    out = torch.zeros_like(q)
    starts = torch.arange(tokens + 1) if query_starts is None else query_starts
    for row, context in enumerate(context_lens.tolist()):
        first, stop = int(starts[row]), int(starts[row + 1])
        if context == 0 or first == stop:
            continue
        blocks = block_tables[row, : -(-context // k_cache.shape[2])].long()
        keys, values = (
            cache[:, blocks].reshape(kv_heads, -1, dim)[:, :context].float().repeat_interleave(heads // kv_heads, 0)
            for cache in (k_cache, v_cache)
        )
        scores = scale * q[first:stop].float().transpose(0, 1) @ keys.transpose(1, 2)
        if soft_cap > 0.0:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        behind = torch.arange(context - (stop - first), context, device=q.device)[:, None]
        behind = behind - torch.arange(context, device=q.device)
        hidden = (behind < 0) | (behind >= (window or context))
        weights = torch.softmax(scores.masked_fill(hidden, float("-inf")), -1)
        out[first:stop] = (weights @ values).transpose(0, 1).to(q.dtype)
    return out
