"""Chooses the numbers that a model computes in, by measurement, and makes its layers in them. What there is: formats.py."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Mapping
from typing import Protocol

import torch

from rungway.engine.architecture import Architecture
from rungway.engine.errors import ModelError
from rungway.engine.formats import (
    FORMATS,
    INT8,
    INT8_GPU,
    INT8_PART,
    Precision,
    Role,
    as_stored,
    four_bits,
    int8_ready,
    keeps,
    plain,
)
from rungway.engine.fp8 import linear8
from rungway.engine.int4 import best_factors, group_for, int4_ready, linear4, quantised
from rungway.engine.int8 import Int8Linear, int8_works
from rungway.engine.int8_kernel import KernelInt8Linear
from rungway.engine.linear import Linear
from rungway.engine.native_linear import NativeLinear, native_works
from rungway.engine.smoothing import Seen, Watched, factors
from rungway.engine.stored import Fp8Weight, Weight

__all__ = ["INT8", "INT8_PART", "Maker", "Precision", "Projection", "Role", "candidates", "plain"]

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_BATCH = 8  # tokens of the decode step that is timed
_TRIES = 9
_INT8_LEAD = 1.25  # a layer alone stays in the caches; in the model, half the bytes are worth about this much more


_log = logging.getLogger(__name__)


class Projection(Protocol):
    """A linear layer: y = x W^T + b, and y + residual."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor: ...


def candidates(name: str, arch: Architecture, device: torch.device, form: str | None = None) -> list[Precision]:
    """What to try, best first; the last one needs no test. `auto`: the bits that a quantised checkpoint has its weights in
    (`form`) where they can be computed with; else bfloat16 on a GPU, on CPU in the order of a decode step's speed. Raises
    ModelError for a name that is not known or not possible here."""
    if name == "auto" and form is not None and keeps(form, device):
        return [as_stored(form, device)]
    four = four_bits(name, device)
    if four is not None:
        if not int4_ready(device):
            raise ModelError(f"{name} is not supported here (use auto)")
        return [as_stored("int4", device) if form == "int4" else four]
    if name in _DTYPES:
        if name == "float16" and device.type == "cpu":
            raise ModelError("float16 is not supported on CPU (use bfloat16, float32 or auto)")
        return [plain(_DTYPES[name])]
    if name == "int8":
        if not int8_ready(device):
            raise ModelError("int8 is not supported here (use auto)")
        return [INT8 if device.type == "cpu" else INT8_GPU]
    if name != "auto":
        raise ModelError(f"dtype {name!r} is none of auto, {', '.join(FORMATS)}")
    return _ranked(arch, device)


def _ranked(arch: Architecture, device: torch.device) -> list[Precision]:
    """What `auto` tries: 8 bits where they decode faster than the faster of the plain types, then that one. Never 4 bits: what
    they cost in answers is for who configures the version to accept."""
    if device.type != "cpu":
        return [plain(torch.bfloat16)]
    kinds = [plain(torch.bfloat16), plain(torch.float32)]
    fewer = [INT8] if int8_ready(device) else []
    costs = {kind: _decode_cost_s(arch, kind) for kind in (*kinds, *fewer)}
    best = min(kinds, key=lambda kind: costs[kind])
    return [INT8, INT8_PART, best] if fewer and costs[INT8] < costs[best] else [best]


