"""GGUF file -> model directory (bf16 safetensors, config.json, tokenizer files). Runs once per model.

Differences between the two formats that matter: llama.cpp stores q and k of the Llama family with rotary pairs
interleaved (undone here), and Qwen's tied embedding twice at two precisions (the more precise copy is kept and tied).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rungway.engine.errors import ModelError
from rungway.engine.gguf_tokenizer import write_tokenizer

Progress = Callable[[str, int, int], None]

_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output.weight": "lm_head.weight",
    "output_norm.weight": "model.norm.weight",
}
_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_CLASSES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}
_SAME_MATRIX = 0.2  # relative difference of two quantised copies of one matrix stays far below, of two matrices is ~1.4


class _Fields(dict[str, Any]):
    """Metadata of a GGUF file; a field that is missing is an error in words."""

    def __missing__(self, name: str) -> Any:
        raise ModelError(f"GGUF file has no field {name}")


def convert_gguf(path: Path, out: Path, progress: Progress) -> None:
    """Writes a model directory into the existing folder `out`. Raises ModelError on anything that is not understood,
    never guesses: an unknown tensor or architecture is an error."""
    from gguf import GGUFReader  # heavy, and needed only in the one process that converts

    try:
        reader = GGUFReader(str(path))
    except (ValueError, OSError) as error:
        raise ModelError(f"{path.name} is not a readable GGUF file: {error}") from error
    fields = _Fields({name: field.contents() for name, field in reader.fields.items()})
    arch = fields.get("general.architecture")
    if arch not in _CLASSES:
        raise ModelError(f"GGUF architecture {arch!r} is not supported (have: {', '.join(_CLASSES)})")
    eos = write_tokenizer(fields, out)
    tied = _write_tensors(reader.tensors, fields, arch, out, progress)
    config = _config(fields, arch, eos, tied)
    (out / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    generation = {"eos_token_id": eos, "bos_token_id": config["bos_token_id"], "pad_token_id": config["pad_token_id"]}
    (out / "generation_config.json").write_text(json.dumps(generation, indent=2), encoding="utf-8")


def _config(fields: dict[str, Any], arch: str, eos: list[int], tied: bool) -> dict[str, Any]:
    def get(name: str, default: Any = None) -> Any:
        name = f"{arch}.{name}"
        return fields[name] if default is None else fields.get(name, default)

    heads = int(get("attention.head_count"))
    hidden = int(get("embedding_length"))
    theta = float(get("rope.freq_base"))
    return {
        "architectures": [_CLASSES[arch]],
        "model_type": arch,
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "hidden_size": hidden,
        "intermediate_size": int(get("feed_forward_length")),
        "num_hidden_layers": int(get("block_count")),
        "num_attention_heads": heads,
        "num_key_value_heads": int(get("attention.head_count_kv", heads)),
        "head_dim": int(get("attention.key_length", hidden // heads)),
        "hidden_act": "silu",
        "max_position_embeddings": int(get("context_length")),
        "rms_norm_eps": float(f"{get('attention.layer_norm_rms_epsilon'):.6g}"),
        "rope_theta": theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "tie_word_embeddings": tied,
        "bos_token_id": fields.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": eos,
        "pad_token_id": fields.get("tokenizer.ggml.padding_token_id"),
        "dtype": "bfloat16",
    }


def _name(gguf_name: str) -> str:
    if gguf_name in _TOP:
        return _TOP[gguf_name]
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", gguf_name)
    if match is None or match[2] not in _BLOCK:
        raise ModelError(f"GGUF tensor {gguf_name!r} is not known")
    return f"model.layers.{match[1]}.{_BLOCK[match[2]]}.{match[3]}"


def _write_tensors(tensors: list[Any], fields: dict[str, Any], arch: str, out: Path, progress: Progress) -> bool:
    """Dequantises one tensor at a time to bf16 (peak memory: the bf16 model + one fp32 tensor). Returns `tied`."""
    import torch
    from gguf.quants import dequantize
    from safetensors.torch import save_file

    heads = {"attn_q": int(fields[f"{arch}.attention.head_count"])}
    heads["attn_k"] = int(fields.get(f"{arch}.attention.head_count_kv", heads["attn_q"]))
    drop = _duplicate_embedding(tensors)
    state: dict[str, torch.Tensor] = {}
    for done, tensor in enumerate(tensors):
        progress("convert", done, len(tensors))
        if tensor.name == drop:
            continue
        values = torch.tensor(dequantize(tensor.data, tensor.tensor_type))
        part = tensor.name.split(".")[-2]
        if arch == "llama" and part in heads:
            pairs = values.reshape(heads[part], -1, 2, *values.shape[1:])
            values = pairs.transpose(1, 2).reshape(values.shape)
        name = _TOP["token_embd.weight"] if drop and tensor.name == "output.weight" else _name(tensor.name)
        state[name] = values.to(torch.bfloat16).contiguous()
    save_file(state, str(out / "model.safetensors"), metadata={"format": "pt"})
    progress("convert", len(tensors), len(tensors))
    return "lm_head.weight" not in state


def _duplicate_embedding(tensors: list[Any]) -> str | None:
    """Name of the less precise copy where input and output embedding are one matrix stored twice."""
    import numpy as np
    from gguf import GGML_QUANT_SIZES
    from gguf.quants import dequantize

    pair = [tensor for tensor in tensors if tensor.name in ("token_embd.weight", "output.weight")]
    if len(pair) < 2:
        return None
    rows = [dequantize(tensor.data[:256], tensor.tensor_type) for tensor in pair]
    if np.linalg.norm(rows[0] - rows[1]) > _SAME_MATRIX * np.linalg.norm(rows[0]):
        return None

    def bits(tensor: Any) -> float:
        block, size = GGML_QUANT_SIZES[tensor.tensor_type]
        return float(size) / float(block)

    return str(min(pair, key=bits).name)
