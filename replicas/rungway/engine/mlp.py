"""The gated MLP of a layer: norm, fused gate and up, activation, down."""

from __future__ import annotations

import torch

from rungway.engine.native_step import MlpParts
from rungway.engine.parts import Builder, Stream, gate_of
from rungway.engine.precision import Role
from rungway.engine.stored import rows_scaled


class GatedMlp:
    def __init__(self, build: Builder, prefix: str, before: str, after: str | None) -> None:
        """`before`, `after`: names of the norms around it; `after` None = no norm between it and the residual."""
        self._ops = build.ops
        self._eps = build.arch.norm_eps
        self._gate = gate_of(build.arch, build.ops)
        self._norm = build.norm(before)
        weight, bias = build.fused(f"{prefix}mlp.", "gate_proj", "up_proj")
        weight, by = build.make.balance(Role.GATE_UP, prefix + Role.GATE_UP, weight)
        if by is not None:
            self._norm = self._norm / by
        down, down_bias = build.fused(f"{prefix}mlp.", "down_proj")
        width = weight.shape[0] // 2
        build.fits(f"{prefix}mlp", weight, 2 * width, build.arch.hidden)
        build.fits(f"{prefix}mlp.down_proj", down, build.arch.hidden, width)
        down, by = build.make.balance(Role.DOWN, prefix + Role.DOWN, down)
        if by is not None:
            rows = torch.cat([torch.ones_like(by), 1.0 / by])  # only `up` scales the product act(gate) * up
            if isinstance(weight, torch.Tensor):
                weight = weight.float()
            weight, bias = rows_scaled(weight, rows), None if bias is None else bias.float() * rows
        self._gate_up = build.made(prefix, Role.GATE_UP, weight, bias)
        self._down = build.exit(build.made(prefix, Role.DOWN, down, down_bias), after)

    def parts(self) -> MlpParts:
        """What a step in one call is made of (native_step.py)."""
        return MlpParts(self._norm, self._gate_up, self._down.plain)

    def __call__(self, stream: Stream) -> Stream:
        inputs, x = stream.normed(self._ops, self._norm, self._eps)
        return self._down(self._gate(self._gate_up(inputs)), x)
