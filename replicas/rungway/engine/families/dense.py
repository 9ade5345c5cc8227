"""Llama, Mistral, Qwen2, Qwen3 and Gemma 3 (text): grouped-query attention and one gated MLP per layer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rungway.engine.errors import ModelError
from rungway.engine.families.config import common, windowed
from rungway.engine.families.rope import read_rope
from rungway.engine.families.spec import Activation, Architecture

_GEMMA_GLOBAL_THETA, _GEMMA_LOCAL_THETA = 1_000_000.0, 10_000.0
_GEMMA_PATTERN = 6  # every so manyth layer sees everything


def llama(config: dict[str, Any]) -> Architecture:
    return common(config)


def mistral(config: dict[str, Any]) -> Architecture:
    """A window in every layer, or in none."""
    arch = common(config)
    if not config.get("sliding_window"):
        return arch
    return replace(arch, window=windowed(arch, config, [True] * arch.layers))


def qwen2(config: dict[str, Any]) -> Architecture:
    """A window in the layers from `max_window_layers` on, where `use_sliding_window` is set."""
    arch = common(config)
    if not config.get("use_sliding_window"):
        return arch
    first = int(config["max_window_layers"])
    return replace(arch, window=windowed(arch, config, [at >= first for at in range(arch.layers)]))


def qwen3(config: dict[str, Any]) -> Architecture:
    return replace(qwen2(config), qk_norm=True)


def gemma3(config: dict[str, Any]) -> Architecture:
    """Norms around both parts, weights of norms stored minus one, local and global layers with their own rotary base."""
    if config.get("use_bidirectional_attention"):
        raise ModelError("bidirectional attention is not supported")
    if config.get("attn_logit_softcapping") is not None:
        raise ModelError("soft-capped attention scores are not supported")
    ropes = config.get("rope_parameters") or {}
    context = int(config["max_position_embeddings"])
    whole = ropes.get("full_attention") or {
        "rope_theta": config.get("rope_theta"),
        **(config.get("rope_scaling") or {}),
    }
    local = ropes.get("sliding_attention") or {"rope_theta": config.get("rope_local_base_freq")}
    arch = common(
        {"hidden_activation": Activation.GELU_TANH, "tie_word_embeddings": True, **config},
        rope=read_rope(whole, context, _GEMMA_GLOBAL_THETA),
        qk_norm=True,
        norm_offset=1.0,
        sandwich=True,
        embedding_scale=float(config["hidden_size"]) ** 0.5,
        score_scale=float(config["query_pre_attn_scalar"]) ** -0.5,
        logit_cap=config.get("final_logit_softcapping"),
    )
    pattern = int(config.get("sliding_window_pattern") or config.get("_sliding_window_pattern") or _GEMMA_PATTERN)
    window = windowed(arch, config, [(at + 1) % pattern != 0 for at in range(arch.layers)])
    if window is not None:
        window = replace(window, rope=read_rope(local, context, _GEMMA_LOCAL_THETA))
    return replace(arch, window=window)
