"""Puts an engine's parts together: device, dtype, size of the KV cache, model, vocabulary."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from rungway.engine.architecture import Architecture, read_architecture
from rungway.engine.errors import ModelError
from rungway.engine.linear import Linear
from rungway.engine.model import Decoder, Weights
from rungway.engine.ops import Ops
from rungway.engine.runner import TorchRunner
from rungway.engine.tokenizer import HfTokenizer, Vocabulary
from rungway.engine.weights import DirectoryWeights, read_config

CPU_KV_BYTES_MAX = 2 << 30
GPU_KV_SHARE_MAX = 0.8  # of the memory that is free once the weights are loaded
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Sizes:
    """`context` = most tokens of one sequence. `kv_blocks` 0 = decide from memory."""

    max_num_seqs: int
    context: int
    max_num_batched_tokens: int
    kv_blocks: int
    block_tokens: int

    @property
    def kv_tokens(self) -> int:
        return self.kv_blocks * self.block_tokens


def pick_device(name: str) -> torch.device:
    """`auto` = a CUDA device where there is one. Raises ModelError for a device that is not here."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ModelError(f"device {name!r} is not known") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ModelError("device cuda was asked for and there is none")
    return device


def pick_dtype(name: str, arch: Architecture, device: torch.device) -> torch.dtype:
    """`auto`: bfloat16 on a GPU; on CPU the faster of bfloat16 and float32 for a decode step of eight sequences."""
    if name in _DTYPES:
        if name == "float16" and device.type == "cpu":
            raise ModelError("float16 is not supported on CPU (use bfloat16, float32 or auto)")
        return _DTYPES[name]
    if name != "auto":
        raise ModelError(f"dtype {name!r} is none of auto, {', '.join(_DTYPES)}")
    if device.type != "cpu":
        return torch.bfloat16
    return min((torch.bfloat16, torch.float32), key=lambda dtype: _decode_cost_s(arch, dtype))


def _decode_cost_s(arch: Architecture, dtype: torch.dtype, tries: int = 5) -> float:
    """Best time of the biggest projection of a layer; a second copy of the weight keeps it out of the caches."""
    x = torch.ones(8, arch.hidden, dtype=dtype)
    rows = min(2 * arch.intermediate, 8192)
    layers = [Linear(torch.ones(rows, arch.hidden, dtype=dtype)) for _ in range(2)]
    times = []
    for _ in range(tries):
        started = time.perf_counter()
        for layer in layers:
            layer(x)
        times.append(time.perf_counter() - started)
    return min(times)


def directory_parts(path: Path, wish: Sizes, dtype: str, device: torch.device) -> tuple[TorchRunner, Vocabulary, Sizes]:
    """What NativeEngine is made of, for a model directory. Raises ModelError."""
    arch = read_architecture(read_config(path))
    vocabulary = HfTokenizer(path)
    runner, sizes = _runner(arch, DirectoryWeights(path), wish, dtype, device)
    return runner, vocabulary, sizes


def module_parts(
    module: Any, vocabulary: Vocabulary, wish: Sizes, dtype: str, device: torch.device, ops: Ops | None = None
) -> tuple[TorchRunner, Vocabulary, Sizes]:
    """The same for a transformers model in memory. `ops` None = by device."""
    state: dict[str, torch.Tensor] = module.state_dict()
    runner, sizes = _runner(read_architecture(module.config.to_dict()), state.__getitem__, wish, dtype, device, ops)
    return runner, vocabulary, sizes


def _runner(
    arch: Architecture, weights: Weights, wish: Sizes, dtype: str, device: torch.device, ops: Ops | None = None
) -> tuple[TorchRunner, Sizes]:
    with torch.inference_mode():
        model = Decoder(arch, weights, pick_dtype(dtype, arch, device), device, ops)
        sizes = _fit(wish, arch, model)
        runner = TorchRunner(
            model,
            rows=sizes.max_num_seqs,
            blocks=sizes.kv_blocks,
            block_tokens=sizes.block_tokens,
            blocks_per_row=-(-sizes.context // sizes.block_tokens),
        )
    return runner, sizes


def _fit(wish: Sizes, arch: Architecture, model: Decoder) -> Sizes:
    """Sizes that are possible: the context within the model's and the pool's, the pool within memory."""
    if min(wish.max_num_seqs, wish.context, wish.block_tokens) < 1 or wish.kv_blocks < 0:
        raise ModelError("max_num_seqs, max_context, block_tokens and kv_blocks must be positive")
    context = min(wish.context, arch.context)
    blocks = wish.kv_blocks
    if blocks == 0:
        per_block = 2 * arch.layers * arch.kv_heads * arch.head_dim * model.dtype.itemsize * wish.block_tokens
        wanted = wish.max_num_seqs * -(-context // wish.block_tokens)
        blocks = max(1, min(wanted, _kv_bytes(model.device) // per_block))
    return replace(
        wish,
        context=min(context, blocks * wish.block_tokens),
        kv_blocks=blocks,
        max_num_batched_tokens=max(wish.max_num_batched_tokens, wish.max_num_seqs),
    )


def _kv_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free * GPU_KV_SHARE_MAX)
    return CPU_KV_BYTES_MAX
