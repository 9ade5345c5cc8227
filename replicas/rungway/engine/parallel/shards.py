"""What one rank holds of a model (Shoeybi et al. 2019, arXiv 1909.08053): the projections into a part by output, the ones out
of it by input, so that a part needs one sum over the ranks. Norms, routers and compressions are whole on every rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from rungway.engine.errors import ModelError
from rungway.engine.families.spec import Architecture
from rungway.engine.precision import Precision, plain

_BY_OUTPUT = frozenset({"q_proj", "k_proj", "v_proj", "q_b_proj", "kv_b_proj", "gate_proj", "up_proj", "w1", "w3"})
_BY_INPUT = frozenset({"o_proj", "down_proj", "w2"})

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def precision_of(dtype: str, device: torch.device) -> Precision:
    """All ranks have to compute in the same numbers, so nothing is measured: `auto` is bfloat16 on a GPU, else float32.
    Raises ModelError for layers in fewer bits."""
    names = {**_DTYPES, "auto": torch.bfloat16 if device.type == "cuda" else torch.float32}
    if dtype not in names or (dtype == "float16" and device.type == "cpu"):
        raise ModelError(f"dtype {dtype!r} is not supported with tensor_parallel")
    return plain(names[dtype])


def share_of(arch: Architecture, size: int) -> Architecture:
    """The architecture of one of `size` ranks. Raises ModelError where something does not divide evenly."""
    routing = arch.routing
    parts = {"attention heads": arch.heads, "MLP columns": arch.intermediate}
    if arch.latent is None:
        parts["key heads"] = arch.kv_heads
    if routing is not None:
        parts.update({"expert columns": routing.intermediate, "shared expert columns": routing.shared})
    uneven = [f"{count} {what}" for what, count in parts.items() if count % size]
    if uneven:
        raise ModelError(f"{', '.join(uneven)} cannot be divided over {size} ranks (tensor_parallel)")
    kv_heads = arch.kv_heads // size if arch.latent is None else arch.kv_heads
    return replace(arch, heads=arch.heads // size, kv_heads=kv_heads, intermediate=arch.intermediate // size)


class ShardedWeights:
    """Tensors by name, each as far as this rank holds it. A quantised checkpoint comes dequantised."""

    def __init__(self, weights: Callable[[str], torch.Tensor], rank: int, size: int) -> None:
        self._weights = weights
        self._rank = rank
        self._size = size

    def __call__(self, name: str) -> torch.Tensor:
        """Raises KeyError."""
        whole = self._weights(name)
        *_, module, kind = ["", *name.split(".")]
        if module == "experts":  # stacked in memory: gate above up, then down
            if kind == "gate_up_proj":
                return torch.cat([self._part(half, 1) for half in whole.chunk(2, dim=1)], dim=1)
            return self._part(whole, 2)
        if module in _BY_OUTPUT:
            return self._part(whole, 0)
        if module in _BY_INPUT:
            if kind == "bias":  # counts once in the sum over ranks
                return whole if self._rank == 0 else torch.zeros_like(whole)
            return self._part(whole, 1)
        return whole

    def _part(self, whole: torch.Tensor, dim: int) -> torch.Tensor:
        return whole.chunk(self._size, dim=dim)[self._rank]
