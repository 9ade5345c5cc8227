"""Tiny random models of each family, with everything that a family adds set to values that change the answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as hf

from engine.native_kit import LLAMA3_ROPE, VOCAB

SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}


def build(model: Any, config: Any) -> Any:
    """A float32 model whose norms, biases and routers are as random as its matrices."""
    torch.manual_seed(11)
    made = model(config).eval()
    for name, value in made.state_dict().items():
        if "norm" in name or name.endswith("bias"):
            torch.nn.init.normal_(value, mean=float(value.float().mean()), std=0.2)
    return made


def gemma3(**more: Any) -> Any:
    values = {**SHAPE, "num_hidden_layers": 4, "head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 9, **more}
    ropes = {
        "full_attention": {"rope_type": "linear", "rope_theta": 100000.0, "factor": 2.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
    }
    pattern = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
    config = hf.Gemma3TextConfig(**values, layer_types=pattern, rope_parameters=ropes)
    return build(hf.Gemma3ForCausalLM, config)


def _llama(**more: Any) -> Callable[[], Any]:
    return lambda: build(hf.LlamaForCausalLM, hf.LlamaConfig(**SHAPE, **more))


def _qwen2(**more: Any) -> Callable[[], Any]:
    return lambda: build(hf.Qwen2ForCausalLM, hf.Qwen2Config(**SHAPE, **more))


def _qwen3(**more: Any) -> Callable[[], Any]:
    return lambda: build(hf.Qwen3ForCausalLM, hf.Qwen3Config(**SHAPE, head_dim=16, **more))


def _mistral(**more: Any) -> Callable[[], Any]:
    return lambda: build(hf.MistralForCausalLM, hf.MistralConfig(**SHAPE, **more))


MOE: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 40}
LATENT: dict[str, Any] = {
    **{name: value for name, value in SHAPE.items() if name != "num_key_value_heads"},
    **MOE,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "n_routed_experts": 8,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.7,
}
LATENT_YARN = {**YARN, "mscale": 0.7, "mscale_all_dim": 0.9}


def _mixtral(**more: Any) -> Callable[[], Any]:
    config = hf.MixtralConfig(**SHAPE, num_local_experts=5, num_experts_per_tok=2, **more)
    return lambda: build(hf.MixtralForCausalLM, config)


def _qwen2_moe(**more: Any) -> Callable[[], Any]:
    config = hf.Qwen2MoeConfig(**SHAPE, **MOE, num_experts=6, shared_expert_intermediate_size=32, **more)
    return lambda: build(hf.Qwen2MoeForCausalLM, config)


def _qwen3_moe(**more: Any) -> Callable[[], Any]:
    config = hf.Qwen3MoeConfig(**SHAPE, **MOE, num_experts=6, head_dim=16, **more)
    return lambda: build(hf.Qwen3MoeForCausalLM, config)


def _deepseek_v2(**more: Any) -> Callable[[], Any]:
    return lambda: build(hf.DeepseekV2ForCausalLM, hf.DeepseekV2Config(**{**LATENT, "n_shared_experts": 2, **more}))


def _deepseek_v3(**more: Any) -> Callable[[], Any]:
    groups = {"n_group": 4, "topk_group": 2, "n_shared_experts": 1}
    return lambda: build(hf.DeepseekV3ForCausalLM, hf.DeepseekV3Config(**{**LATENT, **groups, **more}))


MODELS: dict[str, Callable[[], Any]] = {
    "llama-llama3": _llama(rope_parameters=LLAMA3_ROPE, head_dim=16),
    "llama-linear-biases": _llama(rope_parameters=LINEAR, attention_bias=True, mlp_bias=True),
    "llama-yarn": _llama(rope_parameters=YARN),
    "mistral-window": _mistral(sliding_window=9),
    "mistral-no-window": _mistral(sliding_window=None),
    "qwen2-window": _qwen2(use_sliding_window=True, sliding_window=6, max_window_layers=1),
    "qwen2-window-off": _qwen2(use_sliding_window=False, sliding_window=6, max_window_layers=1),
    "qwen3": _qwen3(),
    "qwen3-tied-yarn": _qwen3(tie_word_embeddings=True, rope_parameters=YARN),
    "gemma3": gemma3,
    "gemma3-capped": lambda: gemma3(final_logit_softcapping=2.0),
    "mixtral": _mixtral(),
    "mixtral-window": _mixtral(sliding_window=9),
    "qwen2-moe": _qwen2_moe(mlp_only_layers=[1]),
    "qwen3-moe": _qwen3_moe(norm_topk_prob=True, decoder_sparse_step=2),
    "deepseek-v2": _deepseek_v2(q_lora_rank=None, topk_method="greedy"),
    "deepseek-v2-groups": _deepseek_v2(
        q_lora_rank=16, topk_method="group_limited_greedy", n_group=4, topk_group=2, rope_parameters=LATENT_YARN
    ),
    "deepseek-v3": _deepseek_v3(q_lora_rank=16, norm_topk_prob=True),
    "deepseek-v3-halves": _deepseek_v3(q_lora_rank=None, rope_interleave=False, rope_parameters=LATENT_YARN),
}
