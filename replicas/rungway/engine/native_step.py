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
from rungway.engine.native_linear import NativeLinear
from rungway.engine.ops import Span
from rungway.kernels.cpu import bindings


class LayerParts(NamedTuple):
    """A decoder layer of the plain shape: norm, attention, norm, gated MLP, with residuals."""

    attention_norm: torch.Tensor
    qkv: object
    out: object
    mlp_norm: torch.Tensor
    gate_up: object
    down: object


class Inputs(Protocol):
    """model.Batch, as far as it is read here."""

    ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    outputs: torch.Tensor
    spans: list[Span]


class NativeStep:
    """Made by `native_step`. Used from one thread."""

    def __init__(
        self,
        arch: Architecture,
        embedding: torch.Tensor,
        norm: torch.Tensor,
        head: NativeLinear,
        layers: list[tuple[torch.Tensor, NativeLinear, NativeLinear, torch.Tensor, NativeLinear, NativeLinear]],
    ) -> None:
        self._library = bindings.library()
        self._vocabulary = arch.vocab_size
        norms = [(first.float().contiguous(), second.float().contiguous()) for first, _, _, second, _, _ in layers]
        self._kept = (embedding, norm.float().contiguous(), head, layers, norms)
        self._layers = (bindings.Layer * len(layers))()
        for slot, (first, second), (_, qkv, out, _, gate_up, down) in zip(self._layers, norms, layers, strict=True):
            slot.attention_norm, slot.mlp_norm = first.data_ptr(), second.data_ptr()
            slot.qkv, slot.out, slot.gate_up, slot.down = (part.packed for part in (qkv, out, gate_up, down))
        self._model = bindings.Model(
            embedding=embedding.data_ptr(),
            norm=self._kept[1].data_ptr(),
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

    def __call__(self, batch: Inputs, cache: list[torch.Tensor], frequencies: torch.Tensor) -> torch.Tensor:
        """Logits [outputs, vocabulary] in float32; they are overwritten by the next call."""
        for at, stored in enumerate(cache):
            self._caches[at] = stored.data_ptr()
        turns = batch.positions[:, None].float() * frequencies
        cos, sin = turns.cos(), turns.sin()
        count = len(batch.outputs)
        if len(self._logits) < count:
            self._logits = torch.empty(count, self._vocabulary)
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
    """One entry per decoding sequence and per chunk; and the block tables that they point into."""
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
    arch: Architecture, embedding: torch.Tensor, norm: torch.Tensor, head: object, layers: Sequence[LayerParts | None]
) -> NativeStep | None:
    """A step of this model, or None where its shape or its layers are not those that the kernels know."""
    fits = (
        embedding.dtype is torch.bfloat16
        and arch.head_dim % 32 == 0
        and arch.head_dim <= bindings.DIM_MAX
        and arch.heads // arch.kv_heads <= bindings.QUERIES_MAX
        and arch.intermediate % bindings.PANEL == 0
    )
    if not fits or not isinstance(head, NativeLinear):
        return None
    known = []
    for layer in layers:
        if layer is None:
            return None
        linears = (layer.qkv, layer.out, layer.gate_up, layer.down)
        qkv, out, gate_up, down = (part if isinstance(part, NativeLinear) else None for part in linears)
        if qkv is None or out is None or gate_up is None or down is None:
            return None
        known.append((layer.attention_norm, qkv, out, layer.mlp_norm, gate_up, down))
    return NativeStep(arch, embedding, norm, head, known)
