"""What a model's `config.json` says about its size: parameters, those active per token, and cache bytes per token.

Parameters are counted for decoders with gated MLPs (Llama, Mistral, Qwen, SmolLM, Mixtral, DeepSeek). The tests compare the
counts with the published ones. Weights of norms inside attention are left out (below 0.01 %).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rungway.simulate.errors import SimulationError
from rungway.simulate.hardware import Dtype

LAYERS_KNOWN = {"full_attention", "sliding_attention"}


@dataclass(frozen=True, slots=True)
class Latent:
    """Multi-head latent attention: per token and layer one compressed vector and one rotary key serve all heads."""

    kv_rank: int
    rope_dim: int


@dataclass(frozen=True, slots=True)
class Shape:
    """`expert_parameters`: one routed expert of one layer; `experts` 0 = dense. `qk_dim` and `v_dim` are per head."""

    name: str
    layers: int
    heads: int
    kv_heads: int
    qk_dim: int
    v_dim: int
    context: int
    shared_parameters: int
    native: Dtype
    latent: Latent | None = None
    experts: int = 0
    experts_per_token: int = 0
    expert_layers: int = 0
    expert_parameters: int = 0

    @property
    def parameters(self) -> int:
        return self.shared_parameters + self.expert_layers * self.experts * self.expert_parameters

    @property
    def active_parameters(self) -> int:
        """Those that one token is multiplied with."""
        return self.shared_parameters + self.expert_layers * self.experts_per_token * self.expert_parameters

    def parameters_read(self, tokens: float) -> float:
        """Those that a step of so many tokens reads, when each token picks its experts at random and evenly:
        E (1 - (1 - k/E)^tokens) of a layer's experts."""
        if not self.experts:
            return float(self.parameters)
        touched: float = self.experts * (1.0 - (1.0 - self.experts_per_token / self.experts) ** tokens)
        return self.shared_parameters + self.expert_layers * touched * self.expert_parameters

    def kv_bytes_per_token(self, bytes_per_value: int) -> int:
        """layers x 2 x KV heads x head width, or layers x (rank + rotary width) with latent attention."""
        if self.latent is not None:
            return self.layers * (self.latent.kv_rank + self.latent.rope_dim) * bytes_per_value
        return self.layers * self.kv_heads * (self.qk_dim + self.v_dim) * bytes_per_value

    def kv_copies(self, devices: int) -> float:
        """Cache kept on all devices over that kept on one: KV heads are dealt whole, and what they outnumber is copied.
        A latent vector serves all heads, so every device keeps it."""
        heads = 1 if self.latent is not None else self.kv_heads
        return -(-heads // devices) * devices / heads

    def attention_flops(self, prompt_squares: float) -> float:
        """Scores and values of a causal prompt: 2 x (qk + v) x tokens^2 / 2 per head and layer."""
        return float(self.layers * self.heads * (self.qk_dim + self.v_dim)) * prompt_squares


# -- from a configuration -------------------------------------------------------------------------------------------


def shape_of(model: str) -> Shape:
    """A row of `MODELS`, or a config.json (or the folder that holds it). Raises SimulationError."""
    row = MODELS.get(model.lower())
    if row is not None:
        return read_shape(model.lower(), row)
    path = Path(model)
    if path.is_dir():
        path = path / "config.json"
    if not path.is_file():
        raise SimulationError(f"there is no model or file {model!r} (known: {', '.join(MODELS)}; or a config.json)")
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise SimulationError(f"{path} cannot be read: {error}") from None
    if not isinstance(config, dict):
        raise SimulationError(f"{path} is not a model's config.json")
    nested = config.get("text_config")
    return read_shape(str(path), nested if isinstance(nested, dict) else config)


def read_shape(name: str, config: dict[str, Any]) -> Shape:
    """Raises SimulationError when a field is missing, is no positive whole number, or describes something not counted."""
    kinds = config.get("layer_types") or []
    if not isinstance(kinds, list) or not LAYERS_KNOWN.issuperset(map(str, kinds)):
        raise SimulationError(f"{name}: layers other than attention are not counted ({kinds!r:.80})")
    fields = _Fields(name, config)
    hidden, layers, heads = (fields[key] for key in ("hidden_size", "num_hidden_layers", "num_attention_heads"))
    rank = fields.get("kv_lora_rank", 0)
    latent = Latent(rank, fields["qk_rope_head_dim"]) if rank else None
    width = fields.get("head_dim", hidden // heads or 1)
    qk_dim = fields["qk_nope_head_dim"] + latent.rope_dim if latent else width
    v_dim = fields["v_head_dim"] if latent else width
    experts, per_token, dense_layers, expert, shared = _experts(fields, hidden, layers)
    embeddings = fields["vocab_size"] * hidden * (1 if config.get("tie_word_embeddings") else 2)
    outside = embeddings + hidden + layers * (_attention(fields, hidden, heads, qk_dim, v_dim, latent) + 2 * hidden)
    if dense_layers:
        outside += dense_layers * 3 * hidden * fields["intermediate_size"]
    return Shape(
        name=name,
        layers=layers,
        heads=heads,
        kv_heads=fields.get("num_key_value_heads", heads),
        qk_dim=qk_dim,
        v_dim=v_dim,
        context=fields["max_position_embeddings"],
        shared_parameters=outside + (layers - dense_layers) * shared,
        native=_native(config),
        latent=latent,
        experts=experts,
        experts_per_token=per_token,
        expert_layers=layers - dense_layers,
        expert_parameters=expert,
    )


class _Fields:
    """Positive whole numbers of a configuration."""

    def __init__(self, name: str, config: dict[str, Any]) -> None:
        self.name = name
        self.config = config

    def __getitem__(self, key: str) -> int:
        value = self.config.get(key)
        if value is None:
            raise SimulationError(f"{self.name} has no {key}")
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise SimulationError(f"{self.name}: {key} is no positive whole number: {value!r:.60}")
        return value

    def get(self, key: str, default: int) -> int:
        return self[key] if self.config.get(key) not in (None, 0) else default


def _attention(fields: _Fields, hidden: int, heads: int, qk_dim: int, v_dim: int, latent: Latent | None) -> int:
    output = heads * v_dim * hidden
    if latent is not None:
        q_rank = fields.get("q_lora_rank", 0)
        query = q_rank * (hidden + heads * qk_dim) if q_rank else hidden * heads * qk_dim
        unpack = latent.kv_rank * heads * (qk_dim - latent.rope_dim + v_dim)
        return query + hidden * (latent.kv_rank + latent.rope_dim) + unpack + output
    columns = (heads + 2 * fields.get("num_key_value_heads", heads)) * qk_dim
    biased = fields.config.get("attention_bias") or fields.config.get("model_type") == "qwen2"
    return columns * (hidden + (1 if biased else 0)) + output


def _experts(fields: _Fields, hidden: int, layers: int) -> tuple[int, int, int, int, int]:
    """Routed experts, those per token, layers without them, parameters of one, parameters beside them in their layers."""
    names = [key for key in ("n_routed_experts", "num_local_experts", "num_experts") if fields.get(key, 0)]
    if not names:
        return 0, 0, layers, 0, 0
    experts, per_token = fields[names[0]], fields["num_experts_per_tok"]
    if per_token > experts:
        raise SimulationError(f"{fields.name}: num_experts_per_tok {per_token} is above {names[0]} {experts}")
    width = fields.get("moe_intermediate_size", 0) or fields["intermediate_size"]
    always = fields.get("shared_expert_intermediate_size", fields.get("n_shared_experts", 0) * width)
    dense_layers = min(layers, fields.get("first_k_dense_replace", 0))
    return experts, per_token, dense_layers, 3 * hidden * width, 3 * hidden * always + hidden * experts


def _native(config: dict[str, Any]) -> Dtype:
    """fp8 when the weights are published so, else 16 bits (32-bit weights are served in 16)."""
    quantized = config.get("quantization_config")
    method = quantized.get("quant_method") if isinstance(quantized, dict) else None
    return Dtype.FP8 if method == "fp8" else Dtype.BF16


def _row(hidden: int, mlp: int, layers: int, heads: int, kv_heads: int, vocab: int, **more: Any) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        **more,
    }


_QWEN = {"model_type": "qwen2", "max_position_embeddings": 32_768}
_DEEPSEEK = {
    "max_position_embeddings": 163_840,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "first_k_dense_replace": 3,
    "quantization_config": {"quant_method": "fp8"},
}
# The published config.json files, only the fields read here. Llama 3 with the context of 3.1 (the shapes are the same).
MODELS: dict[str, dict[str, Any]] = {
    "llama-3-8b": _row(4096, 14_336, 32, 32, 8, 128_256, max_position_embeddings=131_072),
    "llama-3-70b": _row(8192, 28_672, 80, 64, 8, 128_256, max_position_embeddings=131_072),
    "qwen2.5-0.5b": _row(896, 4864, 24, 14, 2, 151_936, tie_word_embeddings=True, **_QWEN),
    "qwen2.5-1.5b": _row(1536, 8960, 28, 12, 2, 151_936, tie_word_embeddings=True, **_QWEN),
    "qwen2.5-7b": _row(3584, 18_944, 28, 28, 4, 152_064, **_QWEN),
    "smollm2-135m": _row(576, 1536, 30, 9, 3, 49_152, tie_word_embeddings=True, max_position_embeddings=8192),
    "deepseek-v3": _row(7168, 18_432, 61, 128, 128, 129_280, **_DEEPSEEK),
}
