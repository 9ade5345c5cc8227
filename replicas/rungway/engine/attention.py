"""Grouped-query attention over the paged cache, [2, kv_heads, blocks, block_tokens, head_dim] per layer: a gather by block
table gives keys and values of a batch as [kv_heads, batch, tokens, head_dim] without another copy."""

from __future__ import annotations

import torch

from rungway.engine.native_step import AttentionParts
from rungway.engine.ops import Ops, Span
from rungway.engine.parts import Builder, Pass, Stream
from rungway.engine.precision import Role
from rungway.engine.stored import Weight, rows_scaled


class GroupedAttention:
    """Norm, fused projection, optional norm of each query and key head, rotation, attention, output projection."""

    def __init__(self, build: Builder, prefix: str, index: int, after: str | None) -> None:
        """`after`: name of the norm between this part and the residual."""
        arch = build.arch
        self._arch = arch
        self._ops = build.ops
        self._local = arch.window is not None and arch.window.layers[index]
        self._norm = build.norm(f"{prefix}input_layernorm")
        weight, bias = build.fused(f"{prefix}self_attn.", "q_proj", "k_proj", "v_proj")
        width = arch.heads * arch.head_dim
        build.fits(f"{prefix}self_attn", weight, width + 2 * arch.kv_heads * arch.head_dim, arch.hidden)
        self._head_norms = self._read_head_norms(build, prefix) if arch.qk_norm else None
        weight, bias = self._scaled(weight, bias)
        weight, by = build.make.balance(Role.QKV, prefix + Role.QKV, weight)
        if by is not None:
            self._norm = self._norm / by
        self._qkv = build.made(prefix, Role.QKV, weight, bias, build.dtype)
        out, out_bias = build.fused(f"{prefix}self_attn.", "o_proj")
        build.fits(f"{prefix}self_attn.o_proj", out, arch.hidden, width)
        self._out = build.exit(build.made(prefix, Role.OUT, out, out_bias), after)

    def __call__(self, stream: Stream, step: Pass, stored: torch.Tensor) -> Stream:
        arch, ops = self._arch, self._ops
        view = step.local if self._local and step.local is not None else step.whole
        inputs, x = stream.normed(ops, self._norm, arch.norm_eps)
        qkv = self._qkv(inputs).view(x.shape[0], arch.heads + 2 * arch.kv_heads, arch.head_dim)
        queries = ops.place(qkv, arch.heads, view.angles, stored, step.slots, self._head_norms, arch.norm_eps)
        return self._out(attend(ops, queries, stored, view.spans), x)

    def parts(self) -> AttentionParts:
        """What a step in one call is made of (native_step.py)."""
        return AttentionParts(self._norm, self._head_norms, self._qkv, self._out.plain)

    def _read_head_norms(self, build: Builder, prefix: str) -> torch.Tensor:
        """[heads + kv_heads, head_dim] in float32; the scale of the scores is in the queries'."""
        query, key = (build.norm(f"{prefix}self_attn.{name}_norm").float() for name in "qk")
        arch = self._arch
        return torch.cat([(query * self._score_factor()).expand(arch.heads, -1), key.expand(arch.kv_heads, -1)])

    def _scaled(self, weight: Weight, bias: torch.Tensor | None) -> tuple[Weight, torch.Tensor | None]:
        """The fused projection with the scale of the scores in the queries' rows, unless a norm undoes it."""
        factor = self._score_factor()
        if self._head_norms is not None or factor == 1.0:
            return weight, bias
        rows = torch.ones(weight.shape[0], device=self._norm.device)
        rows[: self._arch.heads * self._arch.head_dim] = factor
        scaled = rows_scaled(weight, rows)
        return scaled, None if bias is None else (bias.float() * rows).to(bias.dtype)

    def _score_factor(self) -> float:
        """By what scores differ from q k / sqrt(head_dim): a scale of the model's own, and YaRN's, on q and k alike."""
        arch = self._arch
        rope = arch.window.rope if self._local and arch.window is not None else arch.rope
        scale = 1.0 if arch.score_scale is None else arch.score_scale * arch.head_dim**0.5
        return scale * rope.amplitude**2


def attend(ops: Ops, queries: torch.Tensor, stored: torch.Tensor, spans: list[Span]) -> torch.Tensor:
    """Attention of [tokens, heads, head_dim] over the cache of one layer; result [tokens, heads * head_dim]."""
    pieces = []
    for span in spans:
        rows = queries[span.start : span.stop]
        pieces.append(ops.prefill(rows, stored, span) if span.chunk else ops.decode(rows, stored, span))
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)
