"""config.json of each family: read as transformers reads it, and refused in words where a variant is not implemented."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as hf

from engine.family_kit import LATENT, LINEAR, MODELS, MOE, SHAPE, YARN
from engine.native_kit import LLAMA3_ROPE
from rungway.engine.architecture import FAMILIES, read_architecture
from rungway.engine.errors import ModelError
from rungway.engine.model import Decoder
from rungway.engine.precision import plain

LLAMA = {**SHAPE, "model_type": "llama", "rms_norm_eps": 1e-6}
QWEN2 = {**LLAMA, "model_type": "qwen2"}
MIXTRAL = {**LLAMA, "model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}
QWEN_MOE = {
    **LLAMA,
    **MOE,
    "model_type": "qwen2_moe",
    "num_experts": 6,
    "shared_expert_intermediate_size": 32,
    "norm_topk_prob": False,
}
V2 = {**LLAMA, **LATENT, "model_type": "deepseek_v2", "q_lora_rank": None, "n_shared_experts": 2}
V3 = {**V2, "model_type": "deepseek_v3", "n_group": 4, "topk_group": 2, "norm_topk_prob": True}
GEMMA = {**LLAMA, "model_type": "gemma3_text", "query_pre_attn_scalar": 16, "sliding_window": 8}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({**LLAMA, "model_type": "gpt2"}, "model type 'gpt2'"),
        ({**LLAMA, "rope_parameters": {"rope_type": "longrope"}}, "rotary scaling 'longrope'"),
        ({**LLAMA, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rotary scaling 'dynamic'"),
        ({**LLAMA, "rope_scaling": {"type": "yarn", "factor": 2.0}}, "original_max_position_embeddings"),
        ({**LLAMA, "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "a part of each head"),
        ({**LLAMA, "hidden_act": "relu"}, "activation 'relu'"),
        ({**LLAMA, "num_attention_heads": 5}, "5 heads"),
        ({**LLAMA, "rms_norm_eps": "small"}, "cannot be read as llama"),
        ({**QWEN2, "use_sliding_window": True, "max_window_layers": 1}, "sliding window of 0"),
        ({**QWEN2, "use_sliding_window": True}, "max_window_layers"),
        (
            {**QWEN2, "use_sliding_window": True, "max_window_layers": 1, "layer_types": ["chunked_attention"] * 3},
            "attention of type chunked_attention",
        ),
        ({**MIXTRAL, "num_experts_per_tok": 9}, "choosing 9 experts"),
        ({**QWEN_MOE, "use_sliding_window": True, "sliding_window": 8}, "does not say in which layers"),
        ({**QWEN_MOE, "num_experts": None}, "num_local_experts"),
        ({**V2, "norm_topk_prob": True}, "norm_topk_prob"),
        ({**V2, "scoring_func": "sigmoid"}, "expert scores by 'sigmoid'"),
        ({**V2, "topk_method": "noaux_tc"}, "expert choice 'noaux_tc'"),
        ({**V2, "moe_layer_freq": 2}, "moe_layer_freq"),
        ({**V3, "scoring_func": "softmax"}, "expert scores by 'softmax'"),
        ({**V3, "n_group": 3}, "8 experts in 3 groups"),
        ({**V3, "topk_group": 1, "num_experts_per_tok": 3}, "choosing 3 experts of 1 groups of 2"),
        ({**GEMMA, "layer_types": ["sliding_attention"]}, "over 1 of 3 layers"),
        ({**GEMMA, "attn_logit_softcapping": 50.0}, "soft-capped"),
        ({**GEMMA, "use_bidirectional_attention": True}, "bidirectional"),
        ({name: value for name, value in GEMMA.items() if name != "query_pre_attn_scalar"}, "query_pre_attn_scalar"),
    ],
)
def test_refused(config: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        read_architecture(config)


def test_a_bias_on_some_projections_only_is_refused() -> None:
    model = MODELS["llama-linear-biases"]()
    state = model.state_dict()
    del state["model.layers.1.self_attn.k_proj.bias"]
    arch = read_architecture(model.config.to_dict())
    with torch.inference_mode(), pytest.raises(ModelError, match="only some have a bias"):
        Decoder(arch, state.__getitem__, plain(torch.float32), torch.device("cpu"))


def test_a_missing_tensor_is_named() -> None:
    model = MODELS["qwen3"]()
    state = model.state_dict()
    del state["model.layers.0.self_attn.q_norm.weight"]
    arch = read_architecture(model.config.to_dict())
    with torch.inference_mode(), pytest.raises(ModelError, match=r"q_norm\.weight"):
        Decoder(arch, state.__getitem__, plain(torch.float32), torch.device("cpu"))


@pytest.mark.parametrize("parameters", [LLAMA3_ROPE, LINEAR, YARN, {**YARN, "truncate": False, "beta_fast": 16.0}])
def test_rotary_frequencies_are_those_of_transformers(parameters: dict[str, Any]) -> None:
    config = hf.LlamaConfig(**SHAPE, head_dim=64, rope_parameters=dict(parameters))
    reference = hf.models.llama.modeling_llama.LlamaRotaryEmbedding(config)
    rope = read_architecture(config.to_dict()).rope
    torch.testing.assert_close(torch.tensor(rope.inverse_frequencies(64)), reference.inv_freq, rtol=1e-5, atol=0.0)
    assert rope.amplitude == pytest.approx(reference.attention_scaling)


def test_gemma_of_before_layer_types() -> None:
    """As published: a pattern, two bases, scaling for the global layers only."""
    arch = read_architecture(
        {
            **GEMMA,
            "num_hidden_layers": 7,
            "sliding_window_pattern": 3,
            "rope_theta": 1e6,
            "rope_local_base_freq": 1e4,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        }
    )
    assert arch.window is not None and arch.tied
    assert arch.window.layers == (True, True, False, True, True, False, True)
    assert (arch.rope.theta, arch.rope.factor) == (1e6, 8.0)
    assert (arch.window.rope.theta, arch.window.rope.factor) == (1e4, 1.0)


def test_configurations_as_published() -> None:
    """The words and sizes of config.json beside real weights, as far as they decide."""
    gemma = read_architecture(
        {
            "model_type": "gemma3_text",
            "vocab_size": 262144,
            "hidden_size": 640,
            "intermediate_size": 2048,
            "num_hidden_layers": 18,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 256,
            "hidden_activation": "gelu_pytorch_tanh",
            "max_position_embeddings": 32768,
            "rms_norm_eps": 1e-6,
            "query_pre_attn_scalar": 256,
            "sliding_window": 512,
            "_sliding_window_pattern": 6,
            "rope_theta": 1000000.0,
            "rope_local_base_freq": 10000.0,
            "rope_scaling": None,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "use_bidirectional_attention": False,
            "torch_dtype": "bfloat16",
        }
    )
    assert gemma.window is not None and [at for at, slides in enumerate(gemma.window.layers) if not slides] == [
        5,
        11,
        17,
    ]
    assert (gemma.cache_values, gemma.weights_dtype, gemma.tied) == (18 * 2 * 256, "bfloat16", True)
    deepseek = read_architecture(
        {
            "model_type": "deepseek_v3",
            "vocab_size": 129280,
            "hidden_size": 7168,
            "intermediate_size": 18432,
            "moe_intermediate_size": 2048,
            "num_hidden_layers": 61,
            "num_attention_heads": 128,
            "num_key_value_heads": 128,
            "n_shared_experts": 1,
            "n_routed_experts": 256,
            "num_experts_per_tok": 8,
            "n_group": 8,
            "topk_group": 4,
            "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
            "moe_layer_freq": 1,
            "first_k_dense_replace": 3,
            "kv_lora_rank": 512,
            "q_lora_rank": 1536,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "max_position_embeddings": 163840,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000,
            "rope_scaling": {
                "type": "yarn",
                "factor": 40,
                "original_max_position_embeddings": 4096,
                "beta_fast": 32,
                "beta_slow": 1,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
            },
        }
    )
    assert deepseek.routing is not None and deepseek.latent is not None
    assert deepseek.routing.layers.count(True) == 58 and deepseek.cache_values == 61 * 576
    assert deepseek.rope.amplitude == 1.0 and deepseek.latent.scale == pytest.approx(192**-0.5 * 1.3689**2, rel=1e-4)


def test_every_family_is_tested() -> None:
    tested = {make().config.model_type for make in MODELS.values()}
    assert tested == set(FAMILIES)
