"""In which numbers a model computes, decided by measurement.

float32    everything in float32; the exact mode.
bfloat16   weights, activations and cache in bfloat16.
int8       CPU only: linear layers in 8 bits, or in packed bfloat16 where a shape is faster so; activations in float32,
           cache in bfloat16. `auto` takes it only after a test of its answers on the model itself.
int8+bfloat16  the same with those layers in bfloat16 that cost most accuracy: into attention, and down to the residual.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Protocol

import torch

from rungway.engine.architecture import Architecture
from rungway.engine.errors import ModelError
from rungway.engine.int8 import Int8Linear, int8_works
from rungway.engine.linear import Linear
from rungway.engine.smoothing import Watched, factors

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_BATCH = 8  # tokens of the decode step that is timed
_TRIES = 9
_INT8_LEAD = 1.25  # a layer alone stays in the caches; in the model, half the bytes are worth about this much more


class Projection(Protocol):
    """A linear layer: y = x W^T + b, and y + residual."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor: ...


class Role(StrEnum):
    """The linear layers of a decoder."""

    QKV = "qkv"
    OUT = "out"
    GATE_UP = "gate_up"
    DOWN = "down"
    HEAD = "head"


@dataclass(frozen=True)
class Precision:
    """`hidden`: type of the activations between layers. `cache`: of keys and values, and of the weights that are kept
    plain. `int8`: which linear layers may be 8 bits."""

    name: str
    hidden: torch.dtype
    cache: torch.dtype
    int8: frozenset[Role] = frozenset()


INT8 = Precision("int8", torch.float32, torch.bfloat16, frozenset(Role))
INT8_PART = replace(INT8, name="int8+bfloat16", int8=frozenset({Role.OUT, Role.GATE_UP, Role.HEAD}))


def plain(dtype: torch.dtype) -> Precision:
    return Precision(str(dtype).removeprefix("torch."), dtype, dtype)


def candidates(name: str, arch: Architecture, device: torch.device) -> list[Precision]:
    """What to try, best first; the last one needs no test. `auto`: bfloat16 on a GPU, on CPU in the order of a decode
    step's speed. Raises ModelError for a name that is not known or not possible here."""
    if name in _DTYPES:
        if name == "float16" and device.type == "cpu":
            raise ModelError("float16 is not supported on CPU (use bfloat16, float32 or auto)")
        return [plain(_DTYPES[name])]
    if name == "int8":
        if device.type != "cpu" or not int8_works():
            raise ModelError("int8 is not supported here (use auto)")
        return [INT8]
    if name != "auto":
        raise ModelError(f"dtype {name!r} is none of auto, int8, {', '.join(_DTYPES)}")
    if device.type != "cpu":
        return [plain(torch.bfloat16)]
    kinds = [plain(torch.bfloat16), plain(torch.float32), *([INT8] if int8_works() else [])]
    costs = {kind: _decode_cost_s(arch, kind) for kind in kinds}
    ranked = sorted(kinds, key=lambda kind: costs[kind])
    return [INT8, INT8_PART, ranked[1]] if ranked[0] is INT8 else ranked[:1]


class Maker:
    """Makes the layers of one model; for each shape it measures once which form is faster."""

    def __init__(self, precision: Precision, peaks: Mapping[str, torch.Tensor] | None = None) -> None:
        """`peaks`: of the input channels of each layer, by place, as `watched` had them in the plain model."""
        self.precision = precision
        self.peaks = peaks or {}
        self.watching = False
        self.watched: dict[str, Watched] = {}
        self.chosen: dict[tuple[int, int], str] = {}  # (out, in) -> int8 | bfloat16, where there was a choice

    def __call__(
        self,
        role: Role,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        keep: bool = False,
        dtype: torch.dtype | None = None,
    ) -> Projection:
        """`weight` [out, in] in the plain type. `keep` shares a weight that is kept anyway. `dtype`: of the result, where
        no residual is added; None = that of the activations."""
        precision = self.precision
        if not precision.int8:
            return Linear(weight, bias, keep=keep)
        out = dtype or precision.hidden
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

    def balance(self, role: Role, place: str, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The weight, and by what to divide its input channels; None = leave them."""
        if role not in self.precision.int8 or place not in self.peaks:
            return weight, None
        by = factors(self.peaks[place], weight)
        return weight.float() * by, by


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


def _decode_cost_s(arch: Architecture, kind: Precision) -> float:
    """Best time of the biggest projection of a layer; a second copy of the weight keeps it out of the nearest cache."""
    rows = min(2 * arch.intermediate, 8192)
    weight = torch.ones(rows, arch.hidden, dtype=kind.cache)
    first, second = (Int8Linear(weight) if kind.int8 else Linear(weight) for _ in range(2))
    x = torch.ones(_BATCH, arch.hidden, dtype=kind.hidden)
    return sum(_best_s([lambda: first(x), lambda: second(x)]))


def _best_s(actions: list[Callable[[], object]]) -> list[float]:
    """Least processor time of each action, taking turns; processor time, since a load may share its machine."""
    times: list[list[float]] = [[] for _ in actions]
    for _ in range(_TRIES):
        for action, spent in zip(actions, times, strict=True):
            started = time.process_time()
            action()
            spent.append(time.process_time() - started)
    return [min(spent) for spent in times]
