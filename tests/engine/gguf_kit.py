"""Writes tiny GGUF files, as llama.cpp's converter would, and wheels that carry them."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from engine.tiny_model import byte_alphabet

NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"


def interleave(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rotary pairs side by side, as llama.cpp keeps q and k of the Llama family."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weight.shape))


def gguf_name(name: str) -> str:
    top = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    if name in top or name == "lm_head.weight":
        return top.get(name, "output.weight")
    _, _, layer, rest = name.split(".", 3)
    module, kind = rest.rsplit(".", 1)
    return f"blk.{layer}.{NAMES[module]}.{kind}"


def write_gguf(path: Path, model: Any, arch: str, *, embedding_twice: bool = False, extra: str | None = None) -> Path:
    """`embedding_twice`: a tied embedding as two tensors, the first one rounded to float16."""
    config = model.config
    writer = gguf.GGUFWriter(str(path), arch)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    _write_tokenizer(writer, config.vocab_size)
    for name, value in model.state_dict().items():
        array = value.float().numpy()
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if arch == "llama" and ("q_proj" in name or "k_proj" in name):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            array = interleave(array, heads)
        if embedding_twice and "embed_tokens" in name:
            writer.add_tensor("output.weight", array)
            array = array.astype(np.float16)
        writer.add_tensor(gguf_name(name), array)
    if extra is not None:
        writer.add_tensor(extra, np.zeros(4, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _write_tokenizer(writer: Any, size: int) -> None:
    names = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]
    pads = [f"[PAD{at}]" for at in range(size - 258 - len(names))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([*byte_alphabet(), *names, "he", "ll", *pads])
    writer.add_token_types([1] * 256 + [3] * len(names) + [1, 1] + [5] * len(pads))
    writer.add_token_merges(["h e", "l l"])
    writer.add_eos_token_id(257)
    writer.add_bos_token_id(258)
    writer.add_pad_token_id(258)
    writer.add_chat_template(TEMPLATE)


def write_wheel(folder: Path, name: str, version: str, member: str, data: bytes) -> Path:
    """A wheel as pip accepts it, with one data file."""
    stem = name.replace("-", "_")
    path = folder / f"{stem}-{version}-py3-none-any.whl"
    info = f"{stem}-{version}.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(member, data)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return path


def bfloat16_copy(model: Any) -> dict[str, torch.Tensor]:
    return {name: value.to(torch.bfloat16) for name, value in model.state_dict().items()}
