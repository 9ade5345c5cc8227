"""Weights in the few bits that a checkpoint has them in, before a layer is made of them.

Layouts: rungway.kernels.layouts. Whatever a checkpoint looks like on disk (checkpoint_*.py), it becomes one of these two or a
plain tensor, so that layers know two forms and no checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch

from rungway.kernels import layouts


@dataclass(frozen=True)
class Int4Weight:
    """4-bit codes by group. `packed` uint8 [out, in / 2], `scales` and `zeros` [out, groups]. `order` [in]: which input the
    n-th column belongs to, where a checkpoint sorted its inputs before it grouped them; None = as they come."""

    packed: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor
    order: torch.Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return self.packed.shape[0], 2 * self.packed.shape[1]

    @property
    def group(self) -> int:
        """Inputs that share a scale."""
        return self.shape[1] // self.scales.shape[1]

    def dense(self) -> torch.Tensor:
        """[out, in] in float32, columns in the order of the inputs."""
        columns = layouts.dense_int4(self.packed, self.scales, self.zeros)
        if self.order is None:
            return columns
        weight = torch.empty_like(columns)
        weight[:, self.order] = columns
        return weight

    def to(self, device: torch.device) -> Int4Weight:
        order = None if self.order is None else self.order.to(device)
        return Int4Weight(self.packed.to(device), self.scales.to(device), self.zeros.to(device), order)


@dataclass(frozen=True)
class Fp8Weight:
    """8-bit floats (e4m3). `codes` [out, in]; `scales` float32 [out], or one for each block of 128 x 128."""

    codes: torch.Tensor
    scales: torch.Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1]

    def dense(self) -> torch.Tensor:
        """[out, in] in float32."""
        return layouts.dense_fp8(self.codes, self.scales)

    def to(self, device: torch.device) -> Fp8Weight:
        return Fp8Weight(self.codes.to(device), self.scales.to(device))


Stored = Int4Weight | Fp8Weight
Weight = torch.Tensor | Stored


@runtime_checkable
class StoredWeights(Protocol):
    """What Decoder takes as weights, when a checkpoint's own bits can be had as well."""

    form: str  # int4 | fp8 | dense: what its layers can be kept in

    def __call__(self, name: str) -> torch.Tensor:
        """A tensor by name, dequantised. Raises KeyError."""
        ...

    def stored(self, module: str) -> Stored | None:
        """The weight of a module (its tensors' common prefix) as stored; None where it is plain."""
        ...


def kept(weights: object, modules: Sequence[str], device: torch.device) -> Stored | None:
    """The weights of modules that read the same input as one, stacked by rows; None where they have to be dequantised: one is
    plain, or they differ in form, in group or in the order of their inputs."""
    if not isinstance(weights, StoredWeights):
        return None
    parts = [weights.stored(module) for module in modules]
    if all(isinstance(part, Int4Weight) for part in parts):
        whole: Stored | None = _stacked_int4([part for part in parts if isinstance(part, Int4Weight)])
    elif all(isinstance(part, Fp8Weight) for part in parts):
        whole = _stacked_fp8([part for part in parts if isinstance(part, Fp8Weight)])
    else:
        return None
    return None if whole is None else whole.to(device)


def rows_scaled(weight: Weight, rows: torch.Tensor) -> Weight:
    """Each output of `weight` times `rows` [out], in the weight's type."""
    if isinstance(weight, torch.Tensor):
        return (weight.float() * rows[:, None]).to(weight.dtype)
    if isinstance(weight, Int4Weight):
        return replace(weight, scales=(weight.scales.float() * rows[:, None]).to(weight.scales.dtype))
    if weight.scales.dim() == 1:
        return replace(weight, scales=weight.scales * rows)
    return weight.dense() * rows[:, None]


def rows_picked(weight: Weight, order: torch.Tensor, dtype: torch.dtype) -> Weight:
    """The outputs of `weight` in another order; 8-bit floats that share scales over rows become a plain tensor of
    `dtype`."""
    if isinstance(weight, torch.Tensor):
        return weight[order]
    if isinstance(weight, Int4Weight):
        return replace(weight, packed=weight.packed[order], scales=weight.scales[order], zeros=weight.zeros[order])
    if weight.scales.dim() == 1:
        codes = weight.codes.view(torch.uint8)[order].view(weight.codes.dtype)
        return Fp8Weight(codes, weight.scales[order])
    return weight.dense()[order].to(dtype)


def _stacked_int4(parts: list[Int4Weight]) -> Int4Weight | None:
    first = parts[0]
    if any(part.group != first.group or not _same(part.order, first.order) for part in parts):
        return None
    return replace(
        first,
        packed=torch.cat([part.packed for part in parts]),
        scales=torch.cat([part.scales for part in parts]),
        zeros=torch.cat([part.zeros for part in parts]),
    )


def _stacked_fp8(parts: list[Fp8Weight]) -> Fp8Weight | None:
    kinds = {part.scales.dim() for part in parts}
    cut_off = any(part.shape[0] % layouts.BLOCK for part in parts[:-1])
    if len(kinds) > 1 or (kinds == {2} and cut_off):
        return None
    codes = torch.cat([part.codes.view(torch.uint8) for part in parts]).view(torch.float8_e4m3fn)
    return Fp8Weight(codes, torch.cat([part.scales for part in parts]))


def _same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return torch.equal(one, other)
