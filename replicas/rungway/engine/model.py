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
from rungway.engine.ops import Angles, Ops, Span, gathered, pick_ops
from rungway.engine.precision import Maker, Precision, Projection, Role

Weights = Callable[[str], torch.Tensor]


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
    """Weights and forward pass. `dtype` is that of the cache and of the weights that are kept plain."""

    def __init__(
        self,
        arch: Architecture,
        weights: Weights,
        precision: Precision,
        device: torch.device,
        ops: Ops | None = None,
        make: Maker | None = None,
    ) -> None:
        """`weights(name)` gives a tensor by its Hugging Face name, or raises KeyError. `ops` None = by device. `make` None =
        layers of `precision` without knowledge of their inputs."""

        def get(name: str) -> torch.Tensor:
            return weights(name).to(device=device, dtype=precision.cache)

        self.arch = arch
        self.precision = precision
        self.dtype = precision.cache
        self.device = device
        self.make = make or Maker(precision)
        self.ops = ops or pick_ops(device)
        try:
            self._embedding = get("model.embed_tokens.weight")
            head = self._embedding if arch.tied else get("lm_head.weight")
            self._head = self.make(Role.HEAD, head, keep=arch.tied)
            self._norm = get("model.norm.weight").to(precision.hidden)
            self._layers = [_Layer(self, get, f"model.layers.{index}.") for index in range(arch.layers)]
        except KeyError as error:
            raise ModelError(f"the weights have no tensor {error}") from error
        frequencies = arch.rope.inverse_frequencies(arch.head_dim)
        self._frequencies = torch.tensor(frequencies, dtype=torch.float32, device=device)

    def cache(self, blocks: int, block_tokens: int) -> list[torch.Tensor]:
        """Zeroed key/value storage, one tensor per layer (never uninitialised: padding is read, then masked)."""
        shape = (2, self.arch.kv_heads, blocks, block_tokens, self.arch.head_dim)
        return [torch.zeros(shape, dtype=self.dtype, device=self.device) for _ in range(self.arch.layers)]

    def forward(self, batch: Batch, cache: list[torch.Tensor]) -> torch.Tensor:
        """Logits of `batch.outputs`, [outputs, vocabulary]; keys and values of all tokens are written to `cache`."""
        angles = self.ops.angles(batch.positions, self._frequencies, self.dtype)
        x = F.embedding(batch.ids, self._embedding).to(self.precision.hidden)
        for layer, stored in zip(self._layers, cache, strict=True):
            x = layer(x, angles, batch, stored)
        return self._head(self.ops.norm(x.index_select(0, batch.outputs), self._norm, self.arch.norm_eps))


class _Layer:
    def __init__(self, model: Decoder, get: Weights, prefix: str) -> None:
        def fused(*names: str) -> tuple[torch.Tensor, torch.Tensor | None]:
            weight = torch.cat([get(f"{prefix}{name}.weight") for name in names])
            try:
                return weight, torch.cat([get(f"{prefix}{name}.bias") for name in names])
            except KeyError:
                return weight, None

        def made(
            role: Role, weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype | None = None
        ) -> Projection:
            return make.watch(prefix + role, make(role, weight, bias, dtype=dtype), weight.shape[1])

        make, hidden = model.make, model.precision.hidden
        self._arch = model.arch
        self._ops = model.ops
        self._input_norm = get(f"{prefix}input_layernorm.weight").to(hidden)
        self._mlp_norm = get(f"{prefix}post_attention_layernorm.weight").to(hidden)
        weight, bias = fused("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        weight, by = make.balance(Role.QKV, prefix + Role.QKV, weight)
        if by is not None:
            self._input_norm = self._input_norm / by
        self._qkv = made(Role.QKV, weight, bias, model.dtype)
        self._out = made(Role.OUT, *fused("self_attn.o_proj"))
        weight, bias = fused("mlp.gate_proj", "mlp.up_proj")
        weight, by = make.balance(Role.GATE_UP, prefix + Role.GATE_UP, weight)
        if by is not None:
            self._mlp_norm = self._mlp_norm / by
        down, down_bias = fused("mlp.down_proj")
        down, by = make.balance(Role.DOWN, prefix + Role.DOWN, down)
        if by is not None:
            rows = torch.cat([torch.ones_like(by), 1.0 / by])  # only `up` scales the product silu(gate) * up
            weight, bias = weight.float() * rows[:, None], None if bias is None else bias.float() * rows
        self._gate_up = made(Role.GATE_UP, weight, bias)
        self._down = made(Role.DOWN, down, down_bias)

    def __call__(self, x: torch.Tensor, angles: Angles, batch: Batch, stored: torch.Tensor) -> torch.Tensor:
        arch, ops = self._arch, self._ops
        qkv = self._qkv(ops.norm(x, self._input_norm, arch.norm_eps))
        qkv = qkv.view(x.shape[0], arch.heads + 2 * arch.kv_heads, arch.head_dim)
        queries = ops.place(qkv, arch.heads, angles, stored, batch.slots)
        x = self._out.add(attend(ops, queries, stored, batch.spans), x)
        return self._down.add(ops.swiglu(self._gate_up(ops.norm(x, self._mlp_norm, arch.norm_eps))), x)


def attend(ops: Ops, queries: torch.Tensor, stored: torch.Tensor, spans: list[Span]) -> torch.Tensor:
    """Attention of [tokens, heads, head_dim] over the cache of one layer; result [tokens, heads * head_dim]."""
    pieces = []
    for span in spans:
        rows = queries[span.start : span.stop]
        pieces.append(_prefill(rows, stored, span) if span.chunk else ops.decode(rows, stored, span))
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def _prefill(queries: torch.Tensor, stored: torch.Tensor, span: Span) -> torch.Tensor:
    """Many queries of one sequence, folded as [kv_heads, group, queries, head_dim]: keys are not copied per group."""
    count, heads, head_dim = queries.shape
    kv_heads = stored.shape[1]
    grouped = queries.reshape(count, kv_heads, heads // kv_heads, head_dim).permute(1, 2, 0, 3)
    keys, values = gathered(stored, span).expand(2, kv_heads, heads // kv_heads, -1, head_dim)
    piece = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=span.mask)
    return piece.permute(2, 0, 1, 3).reshape(count, heads * head_dim)
