"""Rotary position embedding (Su et al. 2021) and its scalings, as config.json states them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from rungway.engine.errors import ModelError


class Scaling(StrEnum):
    """linear: positions divided by `factor` (Chen et al. 2023). llama3: long wavelengths only. yarn: by the number of turns
    within the original context (Peng et al. 2023)."""

    DEFAULT = "default"
    LINEAR = "linear"
    LLAMA3 = "llama3"
    YARN = "yarn"


@dataclass(frozen=True)
class Rope:
    """`low` and `high` bound the blend between scaled and plain frequencies: in turns per original context. `amplitude`
    multiplies rotated queries and keys."""

    theta: float
    scaling: Scaling = Scaling.DEFAULT
    factor: float = 1.0
    low: float = 1.0
    high: float = 4.0
    original_context: int = 8192
    whole_pairs: bool = True  # yarn: bounds rounded outwards to whole pairs
    amplitude: float = 1.0

    def inverse_frequencies(self, head_dim: int) -> list[float]:
        """One per rotated pair, radians per position."""
        plain = [self.theta ** (-2.0 * pair / head_dim) for pair in range(head_dim // 2)]
        if self.scaling is Scaling.LINEAR:
            return [frequency / self.factor for frequency in plain]
        if self.scaling is Scaling.LLAMA3:
            return [self._by_wavelength(frequency) for frequency in plain]
        if self.scaling is Scaling.YARN:
            return self._by_turns(plain, head_dim)
        return plain

    def _by_wavelength(self, frequency: float) -> float:
        turns = self.original_context * frequency / (2.0 * math.pi)
        smooth = min(1.0, max(0.0, (turns - self.low) / (self.high - self.low)))
        return (1.0 - smooth) * frequency / self.factor + smooth * frequency

    def _by_turns(self, plain: list[float], head_dim: int) -> list[float]:
        """The blend is linear in the index of the pair, between those that make `high` and `low` turns."""

        def pair_of(turns: float) -> float:
            wavelength = self.original_context / (2.0 * math.pi * turns)
            return head_dim * math.log(wavelength) / (2.0 * math.log(self.theta))

        first, last = pair_of(self.high), pair_of(self.low)
        if self.whole_pairs:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, head_dim - 1)
        width = max(last - first, 0.001)
        blend = [min(1.0, max(0.0, (pair - first) / width)) for pair in range(head_dim // 2)]
        return [
            (1.0 - scaled) * frequency + scaled * frequency / self.factor
            for frequency, scaled in zip(plain, blend, strict=True)
        ]


def yarn_growth(factor: float, weight: float = 1.0) -> float:
    """How much YaRN raises the scores for a context that is `factor` times longer."""
    return 1.0 if factor <= 1.0 else 0.1 * weight * math.log(factor) + 1.0


def rope_parameters(config: dict[str, Any]) -> dict[str, Any]:
    """`rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before), as one mapping."""
    old = {"rope_theta": config.get("rope_theta"), **(config.get("rope_scaling") or {})}
    return {**old, **(config.get("rope_parameters") or {})}


def read_rope(parameters: dict[str, Any], context: int, theta: float = 10000.0) -> Rope:
    """`theta` where the parameters name none. Raises ModelError for a scaling that is not implemented, KeyError where one of
    its parameters is missing."""
    theta = float(parameters.get("rope_theta") or theta)
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if float(parameters.get("partial_rotary_factor") or 1.0) != 1.0:
        raise ModelError("rotary embedding of a part of each head is not supported")
    if kind not in list(Scaling):
        raise ModelError(f"rotary scaling {kind!r} is not supported (have: {', '.join(Scaling)})")
    if kind == Scaling.DEFAULT:
        return Rope(theta)
    if kind == Scaling.LINEAR:
        return Rope(theta, Scaling.LINEAR, factor=float(parameters["factor"]))
    original = int(parameters["original_max_position_embeddings"])
    if kind == Scaling.LLAMA3:
        return Rope(
            theta,
            Scaling.LLAMA3,
            factor=float(parameters["factor"]),
            low=float(parameters["low_freq_factor"]),
            high=float(parameters["high_freq_factor"]),
            original_context=original,
        )
    return _yarn(parameters, theta, original, float(parameters.get("factor") or context / original))


def _yarn(parameters: dict[str, Any], theta: float, original: int, factor: float) -> Rope:
    amplitude = parameters.get("attention_factor")
    if amplitude is None:
        one, all_dims = parameters.get("mscale"), parameters.get("mscale_all_dim")
        amplitude = yarn_growth(factor)
        if one and all_dims:
            amplitude = yarn_growth(factor, one) / yarn_growth(factor, all_dims)
    return Rope(
        theta,
        Scaling.YARN,
        factor=factor,
        low=float(parameters.get("beta_slow") or 1.0),
        high=float(parameters.get("beta_fast") or 32.0),
        original_context=original,
        whole_pairs=bool(parameters.get("truncate", True)),
        amplitude=float(amplitude),
    )
