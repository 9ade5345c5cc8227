"""The decoder of the Llama and Qwen2 families over a paged KV cache, in plain torch.

One forward pass takes the tokens of all sequences of a step in one row, [tokens, hidden]: first the decoding sequences
(one token each), then the prefill chunks. Everything but attention ignores where one sequence ends and the next begins.
Projections that read the same input are fused (q, k, v; gate, up).

The cache of one layer is [2, kv_heads, blocks, block_tokens, head_dim]: a gather by block table gives keys and values
of a batch as [kv_heads, batch, tokens, head_dim] without another copy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from rungway.engine.architecture import Architecture
from rungway.engine.errors import ModelError
from rungway.engine.linear import Linear

Weights = Callable[[str], torch.Tensor]


@dataclass(frozen=True)
class Span:
    """Rows `start:stop` of a step that attend together: `batch` sequences of equal query length, padded to
    `blocks.numel() / batch` blocks. `mask` is additive, [batch, 1, queries, keys], 0 or -inf; None = all keys."""

    start: int
    stop: int
    batch: int
    blocks: torch.Tensor
    mask: torch.Tensor | None


@dataclass(frozen=True)
class Batch:
    """One step's input: `ids`, `positions`, `slots` (where in the cache) are [tokens]; `outputs` are the rows whose
    logits are wanted."""

    ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    outputs: torch.Tensor
    spans: list[Span]


class Decoder:
    """Weights and forward pass. `dtype` is that of weights, activations and cache."""

    def __init__(self, arch: Architecture, weights: Weights, dtype: torch.dtype, device: torch.device) -> None:
        """`weights(name)` gives a tensor by its Hugging Face name, or raises KeyError."""

        def get(name: str) -> torch.Tensor:
            return weights(name).to(device=device, dtype=dtype)

        self.arch = arch
        self.dtype = dtype
        self.device = device
        try:
            self._embedding = get("model.embed_tokens.weight")
            head = self._embedding if arch.tied else get("lm_head.weight")
            self._head = Linear(head, keep=arch.tied)
            self._norm = get("model.norm.weight")
            self._layers = [_Layer(arch, get, f"model.layers.{index}.") for index in range(arch.layers)]
        except KeyError as error:
            raise ModelError(f"the weights have no tensor {error}") from error
        frequencies = torch.tensor(arch.rope.inverse_frequencies(arch.head_dim), dtype=torch.float32, device=device)
        self._frequencies = torch.cat([frequencies, frequencies])
        # the first half of a rotated vector gets minus the second half: the sign sits in the sine
        half = torch.ones(arch.head_dim // 2, device=device)
        self._signs = torch.cat([-half, half])

    def cache(self, blocks: int, block_tokens: int) -> list[torch.Tensor]:
        """Zeroed key/value storage, one tensor per layer (never uninitialised: padding is read, then masked)."""
        shape = (2, self.arch.kv_heads, blocks, block_tokens, self.arch.head_dim)
        return [torch.zeros(shape, dtype=self.dtype, device=self.device) for _ in range(self.arch.layers)]

    def forward(self, batch: Batch, cache: list[torch.Tensor]) -> torch.Tensor:
        """Logits of `batch.outputs`, [outputs, vocabulary]; keys and values of all tokens are written to `cache`."""
        angles = batch.positions[:, None].float() * self._frequencies
        cos = angles.cos().to(self.dtype)[:, None]
        sin = (angles.sin() * self._signs).to(self.dtype)[:, None]
        x = F.embedding(batch.ids, self._embedding)
        for layer, stored in zip(self._layers, cache, strict=True):
            x = layer(x, cos, sin, batch, stored)
        x = F.rms_norm(x.index_select(0, batch.outputs), (self.arch.hidden,), self._norm, self.arch.norm_eps)
        return self._head(x)


class _Layer:
    def __init__(self, arch: Architecture, get: Weights, prefix: str) -> None:
        def fused(*names: str) -> Linear:
            weight = torch.cat([get(f"{prefix}{name}.weight") for name in names])
            try:
                bias = torch.cat([get(f"{prefix}{name}.bias") for name in names])
            except KeyError:
                bias = None
            return Linear(weight, bias)

        self._arch = arch
        self._input_norm = get(f"{prefix}input_layernorm.weight")
        self._mlp_norm = get(f"{prefix}post_attention_layernorm.weight")
        self._qkv = fused("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        self._out = fused("self_attn.o_proj")
        self._gate_up = fused("mlp.gate_proj", "mlp.up_proj")
        self._down = fused("mlp.down_proj")

    def __call__(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, batch: Batch, stored: torch.Tensor
    ) -> torch.Tensor:
        arch = self._arch
        normed = F.rms_norm(x, (arch.hidden,), self._input_norm, arch.norm_eps)
        qkv = self._qkv(normed).view(x.shape[0], arch.heads + 2 * arch.kv_heads, arch.head_dim)
        rotated = qkv[:, : arch.heads + arch.kv_heads]
        swapped = rotated.roll(arch.head_dim // 2, -1)
        rotated.mul_(cos).addcmul_(swapped, sin)
        keys_values = qkv[:, arch.heads :].transpose(0, 1)
        stored.view(2 * arch.kv_heads, -1, arch.head_dim).index_copy_(1, batch.slots, keys_values)
        x = self._out.add(attend(qkv[:, : arch.heads], stored, batch.spans), x)
        normed = F.rms_norm(x, (arch.hidden,), self._mlp_norm, arch.norm_eps)
        gate, up = self._gate_up(normed).chunk(2, dim=-1)
        return self._down.add(F.silu(gate).mul_(up), x)


def attend(queries: torch.Tensor, stored: torch.Tensor, spans: list[Span]) -> torch.Tensor:
    """Attention of [tokens, heads, head_dim] over the cache of one layer; result [tokens, heads * head_dim].

    Query heads that share a key head are folded into the query rows, so that each key is read once for all of them.
    """
    heads, head_dim = queries.shape[1:]
    kv_heads, block_tokens = stored.shape[1], stored.shape[3]
    flat = stored.view(2 * kv_heads, -1, block_tokens * head_dim)
    pieces = []
    for span in spans:
        count = span.stop - span.start
        gathered = flat.index_select(1, span.blocks).view(2, kv_heads, span.batch, -1, head_dim)
        grouped = queries[span.start : span.stop].view(count, kv_heads, heads // kv_heads, head_dim)
        if span.batch == count:  # one query each: [batch, kv_heads, group, head_dim]
            keys, values = gathered.transpose(1, 2)
            piece = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=span.mask)
            pieces.append(piece.reshape(count, heads * head_dim))
        else:  # one sequence, many queries: [kv_heads, group, queries, head_dim]
            keys, values = gathered.expand(2, kv_heads, heads // kv_heads, -1, head_dim)
            piece = F.scaled_dot_product_attention(grouped.permute(1, 2, 0, 3), keys, values, attn_mask=span.mask)
            pieces.append(piece.permute(2, 0, 1, 3).reshape(count, heads * head_dim))
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)
