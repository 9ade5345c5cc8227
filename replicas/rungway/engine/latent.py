"""Multi-head latent attention (DeepSeek-AI 2024, arXiv 2405.04434, section 2.1) over a compressed cache.

The cache of one layer is [blocks, block_tokens, rank + rope]: per token one latent vector, from which keys and values of
all heads follow by a matrix each, and one rotated key that all heads share. Two equal ways to attend:

absorbed  queries go into the latent space instead: all heads attend over the latents as over one key head. No key is ever
          expanded, so a decode step reads rank + rope numbers per token.
expanded  keys and values are made for all heads: more work per key, less per pair of query and key. For long chunks.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from rungway.engine.families.spec import Latent
from rungway.engine.ops import Angles, Span
from rungway.engine.parts import Builder, Pass, Stream
from rungway.engine.precision import Role
from rungway.engine.stored import rows_picked

_INNER_EPS = 1e-6  # of the norms of compressed vectors; no config.json states it


class LatentAttention:
    def __init__(self, build: Builder, prefix: str, latent: Latent) -> None:
        arch = build.arch
        self._arch, self._latent, self._ops = arch, latent, build.ops
        self._amplitude = arch.rope.amplitude
        self._norm = build.norm(f"{prefix}input_layernorm")
        place = f"{prefix}self_attn."
        first = "q_proj" if latent.query_rank is None else "q_a_proj"
        weight, bias = build.fused(place, first, "kv_a_proj_with_mqa")
        rows = weight.shape[0]
        turned = _turned(rows, [rows - latent.rope], latent)
        if latent.query_rank is None:
            turned = turned[self._turned_queries(rows)]
        self._down = build.made(
            prefix,
            Role.QKV,
            rows_picked(weight, turned, build.dtype),
            None if bias is None else bias[turned],
            build.dtype,
        )
        self._up = None
        if latent.query_rank is not None:
            self._query_norm = build.norm(f"{place}q_a_layernorm").to(build.dtype)
            weight, bias = build.fused(place, "q_b_proj")
            picked = rows_picked(weight, self._turned_queries(weight.shape[0]), build.dtype)
            self._up = build.made(f"{prefix}q_b.", Role.QKV, picked, bias, build.dtype)
        self._latent_norm = build.norm(f"{place}kv_a_layernorm").to(build.dtype)
        expand = build.get(f"{place}kv_b_proj.weight").view(arch.heads, latent.nope + latent.value, latent.rank)
        self._to_keys = expand[:, : latent.nope].contiguous()  # [heads, nope, rank]
        self._to_values = expand[:, latent.nope :].transpose(1, 2).contiguous()  # [heads, rank, value]
        self._out = build.exit(build.made(prefix, Role.OUT, *build.fused(place, "o_proj")), None)

    def __call__(self, stream: Stream, step: Pass, stored: torch.Tensor) -> Stream:
        latent, angles = self._latent, step.whole.angles
        inputs, x = stream.normed(self._ops, self._norm, self._arch.norm_eps)
        down = self._down(inputs)
        queries, compressed, key = torch.split(
            down, [down.shape[1] - latent.rank - latent.rope, latent.rank, latent.rope], -1
        )
        if self._up is not None:
            queries = self._up(self._ops.norm(queries.contiguous(), self._query_norm, _INNER_EPS)[0])
        queries = queries.reshape(x.shape[0], self._arch.heads, latent.nope + latent.rope)
        plain, turned = torch.split(queries, [latent.nope, latent.rope], -1)
        turned = self._rotated(turned, angles)
        compressed, _ = self._ops.norm(compressed.contiguous(), self._latent_norm, _INNER_EPS)
        entry = torch.cat([compressed, self._rotated(key[:, None], angles)[:, 0]], -1)
        stored.view(-1, latent.rank + latent.rope).index_copy_(0, step.slots, entry)
        pieces = [
            self._attend(plain[span.start : span.stop], turned[span.start : span.stop], stored, span)
            for span in step.whole.spans
        ]
        return self._out(torch.cat(pieces).flatten(1), x)

    def _attend(self, plain: torch.Tensor, turned: torch.Tensor, stored: torch.Tensor, span: Span) -> torch.Tensor:
        """[rows, heads, value] from queries [rows, heads, nope] and [rows, heads, rope]."""
        latent = self._latent
        entries = stored.index_select(0, span.blocks.view(-1)).view(span.blocks.shape[0], -1, stored.shape[-1])
        mask = _mask(span, entries) if span.mask is None else span.mask
        # expansion costs rank * (nope + value) per key and head, and saves 2 rank - nope - value per query, key and head
        kept, saved = latent.rank * (latent.nope + latent.value), 2 * latent.rank - latent.nope - latent.value
        if span.chunk and len(plain) * saved > kept:
            return self._expanded(plain, turned, entries[0], mask)
        return self._absorbed(plain, turned, entries, mask, span.chunk)

    def _absorbed(
        self, plain: torch.Tensor, turned: torch.Tensor, entries: torch.Tensor, mask: torch.Tensor, chunk: bool
    ) -> torch.Tensor:
        """`entries` [sequences, keys, rank + rope]: one sequence for a chunk, else one per row."""
        inward = torch.bmm(plain.transpose(0, 1), self._to_keys).transpose(0, 1)
        queries = torch.cat([inward, turned], -1)
        keys = entries[:, None]
        grouped = queries.transpose(0, 1)[None] if chunk else queries[:, None]
        if chunk:
            keys = keys.expand(-1, queries.shape[1], -1, -1)
        mixed = F.scaled_dot_product_attention(
            grouped, keys, keys[..., : self._latent.rank], attn_mask=mask, scale=self._latent.scale
        )
        by_head = mixed[0] if chunk else mixed[:, 0].transpose(0, 1)  # [heads, rows, rank]
        return torch.bmm(by_head, self._to_values).transpose(0, 1)

    def _expanded(
        self, plain: torch.Tensor, turned: torch.Tensor, entries: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        """`entries` [keys, rank + rope] of one sequence."""
        compressed, shared = torch.split(entries, [self._latent.rank, self._latent.rope], -1)
        keys = torch.matmul(compressed, self._to_keys.transpose(1, 2))  # [heads, keys, nope]
        keys = torch.cat([keys, shared.expand(keys.shape[0], -1, -1)], -1)
        values = torch.matmul(compressed, self._to_values)
        queries = torch.cat([plain, turned], -1).transpose(0, 1)
        mixed = F.scaled_dot_product_attention(
            queries[None], keys[None], values[None], attn_mask=mask, scale=self._latent.scale
        )
        return mixed[0].transpose(0, 1)

    def _rotated(self, x: torch.Tensor, angles: Angles) -> torch.Tensor:
        """`x` [tokens, heads, rope]; a pair is one number of each half."""
        cos, sin = angles
        turned = x * cos + x.roll(x.shape[-1] // 2, -1) * sin
        return turned if self._amplitude == 1.0 else turned * self._amplitude

    def _turned_queries(self, rows: int) -> torch.Tensor:
        width = self._latent.nope + self._latent.rope
        return _turned(rows, [head * width + self._latent.nope for head in range(self._arch.heads)], self._latent)


def _turned(rows: int, starts: list[int], latent: Latent) -> torch.Tensor:
    """An order of rows that brings rotary pairs which lie side by side to the two halves of `rope` rows from each start."""
    order = torch.arange(rows)
    if latent.interleaved:
        halves = torch.cat([torch.arange(0, latent.rope, 2), torch.arange(1, latent.rope, 2)])
        for start in starts:
            order[start : start + latent.rope] = start + halves
    return order


def _mask(span: Span, entries: torch.Tensor) -> torch.Tensor:
    """What a span's queries must not see, where kernels go by lengths alone and none was made: [rows, 1, 1, keys] of
    decodes, [1, 1, rows, keys] of a chunk."""
    keys = torch.arange(entries.shape[1], device=entries.device)
    last = span.lengths
    if span.chunk:  # its rows are the last ones of its length
        last = span.lengths + torch.arange(span.start - span.stop + 1, 1, device=entries.device)
    beyond = keys >= last[:, None]
    mask = torch.zeros(beyond.shape, dtype=entries.dtype, device=entries.device).masked_fill_(beyond, float("-inf"))
    return mask[None, None] if span.chunk else mask[:, None, None]
