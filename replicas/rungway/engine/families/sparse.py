"""Mixtral, Qwen2-MoE, Qwen3-MoE: the attention of their dense relatives, and experts in place of the MLP."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rungway.engine.errors import ModelError
from rungway.engine.families.config import common, windowed
from rungway.engine.families.dense import mistral
from rungway.engine.families.spec import Architecture, Routing


def mixtral(config: dict[str, Any]) -> Architecture:
    arch = mistral(config)
    routing = Routing(
        layers=(True,) * arch.layers,
        experts=int(config["num_local_experts"]),
        chosen=int(config["num_experts_per_tok"]),
        intermediate=arch.intermediate,
    )
    return replace(arch, routing=checked(routing))


def qwen2_moe(config: dict[str, Any]) -> Architecture:
    """With an expert that every token passes, behind a gate."""
    arch = common(config)
    if config.get("use_sliding_window"):
        arch = replace(arch, window=windowed(arch, config, None))
    routing = replace(_qwen_routing(config), shared=int(config["shared_expert_intermediate_size"]), shared_gate=True)
    return replace(arch, routing=checked(routing))


def qwen3_moe(config: dict[str, Any]) -> Architecture:
    arch = common(config, qk_norm=True)
    if config.get("use_sliding_window"):
        arch = replace(arch, window=windowed(arch, config, [True] * arch.layers))
    return replace(arch, routing=checked(_qwen_routing(config)))


def _qwen_routing(config: dict[str, Any]) -> Routing:
    dense = set(config.get("mlp_only_layers") or ())
    every = int(config.get("decoder_sparse_step") or 1)
    layers = int(config["num_hidden_layers"])
    return Routing(
        layers=tuple(at not in dense and (at + 1) % every == 0 for at in range(layers)),
        experts=int(config.get("num_experts") or config["num_local_experts"]),
        chosen=int(config["num_experts_per_tok"]),
        intermediate=int(config["moe_intermediate_size"]),
        renormalise=bool(config["norm_topk_prob"]),
    )


def checked(routing: Routing) -> Routing:
    """Raises ModelError for numbers of experts and groups that do not fit together."""
    if routing.groups < 1 or routing.experts % routing.groups or not 1 <= routing.groups_chosen <= routing.groups:
        raise ModelError(
            f"{routing.experts} experts in {routing.groups} groups, of which {routing.groups_chosen}, are not possible"
        )
    each = routing.experts // routing.groups
    if not 1 <= routing.chosen <= routing.groups_chosen * each or routing.group_best > each:
        raise ModelError(
            f"choosing {routing.chosen} experts of {routing.groups_chosen} groups of {each} is not possible"
        )
    return routing
