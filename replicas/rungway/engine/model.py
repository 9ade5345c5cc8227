"""A decoder over a paged cache, in plain torch, put together from the parts that its family has.

One forward pass takes the tokens of all sequences of a step in one row, [tokens, hidden]: first the decoding sequences
(one token each), then the prefill chunks. Everything but attention ignores where one sequence ends and the next begins.
Projections that read the same input are fused (q, k, v; gate, up).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from rungway.engine.attention import GroupedAttention
from rungway.engine.errors import ModelError
from rungway.engine.experts import Experts
from rungway.engine.families.rope import Rope
from rungway.engine.families.spec import Architecture
from rungway.engine.latent import LatentAttention
from rungway.engine.mlp import GatedMlp
from rungway.engine.native_step import LayerParts, NativeStep, native_step
from rungway.engine.ops import Ops, PlainOps, Span, pick_ops
from rungway.engine.parallel.group import Group
from rungway.engine.parts import Builder, Pass, Stream, View, Weights
from rungway.engine.precision import Maker, Precision, Role
from rungway.engine.sampler import Peaks
from rungway.engine.window import windowed
from rungway.kernels.cpu import memory
from rungway.kernels.cpu.bindings import GROUP
from rungway.kernels.sizes import queries_max

__all__ = ["Batch", "Decoder", "Weights"]

_PLAIN = PlainOps()


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
        group: Group | None = None,
    ) -> None:
        """`weights(name)` gives a tensor by its Hugging Face name, or raises KeyError. `ops` None = by device. `make` None =
        layers of `precision` without knowledge of their inputs. `group`: `arch` and `weights` are one rank's share of it."""
        self.arch = arch
        self.precision = precision
        self.dtype = precision.cache
        self.device = device
        self.make = make or Maker(precision)
        self.ops = ops or pick_ops(device)
        build = Builder(arch, weights, precision, device, self.ops, self.make, group)
        self._group = group
        try:
            self._embedding = build.get("model.embed_tokens.weight")
            head = self._embedding if arch.tied else build.get("lm_head.weight")
            head = head if group is None else group.rows(head)
            self._head = self.make(Role.HEAD, head, keep=arch.tied and group is None)
            self._norm = build.norm("model.norm")
            self._layers = [_Layer(build, index) for index in range(arch.layers)]
        except KeyError as error:
            raise ModelError(f"the weights have no tensor {error}") from error
        if self._embedding.shape != (arch.vocab_size, arch.hidden) or self._norm.shape != (arch.hidden,):
            raise ModelError(f"the weights are not those of {arch.vocab_size} tokens in {arch.hidden} dimensions")
        # rounded to the type of the weights, as the models were trained
        self._embedding_scale = float(torch.tensor(arch.embedding_scale, dtype=self.dtype))
        self._frequencies = self._frequencies_of(arch.rope)
        self._local_frequencies = None if arch.window is None else self._frequencies_of(arch.window.rope)
        self._step: NativeStep | None = None
        if ops is None and group is None and device.type == "cpu":
            layers = [layer.parts() for layer in self._layers]
            self._step = native_step(arch, self._embedding, self._norm, self._head, layers, self._frequencies)

    @property
    def path(self) -> str:
        """What computes: `native` = a step in one call of our own CPU kernels, `torch` or `triton` = operations one by one."""
        if self._step is not None:
            return "native"
        return "triton" if self.device.type == "cuda" else "torch"

    @property
    def peaks(self) -> Peaks | None:
        """Of the logits of the last pass, where they are known without reading them again."""
        return None if self._step is None else self._step.peaks

    @property
    def decode_masks(self) -> bool:
        """Whether the spans of decodes need masks, and are cut by length."""
        return self._step is None and self.ops.decode_masks

    @property
    def packs(self) -> bool:
        """Whether the rows of a sequence, and several sequences, may share a span: where all goes by lengths."""
        return self._step is None and not self.ops.decode_masks and self.arch.latent is None

    @property
    def queries_max(self) -> int:
        """Rows of one sequence that decode attention takes together."""
        return queries_max(self.arch.heads // self.arch.kv_heads) if self.packs else 1

    @property
    def chunk_masks(self) -> bool:
        """Whether the spans of chunks need masks."""
        return self._step is None and (self.ops.decode_masks or self.arch.latent is not None)

    @property
    def recordable(self) -> bool:
        """Whether a decode step is the same operations whatever its values: attention by lengths, nothing routed by value,
        one rank."""
        special = self.arch.latent or self.arch.routing or self._group
        return special is None and self._step is None and not self.ops.decode_masks

    def cache(self, blocks: int, block_tokens: int) -> list[torch.Tensor]:
        """Zeroed storage, one tensor per layer, laid out as its attention wants it (never uninitialised: padding is read,
        then masked). The last dimension but one is always `block_tokens`."""
        if block_tokens % GROUP:
            self._step = None  # the kernels' order within a block needs whole groups
        latent = self.arch.latent
        shape: tuple[int, ...] = (2, self.arch.kv_heads, blocks, block_tokens, self.arch.head_dim)
        if latent is not None:
            shape = (blocks, block_tokens, latent.rank + latent.rope)
        if self._step is not None:
            return [memory.zeros(shape, self.dtype) for _ in range(self.arch.layers)]
        return [torch.zeros(shape, dtype=self.dtype, device=self.device) for _ in range(self.arch.layers)]

    def close(self) -> None:
        """Gives up what outlives a process's own memory; nothing here."""

    def forward(self, batch: Batch, cache: list[torch.Tensor]) -> torch.Tensor:
        """Logits of `batch.outputs`, [outputs, vocabulary]; keys and values of all tokens are written to `cache`."""
        if self._step is not None:
            return self._step(batch, cache)
        step = self._views(batch, block_tokens=cache[0].shape[-2])
        x = F.embedding(batch.ids, self._embedding).to(self.precision.hidden)
        if self._embedding_scale != 1.0:
            x = x * self._embedding_scale
        stream = Stream(x)
        for layer, stored in zip(self._layers, cache, strict=True):
            stream = layer(stream, step, stored)
        last, _ = stream.rows(batch.outputs).normed(self.ops, self._norm, self.arch.norm_eps)
        logits = self._head(last)
        if self._group is not None:
            logits = self._group.joined(logits, self.arch.vocab_size)
        cap = self.arch.logit_cap
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def _frequencies_of(self, rope: Rope) -> torch.Tensor:
        return torch.tensor(rope.inverse_frequencies(self.arch.head_dim), dtype=torch.float32, device=self.device)

    def _views(self, batch: Batch, block_tokens: int) -> Pass:
        ops = self.ops if self.arch.latent is None else _PLAIN  # latent attention rotates by itself
        whole = View(ops.angles(batch.positions, self._frequencies, self.dtype), batch.spans)
        window = self.arch.window
        if window is None or self._local_frequencies is None:
            return Pass(batch.slots, whole, None)
        spans = [
            replace(span, window=window.size)
            if not self.ops.decode_masks
            else windowed(span, batch.positions[span.start : span.stop], window.size, block_tokens, self.dtype)
            for span in batch.spans
        ]
        return Pass(
            batch.slots, whole, View(self.ops.angles(batch.positions, self._local_frequencies, self.dtype), spans)
        )


class _Layer:
    """Attention, then the MLP or its experts, each added to the residual; `sandwich` puts norms on both sides of them."""

    def __init__(self, build: Builder, index: int) -> None:
        arch, prefix = build.arch, f"model.layers.{index}."
        before, after_attention, after_mlp = f"{prefix}post_attention_layernorm", None, None
        if arch.sandwich:
            after_attention, after_mlp = before, f"{prefix}post_feedforward_layernorm"
            before = f"{prefix}pre_feedforward_layernorm"
        self._attention: GroupedAttention | LatentAttention
        if arch.latent is not None:
            self._attention = LatentAttention(build, prefix, arch.latent)
        else:
            self._attention = GroupedAttention(build, prefix, index, after_attention)
        self._mlp: GatedMlp | Experts
        if arch.routing is not None and arch.routing.layers[index]:
            self._mlp = Experts(build, prefix, before, arch.routing)
        else:
            self._mlp = GatedMlp(build, prefix, before, after_mlp)

    def __call__(self, stream: Stream, step: Pass, stored: torch.Tensor) -> Stream:
        return self._mlp(self._attention(stream, step, stored))

    def parts(self) -> LayerParts | None:
        """What a step in one call is made of; None where that knows no such layer."""
        if isinstance(self._attention, GroupedAttention) and isinstance(self._mlp, GatedMlp):
            return self._attention.parts(), self._mlp.parts()
        return None
