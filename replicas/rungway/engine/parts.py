"""What the parts of a layer share: how their weights are fetched and made into projections, how their result joins the
residual stream, and what one pass over the layers carries."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from rungway.engine.errors import ModelError
from rungway.engine.families.spec import Activation, Architecture
from rungway.engine.ops import Angles, Ops, Span
from rungway.engine.parallel.group import Group
from rungway.engine.precision import Maker, Precision, Projection, Role
from rungway.engine.stored import Weight, kept

Weights = Callable[[str], torch.Tensor]


class View(NamedTuple):
    """How a kind of layer sees the step: its rotary angles, and the spans with the keys that it may see."""

    angles: Angles
    spans: list[Span]


class Pass(NamedTuple):
    """`slots` [tokens]. `local` is for sliding-window layers, None where the model has none."""

    slots: torch.Tensor
    whole: View
    local: View | None


class Stream(NamedTuple):
    """The residual stream between two parts, [tokens, hidden]; `more`: what the last part gave and the next norm adds."""

    x: torch.Tensor
    more: torch.Tensor | None = None

    def normed(self, ops: Ops, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm of the whole stream, the whole stream)."""
        return ops.norm(self.x, weight, eps) if self.more is None else ops.norm(self.more, weight, eps, self.x)

    def rows(self, which: torch.Tensor) -> Stream:
        """Some tokens of it."""
        return Stream(self.x.index_select(0, which), None if self.more is None else self.more.index_select(0, which))


def joined(ops: Ops, y: torch.Tensor, residual: torch.Tensor) -> Stream:
    """The stream after a part has given `y`."""
    return Stream(residual, y) if ops.adds_in_norm else Stream(residual + y)


class Builder:
    """Gives parts their weights. `weights(name)` gives a tensor by its Hugging Face name, or raises KeyError."""

    def __init__(
        self,
        arch: Architecture,
        weights: Weights,
        precision: Precision,
        device: torch.device,
        ops: Ops,
        make: Maker,
        group: Group | None = None,
    ) -> None:
        """`group`: the ranks among which the weights are divided, None = this process has all."""
        self.arch = arch
        self.precision = precision
        self.dtype = precision.cache
        self.ops = ops
        self.make = make
        self.group = group
        self._weights = weights
        self._device = device

    def get(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """In `dtype`, or the type of weights that are kept plain. Raises KeyError."""
        return self._weights(name).to(device=self._device, dtype=dtype or self.dtype)

    def find(self, *names: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The first of `names` that there is: checkpoints differ in how they call one thing. Raises KeyError."""
        for name in names:
            try:
                return self.get(name, dtype)
            except KeyError:
                continue
        raise KeyError(names[0])

    def norm(self, name: str) -> torch.Tensor:
        """A norm's weight as it is multiplied, in the type of the activations."""
        return (self.get(f"{name}.weight").float() + self.arch.norm_offset).to(self.precision.hidden)

    def fused(self, prefix: str, *names: str) -> tuple[Weight, torch.Tensor | None]:
        """Weight and bias of projections that read the same input, one below the other; in a quantised checkpoint's own
        bits where the precision keeps them. Raises ModelError where only some of them have a bias."""
        modules = [prefix + name for name in names]
        weight: Weight | None = kept(self._weights, modules, self._device) if self.precision.stored else None
        if weight is None:
            weight = torch.cat([self.get(f"{module}.weight") for module in modules])
        biases = []
        for name in names:
            try:
                biases.append(self.get(f"{prefix}{name}.bias"))
            except KeyError:
                continue
        if len(biases) not in (0, len(names)):
            raise ModelError(f"of {prefix}{', '.join(names)} only some have a bias, which is not supported")
        return weight, torch.cat(biases) if biases else None

    def fits(self, place: str, weight: Weight, outputs: int, inputs: int) -> None:
        """Kernels take sizes from the configuration and read as far as those say. Raises ModelError."""
        found = tuple(weight.shape)
        if found != (outputs, inputs):
            raise ModelError(f"the weights of {place} are {found}, not {(outputs, inputs)}")

    def made(
        self,
        prefix: str,
        role: Role,
        weight: Weight,
        bias: torch.Tensor | None,
        dtype: torch.dtype | None = None,
    ) -> Projection:
        """A projection whose inputs may be watched. `dtype`: as in Maker."""
        return self.make.watch(prefix + role, self.make(role, weight, bias, dtype=dtype), weight.shape[1])

    def exit(self, projection: Projection, norm: str | None) -> Exit:
        """`norm`: name of the norm between the projection and the residual, None = there is none."""
        return Exit(projection, self, None if norm is None else self.norm(norm))


class Exit:
    """The last projection of a part, and how its result joins the residual."""

    def __init__(self, projection: Projection, build: Builder, norm: torch.Tensor | None) -> None:
        self._projection = projection
        self._ops = build.ops
        self._group = build.group
        self._norm = norm
        self._eps = build.arch.norm_eps

    @property
    def plain(self) -> Projection | None:
        """The projection, where nothing stands between it and the residual."""
        return self._projection if self._norm is None and self._group is None else None

    def __call__(self, x: torch.Tensor, residual: torch.Tensor) -> Stream:
        if self._norm is None and self._group is None and not self._ops.adds_in_norm:
            return Stream(self._projection.add(x, residual))
        y = self._projection(x)
        if self._group is not None:
            y = self._group.sum(y)
        if self._norm is not None:
            y, _ = self._ops.norm(y, self._norm, self._eps)
        return joined(self._ops, y, residual)


def gate_of(arch: Architecture, ops: Ops) -> Callable[[torch.Tensor], torch.Tensor]:
    """[tokens, 2 * width] of gate and up -> act(gate) * up."""
    return ops.swiglu if arch.activation is Activation.SILU else ops.geglu
