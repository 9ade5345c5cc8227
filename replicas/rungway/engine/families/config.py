"""Reading of config.json that all families share."""

from __future__ import annotations

from typing import Any

from rungway.engine.errors import ModelError
from rungway.engine.families.rope import read_rope, rope_parameters
from rungway.engine.families.spec import Activation, Architecture, Window


def common(config: dict[str, Any], **more: Any) -> Architecture:
    """What every family states in the same words; `more` replaces or adds. Raises ModelError or KeyError."""
    heads, hidden = int(config["num_attention_heads"]), int(config["hidden_size"])
    layers, context = int(config["num_hidden_layers"]), int(config["max_position_embeddings"])
    values: dict[str, Any] = {
        "vocab_size": int(config["vocab_size"]),
        "hidden": hidden,
        "intermediate": int(config["intermediate_size"]),
        "layers": layers,
        "heads": heads,
        "kv_heads": int(config.get("num_key_value_heads") or heads),
        "head_dim": int(config.get("head_dim") or hidden // heads),
        "norm_eps": float(config["rms_norm_eps"]),
        "context": context,
        "tied": bool(config.get("tie_word_embeddings", False)),
        "weights_dtype": str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch."),
        "activation": activation(config),
    }
    if "rope" not in more:
        values["rope"] = read_rope(rope_parameters(config), context)
    arch = Architecture(**{**values, **more})
    sizes = (arch.vocab_size, arch.hidden, arch.intermediate, arch.layers, arch.heads, arch.kv_heads, arch.head_dim)
    if min(*sizes, arch.context) < 1:
        raise ModelError("config.json has a size below 1")
    if arch.heads % arch.kv_heads or arch.head_dim % 2:
        raise ModelError(f"{arch.heads} heads of {arch.head_dim} over {arch.kv_heads} key heads are not supported")
    return arch


def activation(config: dict[str, Any]) -> Activation:
    name = config.get("hidden_activation") or config.get("hidden_act") or Activation.SILU
    if name not in list(Activation):
        raise ModelError(f"activation {name!r} is not supported (have: {', '.join(Activation)})")
    return Activation(name)


def windowed(arch: Architecture, config: dict[str, Any], default: list[bool] | None) -> Window | None:
    """Which layers slide: `layer_types`, else `default` (None = the config has to say so). Raises ModelError."""
    kinds = config.get("layer_types")
    if kinds is None and default is None:
        raise ModelError("config.json asks for sliding-window attention and does not say in which layers (layer_types)")
    unknown = set(kinds or ()) - {"sliding_attention", "full_attention"}
    if unknown:
        raise ModelError(f"attention of type {', '.join(sorted(unknown))} is not supported")
    slides = tuple(kind == "sliding_attention" for kind in kinds) if kinds is not None else tuple(default or ())
    if not any(slides):
        return None
    size = int(config.get("sliding_window") or 0)
    if len(slides) != arch.layers or size < 1:
        raise ModelError(f"a sliding window of {size} over {len(slides)} of {arch.layers} layers is not possible")
    return Window(size, slides, arch.rope)
