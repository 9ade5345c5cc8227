"""Tiny quantised checkpoints, packed bit by bit from known codes as the formats' descriptions say; nothing of the reader's
code is used."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from engine.tiny_model import EOS, byte_alphabet

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
Tensors = dict[str, torch.Tensor]


def word(codes: list[int], bits: int) -> int:
    """Codes side by side in a signed 32-bit integer, the first in the lowest bits."""
    value = sum(code << (bits * place) for place, code in enumerate(codes))
    return value - (1 << 32) if value >= 1 << 31 else value


def packed_rows(codes: torch.Tensor, bits: int, order: list[int] | None = None) -> torch.Tensor:
    """[rows, n] -> int32 [rows, n * bits / 32]. `order`: which of a word's codes comes first, second, ..."""
    per_word = 32 // bits
    places = order or list(range(per_word))
    rows = [
        [word([row[at + place] for place in places], bits) for at in range(0, len(row), per_word)]
        for row in codes.tolist()
    ]
    return torch.tensor(rows, dtype=torch.int32)


@dataclass
class Coded:
    """Random codes [out, in] of one layer, its scales and zeros [out, groups], and the group of each input."""

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor
    groups: torch.Tensor

    def weight(self) -> torch.Tensor:
        """One number at a time: (code - zero) * scale of the input's group."""
        columns = self.groups.long()
        return (self.codes - self.zeros[:, columns]).float() * self.scales.float()[:, columns]


def random_coded(
    out: int, inputs: int, group: int, bits: int, *, seed: int, symmetric: bool = False, shuffled: bool = False
) -> Coded:
    """`shuffled`: the inputs of a group are not neighbours. Layers of one `inputs` share their order, as those that read
    the same input do in real checkpoints."""
    generator = torch.Generator().manual_seed(seed)
    count, top = inputs // group, 1 << bits
    codes = torch.randint(0, top, (out, inputs), generator=generator)
    scales = (torch.rand(out, count, generator=generator) + 0.5).mul_(0.6 / top).half()
    middle = torch.full((out, count), top // 2)
    zeros = middle if symmetric else torch.randint(1, top, (out, count), generator=generator)
    groups = torch.arange(inputs) // group
    if shuffled:
        groups = groups[torch.randperm(inputs, generator=torch.Generator().manual_seed(inputs))]
    return Coded(codes, scales, zeros, groups.int())


def awq_tensors(layer: Coded) -> Tensors:
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    return {
        "qweight": packed_rows(layer.codes.T, 4, order),
        "qzeros": packed_rows(layer.zeros.T, 4, order),
        "scales": layer.scales.T.contiguous(),
    }


def gptq_tensors(layer: Coded, bits: int = 4, zero_offset: int = 1) -> Tensors:
    return {
        "qweight": packed_rows(layer.codes, bits).T.contiguous(),
        "qzeros": packed_rows(layer.zeros.T - zero_offset, bits),
        "scales": layer.scales.T.contiguous(),
        "g_idx": layer.groups,
    }


def compressed_tensors(layer: Coded, bits: int = 4) -> Tensors:
    return {
        "weight_packed": packed_rows(layer.codes, bits),
        "weight_scale": layer.scales,
        "weight_zero_point": packed_rows(layer.zeros.T, bits).T.contiguous(),
        "weight_shape": torch.tensor(layer.codes.shape),
        "weight_g_idx": layer.groups,
    }


Writer = Callable[[str, torch.Tensor], tuple[Tensors, torch.Tensor]]


def save_pair(folder: Path, quantization: dict[str, Any], write: Writer) -> tuple[Path, Path]:
    """A checkpoint whose linear layers are what `write(module, shape of the weight)` gives as (tensors, dense weight), and a
    float32 one of the dense weights: (quantised, plain). Layer 1's o_proj stays plain in both."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM

    quantised, plain = folder / "quantised", folder / "plain"
    shape = {"vocab_size": EOS + 1, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
    torch.manual_seed(0)
    config = LlamaConfig(**shape, **heads, bos_token_id=None, eos_token_id=EOS, tie_word_embeddings=False)
    LlamaForCausalLM(config).to(torch.float32).save_pretrained(plain)
    tokenizer = Tokenizer(models.BPE(vocab={symbol: byte for byte, symbol in enumerate(byte_alphabet())}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    quantised.mkdir()
    state = load_file(plain / "model.safetensors")
    small = dict(state)
    for name, weight in state.items():
        module = name.removesuffix(".weight")
        if module.rsplit(".", 1)[-1] in LINEARS and module != "model.layers.1.self_attn.o_proj":
            tensors, state[name] = write(module, weight)
            del small[name]
            small |= {f"{module}.{key}": value.contiguous() for key, value in tensors.items()}
    save_file(state, plain / "model.safetensors", metadata={"format": "pt"})
    save_file(small, quantised / "model.safetensors", metadata={"format": "pt"})
    text = json.loads((plain / "config.json").read_text())
    (quantised / "config.json").write_text(json.dumps(text | {"quantization_config": quantization}))
    for path in (quantised, plain):
        tokenizer.save(str(path / "tokenizer.json"))
        (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"}))
        (path / "generation_config.json").write_text(json.dumps({"eos_token_id": EOS}))
    return quantised, plain
