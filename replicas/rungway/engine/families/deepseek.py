"""DeepSeek V2 and V3: multi-head latent attention; dense layers first, then routed experts beside a shared one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rungway.engine.errors import ModelError
from rungway.engine.families.config import common
from rungway.engine.families.rope import read_rope, rope_parameters, yarn_growth
from rungway.engine.families.sparse import checked
from rungway.engine.families.spec import Architecture, Latent, Routing, Score


def deepseek_v2(config: dict[str, Any]) -> Architecture:
    if config.get("norm_topk_prob"):
        raise ModelError("deepseek_v2 with norm_topk_prob is not supported")
    if (config.get("scoring_func") or Score.SOFTMAX) != Score.SOFTMAX:
        raise ModelError(f"expert scores by {config['scoring_func']!r} are not supported in deepseek_v2")
    method = config.get("topk_method") or "greedy"
    if method not in ("greedy", "group_limited_greedy"):
        raise ModelError(f"expert choice {method!r} is not supported in deepseek_v2")
    routing = replace(_routing(config), renormalise=False)
    if method == "group_limited_greedy":
        routing = _grouped(routing, config)
    return replace(_attention(config, interleaved=True), routing=checked(routing))


def deepseek_v3(config: dict[str, Any]) -> Architecture:
    if (config.get("scoring_func") or Score.SIGMOID) != Score.SIGMOID:
        raise ModelError(f"expert scores by {config['scoring_func']!r} are not supported in deepseek_v3")
    if (config.get("topk_method") or "noaux_tc") != "noaux_tc":
        raise ModelError(f"expert choice {config['topk_method']!r} is not supported in deepseek_v3")
    routing = replace(
        _grouped(_routing(config), config),
        score=Score.SIGMOID,
        renormalise=bool(config["norm_topk_prob"]),
        group_best=2,
        corrected=True,
    )
    interleaved = config.get("rope_interleave")
    return replace(_attention(config, interleaved is None or bool(interleaved)), routing=checked(routing))


def _attention(config: dict[str, Any], interleaved: bool) -> Architecture:
    context = int(config["max_position_embeddings"])
    rope = read_rope(rope_parameters(config), context)
    nope, turned = int(config["qk_nope_head_dim"]), int(config["qk_rope_head_dim"])
    all_dims = float(rope_parameters(config).get("mscale_all_dim") or 0.0)
    growth = yarn_growth(rope.factor, all_dims) if all_dims else 1.0
    query_rank = config["q_lora_rank"]
    latent = Latent(
        query_rank=None if query_rank is None else int(query_rank),
        rank=int(config["kv_lora_rank"]),
        nope=nope,
        rope=turned,
        value=int(config["v_head_dim"]),
        interleaved=interleaved,
        scale=(nope + turned) ** -0.5 * growth**2,
    )
    heads = int(config["num_attention_heads"])  # all of which read the one compressed key
    return common(config, rope=rope, kv_heads=heads, head_dim=turned, latent=latent)


def _routing(config: dict[str, Any]) -> Routing:
    if (config.get("moe_layer_freq") or 1) != 1:
        raise ModelError("experts in only some of the later layers (moe_layer_freq) are not supported")
    first, width = int(config.get("first_k_dense_replace") or 0), int(config["moe_intermediate_size"])
    return Routing(
        layers=tuple(at >= first for at in range(int(config["num_hidden_layers"]))),
        experts=int(config["n_routed_experts"]),
        chosen=int(config["num_experts_per_tok"]),
        intermediate=width,
        scale=float(config.get("routed_scaling_factor") or 1.0),
        shared=width * int(config.get("n_shared_experts") or 0),
    )


def _grouped(routing: Routing, config: dict[str, Any]) -> Routing:
    return replace(routing, groups=int(config["n_group"]), groups_chosen=int(config["topk_group"]))
