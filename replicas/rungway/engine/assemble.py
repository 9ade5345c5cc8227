"""Puts an engine's parts together: device, dtype, size of the KV cache, model, vocabulary."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from rungway.engine.architecture import Architecture, read_architecture
from rungway.engine.checkpoint import open_weights
from rungway.engine.cuda_graphs import GRAPH_SIZES, CudaRecorder
from rungway.engine.errors import EngineError, ModelError
from rungway.engine.model import Decoder, Weights
from rungway.engine.ops import Ops
from rungway.engine.precision import Maker, candidates, plain
from rungway.engine.runner import TorchRunner, enter
from rungway.engine.selftest import check_works, likeness, probe_ids, read_through
from rungway.engine.stored import StoredWeights
from rungway.engine.tokenizer import HfTokenizer, Vocabulary
from rungway.engine.weights import DirectoryWeights, read_config

CPU_KV_BYTES_MAX = 2 << 30
GPU_KV_SHARE_MAX = 0.8  # of the memory that is free once the weights are loaded

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Sizes:
    """`context` = most tokens of one sequence. `kv_blocks` 0 = decide from memory. `graph_rows_max`: of decode steps that are
    recorded on a GPU; `drafts_max`: of one sequence in such a step."""

    max_num_seqs: int
    context: int
    max_num_batched_tokens: int
    kv_blocks: int
    block_tokens: int
    graph_rows_max: int = 256
    drafts_max: int = 0

    @property
    def kv_tokens(self) -> int:
        return self.kv_blocks * self.block_tokens

    @property
    def graph_rows(self) -> tuple[int, ...]:
        """Batch sizes worth recording: up to twice the sequences, as drafts are rows as well."""
        most = min(2 * self.max_num_seqs, self.graph_rows_max)
        below = tuple(size for size in GRAPH_SIZES if size < most)
        return (*below, most) if most else ()


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
    if device.index is not None and device.index >= torch.cuda.device_count():
        raise ModelError(f"device {name} was asked for and there are {torch.cuda.device_count()}")
    enter(device)
    return device


def directory_parts(
    path: Path, wish: Sizes, dtype: str, device: torch.device, *, ranks: int = 1, ranks_timeout_s: float = 60.0
) -> tuple[TorchRunner, Vocabulary, Sizes]:
    """What NativeEngine is made of, for a model directory. `ranks` over 1: divided over so many processes, of which each
    answers within `ranks_timeout_s` in a step; then the runner has to be closed. Raises ModelError."""
    config = read_config(path)
    arch = read_architecture(config)
    vocabulary = HfTokenizer(path)
    weights = open_weights(path, config)
    if ranks > 1:
        model: Decoder = _divided(path, arch, weights, dtype, device, ranks, ranks_timeout_s)
    else:
        model = _model(arch, weights, vocabulary, dtype, device)
        check_works(model)
    try:
        runner, sizes = _runner(model, wish)
    except EngineError:
        model.close()
        raise
    return runner, vocabulary, sizes


def module_parts(
    module: Any, vocabulary: Vocabulary, wish: Sizes, dtype: str, device: torch.device, ops: Ops | None = None
) -> tuple[TorchRunner, Vocabulary, Sizes]:
    """The same for a transformers model in memory. `ops` None = by device."""
    state: dict[str, torch.Tensor] = module.state_dict()
    arch = read_architecture(module.config.to_dict())
    model = _model(arch, state.__getitem__, vocabulary, dtype, device, ops)
    runner, sizes = _runner(model, wish)
    return runner, vocabulary, sizes


@torch.inference_mode()
def _divided(
    path: Path, arch: Architecture, weights: Weights, dtype: str, device: torch.device, ranks: int, timeout_s: float
) -> Decoder:
    from rungway.engine.parallel.lead import lead  # only models that need it start processes and meet

    return lead(path, arch, weights, dtype, device, ranks, timeout_s)


@torch.inference_mode()
def _model(
    arch: Architecture,
    weights: Weights,
    vocabulary: Vocabulary,
    dtype: str,
    device: torch.device,
    ops: Ops | None = None,
) -> Decoder:
    """The model in the fastest numbers that are good enough. One in fewer bits has to agree with the plain one, which is
    gone from memory before the other is made. Four bits that were asked for are taken whatever they answer; the plain
    model is read for what its channels carry, if it fits."""
    form = weights.form if isinstance(weights, StoredWeights) else None
    *fewer_bits, last = candidates(dtype, arch, device, form)
    if form is not None and not last.stored:
        _log.info("the checkpoint is quantised; its weights are dequantised at load, dtype %s", dtype)
    asked = [last] if last.int4 and device.type == "cpu" and plain_fits(weights) else []
    if not fewer_bits and not asked:
        if last.int8 or last.int4:
            _log.info("%s is taken as asked for, without a test of its answers", last.name)
        return Decoder(arch, weights, last, device, ops)
    reference = plain(torch.bfloat16) if asked else last
    ids = probe_ids(vocabulary, arch.context)
    watch = Maker(reference)
    watch.watching = True
    expected = read_through(Decoder(arch, weights, reference, device, ops, watch), ids)
    seen = {place: layer.seen for place, layer in watch.watched.items()}
    del watch
    for kind in (*fewer_bits, *asked):
        model = Decoder(arch, weights, kind, device, ops, Maker(kind, seen))
        alike = likeness(expected, read_through(model, ids))
        if alike.good or kind in asked:
            _log.info("%s beside %s: %s", kind.name, reference.name, alike)
            return model
        _log.info("%s answers differ too much from %s: %s", kind.name, reference.name, alike)
        del model  # before the next one is made
    return Decoder(arch, weights, last, device, ops)


def plain_fits(weights: Weights) -> bool:
    """Whether the plain model may be made first, in half of the memory that is free. True for weights that are in memory."""
    if not isinstance(weights, DirectoryWeights):
        return True
    try:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return False
    return weights.nbytes <= free // 2


@torch.inference_mode()
def _runner(model: Decoder, wish: Sizes) -> tuple[TorchRunner, Sizes]:
    sizes = _fit(wish, model.arch, model)
    runner = TorchRunner(
        model,
        rows=sizes.max_num_seqs,
        blocks=sizes.kv_blocks,
        block_tokens=sizes.block_tokens,
        blocks_per_row=-(-sizes.context // sizes.block_tokens),
    )
    if model.device.type == "cuda":
        runner.record(sizes.graph_rows, CudaRecorder(model.device), sizes.drafts_max)
    _log.info("steps are computed by: %s, %d threads", runner.path, torch.get_num_threads())
    return runner, sizes


def _fit(wish: Sizes, arch: Architecture, model: Decoder) -> Sizes:
    """Sizes that are possible: the context within the model's and the pool's, the pool within memory."""
    if min(wish.max_num_seqs, wish.context, wish.block_tokens) < 1 or wish.kv_blocks < 0:
        raise ModelError("max_num_seqs, max_context, block_tokens and kv_blocks must be positive")
    context = min(wish.context, arch.context)
    blocks = wish.kv_blocks
    if blocks == 0:
        per_block = arch.cache_values * model.dtype.itemsize * wish.block_tokens
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