class Maker:
    """Makes the layers of one model; for each shape it measures once which form is faster."""

    def __init__(self, precision: Precision, seen: Mapping[str, Seen] | None = None) -> None:
        """`seen`: of the input channels of each layer, by place, as `watched` had them in the plain model."""
        self.precision = precision
        self.seen = seen or {}
        self.watching = False
        self.watched: dict[str, Watched] = {}
        self.chosen: dict[tuple[int, int], str] = {}  # (out, in) -> int8 | bfloat16, where there was a choice

    def __call__(
        self,
        role: Role,
        weight: Weight,
        bias: torch.Tensor | None = None,
        *,
        keep: bool = False,
        dtype: torch.dtype | None = None,
    ) -> Projection:
        """`weight` [out, in] in the plain type, or as a checkpoint has it. `keep` shares a weight that is kept anyway.
        `dtype`: of the result, where no residual is added; None = that of the activations."""
        precision = self.precision
        out = dtype or precision.hidden
        group = group_for(weight.shape[1], precision.group) if role in precision.int4 else None
        if isinstance(weight, torch.Tensor) and group is not None:
            weight = quantised(weight, group, symmetric=precision.symmetric)
        if not isinstance(weight, torch.Tensor):
            layer = linear8(weight, bias, out) if isinstance(weight, Fp8Weight) else linear4(weight, bias, out)
            if layer is not None:
                return layer
            weight = weight.dense().to(precision.cache)
        if precision.hidden is precision.cache:
            if role in precision.int8:
                return KernelInt8Linear(weight, bias, dtype=out)
            return Linear(weight, bias, keep=keep)
        if (precision.int8 or precision.int4 or precision.stored) and native_faster():
            return NativeLinear(weight, bias, dtype=out, eight_bits=role in precision.int8)
        shape = (weight.shape[0], weight.shape[1])
        if role in precision.int8 and shape not in self.chosen:
            small, big = Int8Linear(weight, bias, dtype=out), Bfloat16Linear(weight, bias, dtype=out)
            x = torch.ones(_BATCH, shape[1])
            small_s, big_s = _best_s([lambda: small(x), lambda: big(x)])
            self.chosen[shape] = "int8" if small_s <= big_s * _INT8_LEAD else "bfloat16"
        if role in precision.int8 and self.chosen[shape] == "int8":
            return Int8Linear(weight, bias, dtype=out)
        return Bfloat16Linear(weight, bias, dtype=out)

    def watch(self, place: str, layer: Projection, inputs: int) -> Projection:
        """A plain layer, with its input channels watched where `watching` was asked for."""
        if not self.watching or not isinstance(layer, Linear):
            return layer
        self.watched[place] = Watched(layer, inputs)
        return self.watched[place]

    def balance(self, role: Role, place: str, weight: Weight) -> tuple[Weight, torch.Tensor | None]:
        """The weight, and by what to divide its input channels; None = leave them."""
        if place not in self.seen or not isinstance(weight, torch.Tensor):
            return weight, None
        by = None
        if role in self.precision.int4:
            group = group_for(weight.shape[1], self.precision.group)
            if group is not None:
                by = best_factors(weight, self.seen[place].squares, group, symmetric=self.precision.symmetric)
        elif role in self.precision.int8:
            by = factors(self.seen[place].peaks, weight)
        return (weight, None) if by is None else (weight.float() * by, by)


class Bfloat16Linear:
    """A packed bfloat16 layer between float32 activations."""

    __slots__ = ("_dtype", "_inner")

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None = None, *, dtype: torch.dtype = torch.float32
    ) -> None:
        self._inner = Linear(weight.bfloat16(), None if bias is None else bias.bfloat16())
        self._dtype = dtype

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._inner(x.bfloat16()).to(self._dtype)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return self._inner(x.bfloat16()).float().add_(residual)


@functools.cache
def native_faster() -> bool:
    """Whether this project's own kernels are right here and faster than torch's 8 bits, on a layer of a usual size."""
    if not native_works():
        return False
    if not int8_works():
        return True
    weight, x = torch.ones(2048, 1024), torch.ones(_BATCH, 1024)
    own, other = NativeLinear(weight), Int8Linear(weight)
    own_s, other_s = _best_s([lambda: own(x), lambda: other(x)])
    _log.info("8-bit layers, %d tokens: %.3f ms by own CPU kernels, %.3f by torch", _BATCH, own_s * 1e3, other_s * 1e3)
    return own_s <= other_s


def _decode_cost_s(arch: Architecture, kind: Precision) -> float:
    """Best time of the biggest projection of a layer; a second copy of the weight keeps it out of the nearest cache."""
    rows = min(2 * arch.intermediate, 8192)
    weight = torch.ones(rows, arch.hidden, dtype=kind.cache)
    first, second = (_sample(weight, kind) for _ in range(2))
    x = torch.ones(_BATCH, arch.hidden, dtype=kind.hidden)
    return sum(_best_s([lambda: first(x), lambda: second(x)]))


def _sample(weight: torch.Tensor, kind: Precision) -> Projection:
    if kind.int4 or kind.int8:
        return Maker(kind)(Role.GATE_UP, weight)
    return Linear(weight)


def _best_s(actions: list[Callable[[], object]]) -> list[float]:
    """Least processor time of each action, taking turns; processor time, since a load may share its machine."""
    times: list[list[float]] = [[] for _ in actions]
    for _ in range(_TRIES):
        for action, spent in zip(actions, times, strict=True):
            started = time.process_time()
            action()
            spent.append(time.process_time() - started)
    return [min(spent) for spent in times]
