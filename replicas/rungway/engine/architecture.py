"""config.json -> what the model code needs to know. Llama and Qwen2 families; anything else is refused."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from rungway.engine.errors import ModelError

FAMILIES = ("llama", "qwen2")


@dataclass(frozen=True)
class Rope:
    """Rotary embedding: base, and the frequency scaling of Llama 3.1 when `factor` is not 1."""

    theta: float
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192

    def inverse_frequencies(self, head_dim: int) -> list[float]:
        """One per rotated pair, radians per position (Su et al. 2021; scaling: Llama 3.1's by wavelength)."""
        plain = [self.theta ** (-2.0 * pair / head_dim) for pair in range(head_dim // 2)]
        return plain if self.factor == 1.0 else [self._scaled(frequency) for frequency in plain]

    def _scaled(self, frequency: float) -> float:
        wavelength = 2.0 * math.pi / frequency
        if wavelength < self.original_context / self.high_freq_factor:
            return frequency
        if wavelength > self.original_context / self.low_freq_factor:
            return frequency / self.factor
        turns = self.original_context / wavelength
        smooth = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        return (1.0 - smooth) * frequency / self.factor + smooth * frequency


@dataclass(frozen=True)
class Architecture:
    vocab_size: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    context: int
    tied: bool
    rope: Rope
    weights_dtype: str  # as stored: bfloat16 | float16 | float32


def read_architecture(config: dict[str, Any]) -> Architecture:
    """Raises ModelError where the model uses something that is not implemented, rather than run it wrongly."""
    family = config.get("model_type")
    if family not in FAMILIES:
        raise ModelError(f"model type {family!r} is not supported (have: {', '.join(FAMILIES)})")
    if config.get("use_sliding_window"):
        raise ModelError("sliding-window attention is not supported")
    if config.get("hidden_act", "silu") != "silu":
        raise ModelError(f"activation {config['hidden_act']!r} is not supported")
    try:
        heads = int(config["num_attention_heads"])
        return Architecture(
            vocab_size=int(config["vocab_size"]),
            hidden=int(config["hidden_size"]),
            intermediate=int(config["intermediate_size"]),
            layers=int(config["num_hidden_layers"]),
            heads=heads,
            kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or config["hidden_size"] // heads),
            norm_eps=float(config["rms_norm_eps"]),
            context=int(config["max_position_embeddings"]),
            tied=bool(config.get("tie_word_embeddings", False)),
            rope=_rope(config),
            weights_dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch."),
        )
    except KeyError as error:
        raise ModelError(f"config.json has no {error}") from error


def _rope(config: dict[str, Any]) -> Rope:
    """`rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before)."""
    parameters = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    theta = float(parameters.get("rope_theta") or config.get("rope_theta") or 10000.0)
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if kind == "default":
        return Rope(theta)
    if kind != "llama3":
        raise ModelError(f"rotary scaling {kind!r} is not supported")
    return Rope(
        theta=theta,
        factor=float(parameters["factor"]),
        low_freq_factor=float(parameters["low_freq_factor"]),
        high_freq_factor=float(parameters["high_freq_factor"]),
        original_context=int(parameters["original_max_position_embeddings"]),
    )
