"""A whole step of a decoder in one call of this project's CPU kernels: embedding, all layers, logits.

At a hundred million parameters the work between the matrix products, and the way there through Python and torch, costs
as much as the products. The kernels keep a layer's cache in an order of their own (rows.h): who has a step like this must
not read the cache with other operations.

Every sum of a token runs in an order that only its position decides. A request gets the same bits alone, in a batch, cut
into chunks, after preemption and behind a cached prefix.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch

from rungway.engine.architecture import Architecture
from rungway.engine.families.spec import Activation
from rungway.engine.native_linear import PackedLinear
from rungway.engine.ops import Span
from rungway.engine.sampler import Peaks
from rungway.kernels.cpu import bindings


class AttentionParts(NamedTuple):
    """`head_norms` [heads + kv_heads, head_dim], of each query and key before the rotation; None = there are none."""

    norm: torch.Tensor
    head_norms: torch.Tensor | None
    qkv: object
    out: object


class MlpParts(NamedTuple):
    norm: torch.Tensor
    gate_up: object
    down: object


LayerParts = tuple[AttentionParts, MlpParts]


class Inputs(Protocol):
    """model.Batch, as far as it is read here."""

    @property
    def ids(self) -> torch.Tensor: ...

    @property
    def positions(self) -> torch.Tensor: ...

    @property
    def slots(self) -> torch.Tensor: ...

    @property
    def outputs(self) -> torch.Tensor: ...

    @property
    def spans(self) -> list[Span]: ...


class NativeStep:
    """Made by `native_step`. Used from one thread."""

    def __init__(
        self,
        arch: Architecture,
        embedding: torch.Tensor,
        norm: torch.Tensor,
        head: PackedLinear,
        layers: list[tuple[AttentionParts, MlpParts, list[PackedLinear]]],
        frequencies: torch.Tensor,
    ) -> None:
        self._library = bindings.library()
        self._vocabulary = arch.vocab_size
        self._frequencies = frequencies
        self._layers = (bindings.Layer * len(layers))()
        self._kept: list[object] = [embedding, head, layers]  # the kernels know only their addresses
        for slot, (attention, mlp, linears) in zip(self._layers, layers, strict=True):
            slot.attention_norm, slot.mlp_norm = self._row(attention.norm), self._row(mlp.norm)
            slot.head_norms = None if attention.head_norms is None else self._row(attention.head_norms)
            slot.qkv, slot.out, slot.gate_up, slot.down = (linear.packed for linear in linears)
        self._model = bindings.Model(
            embedding=embedding.data_ptr(),
            norm=self._row(norm),
            head=head.packed,
            layers=self._layers,
            eps=arch.norm_eps,
            scale=arch.head_dim**-0.5,
            count=len(layers),
            hidden=arch.hidden,
            heads=arch.heads,
            kv_heads=arch.kv_heads,
            dim=arch.head_dim,
            intermediate=arch.intermediate,
        )
        self._caches: np.ndarray = np.zeros(len(layers), dtype=np.uint64)
        self._logits = torch.empty(0, self._vocabulary)
        self.peaks = Peaks(torch.empty(0, dtype=torch.long), torch.empty(0))

    def _row(self, values: torch.Tensor) -> int:
        row = values.float().contiguous()
        self._kept.append(row)
        return row.data_ptr()

    def __call__(self, batch: Inputs, cache: list[torch.Tensor]) -> torch.Tensor:
        """Logits [outputs, vocabulary] in float32, overwritten by the next call. What can be told of them on the way is in
        `peaks` then."""
        for at, stored in enumerate(cache):
            self._caches[at] = stored.data_ptr()
        turns = batch.positions[:, None].float() * self._frequencies
        cos, sin = turns.cos(), turns.sin()
        count = len(batch.outputs)
        if len(self._logits) < count:
            self._logits = torch.empty(count, self._vocabulary)
        self.peaks = Peaks(torch.empty(count, dtype=torch.long), torch.empty(count))
        stretches, tables = _stretches(batch)
        step = bindings.Step(
            ids=batch.ids.data_ptr(),
            slots=batch.slots.data_ptr(),
            output_rows=batch.outputs.data_ptr(),
            cos=cos.data_ptr(),
            sin=sin.data_ptr(),
            stretches=stretches.ctypes.data,
            caches=self._caches.ctypes.data,
            logits=self._logits.data_ptr(),
            best=self.peaks.best.data_ptr(),
            log_sums=self.peaks.log_sums.data_ptr(),
            blocks=cache[0].shape[2],
            block_tokens=cache[0].shape[3],
            tokens=len(batch.ids),
            outputs=count,
            stretch_count=len(stretches),
            threads=torch.get_num_threads(),
        )
        if self._library.rw_forward(ctypes.byref(self._model), ctypes.byref(step)):
            raise RuntimeError("no memory for the rows of a step")
        del tables  # they had to live until here
        return self._logits[:count]


def _stretches(batch: Inputs) -> tuple[np.ndarray, list[torch.Tensor]]:
    """One entry per row of a decode and per chunk; and the block tables that they point into."""
    parts, tables = [], []
    for span in batch.spans:
        blocks = span.blocks.contiguous()
        tables.append(blocks)
        rows = 1 if span.chunk else span.stop - span.start
        part = np.empty(rows, dtype=bindings.STRETCH)
        part["first"] = np.arange(span.start, span.start + rows)
        part["count"] = span.stop - span.start if span.chunk else 1
        part["position"] = batch.positions[span.start : span.start + rows].numpy()
        part["table"] = blocks.data_ptr() + np.arange(rows) * (blocks.shape[1] * blocks.element_size())
        parts.append(part)
    return (parts[0] if len(parts) == 1 else np.concatenate(parts)), tables


def native_step(
    arch: Architecture,
    embedding: torch.Tensor,
    norm: torch.Tensor,
    head: object,
    layers: Sequence[LayerParts | None],
    frequencies: torch.Tensor,
) -> NativeStep | None:
    """A step of this model, or None where its shape or its layers are not those that the kernels know. `norm`: the last
    one; `frequencies` [head_dim / 2]."""
    if not (isinstance(head, PackedLinear) and _known_shape(arch) and embedding.dtype is torch.bfloat16):
        return None
    known = []
    for layer in layers:
        if layer is None:
            return None
        attention, mlp = layer
        parts = (attention.qkv, attention.out, mlp.gate_up, mlp.down)
        linears = [part for part in parts if isinstance(part, PackedLinear)]
        if len(linears) < len(parts):
            return None
        known.append((attention, mlp, linears))
    return NativeStep(arch, embedding, norm, head, known, frequencies)


def _known_shape(arch: Architecture) -> bool:
    plain = arch.activation is Activation.SILU and arch.embedding_scale == 1.0 and not arch.sandwich
    whole = arch.window is None and arch.routing is None and arch.latent is None and arch.logit_cap is None
    sizes = arch.head_dim % 32 == 0 and arch.head_dim <= bindings.DIM_MAX and arch.intermediate % bindings.PANEL == 0
    return plain and whole and sizes and arch.heads // arch.kv_heads <= bindings.QUERIES_MAX
