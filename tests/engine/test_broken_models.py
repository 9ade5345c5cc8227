"""Model directories that cannot serve: told at load, in words, and never by requests that fail one after the other."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from engine.tiny_model import EOS, save_tiny_llama
from rungway.engine.engine import NativeEngine
from rungway.engine.errors import ModelError

Change = Callable[[Path], None]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("whole"))


def configured(file: str, **values: Any) -> Change:
    def change(path: Path) -> None:
        config = json.loads((path / file).read_text())
        (path / file).write_text(json.dumps({**config, **values}))

    return change


def weighted(name: str, make: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    def change(path: Path) -> None:
        tensors = safetensors.torch.load_file(path / "model.safetensors")
        tensors[name] = make(tensors[name])
        safetensors.torch.save_file(tensors, path / "model.safetensors")

    return change


def cut(path: Path) -> None:
    data = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(data[: len(data) // 2])


def load(path: Path, dtype: str = "float32") -> NativeEngine:
    return NativeEngine.from_dir(
        path,
        max_num_seqs=2,
        max_context=64,
        max_num_batched_tokens=32,
        kv_blocks=8,
        block_tokens=16,
        dtype=dtype,
        device="cpu",
    )


DOWN = "model.layers.0.mlp.down_proj.weight"
KEYS = "model.layers.1.self_attn.k_proj.weight"
OUT = "model.layers.1.self_attn.o_proj.weight"
BROKEN: dict[str, tuple[Change, str]] = {
    "cut": (cut, "cannot be read"),
    "not numbers": (weighted(DOWN, lambda weight: weight * float("nan")), "no numbers"),
    "too large": (weighted("lm_head.weight", lambda weight: weight + float("inf")), "no numbers"),
    "another norm": (weighted("model.norm.weight", lambda weight: weight[:7].clone()), "not those of"),
    "a narrower layer": (weighted(DOWN, lambda weight: weight[:, :-1].contiguous()), "down_proj are"),
    "fewer keys": (weighted(KEYS, lambda weight: weight[:-8].contiguous()), "self_attn are"),
    "other heads": (configured("config.json", num_key_value_heads=1), "self_attn are"),
    "a wider out": (weighted(OUT, lambda weight: weight.repeat(1, 2)), "o_proj are"),
    "more tokens": (configured("config.json", vocab_size=500), "not those of 500 tokens"),
    "fewer tokens": (configured("config.json", vocab_size=100), "not those of 100 tokens"),
    "more layers": (configured("config.json", num_hidden_layers=3), "no tensor"),
    "no layers": (configured("config.json", num_hidden_layers=0), "below 1"),
    "no heads": (configured("config.json", num_attention_heads=0), "below 1"),
    "less than no key heads": (configured("config.json", num_key_value_heads=-2), "below 1"),
    "no context": (configured("config.json", max_position_embeddings=0), "below 1"),
    "an end in words": (configured("generation_config.json", eos_token_id="x"), "eos_token_id"),
    "an end of nothing": (configured("generation_config.json", eos_token_id=[None]), "eos_token_id"),
}


@pytest.mark.parametrize("dtype", ["float32", "int8"])
@pytest.mark.parametrize("name", BROKEN)
def test_a_model_that_cannot_serve_is_refused_at_load(whole: Path, tmp_path: Path, name: str, dtype: str) -> None:
    change, why = BROKEN[name]
    shutil.copytree(whole, tmp_path / "model")
    change(tmp_path / "model")
    with pytest.raises(ModelError, match=why):
        load(tmp_path / "model", dtype)


async def test_ends_that_the_model_cannot_say_are_no_ends(whole: Path, tmp_path: Path) -> None:
    """They made the grammar library fail when the engine started, and the sampler at the first `min_tokens`."""
    shutil.copytree(whole, tmp_path / "model")
    configured("generation_config.json", eos_token_id=[EOS, 9999, -1])(tmp_path / "model")
    engine = load(tmp_path / "model")
    await engine.start(lambda deltas: None)
    assert engine._core._vocabulary.eos_ids == {EOS}
    await engine.stop()
