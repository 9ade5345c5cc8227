"""Puts together what drafts for an engine: the text itself, or a second, smaller model."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from rungway.engine.assemble import Sizes, directory_parts
from rungway.engine.draft_model import ModelDrafter
from rungway.engine.drafts import Drafter, Speculation
from rungway.engine.errors import ModelError
from rungway.engine.ngram import NgramDrafter
from rungway.engine.pace import Pace
from rungway.engine.tokenizer import HfTokenizer, Vocabulary


@dataclass(frozen=True)
class Drafting:
    """`model`: directory of the draft model, None = drafts from the text itself. At most `tokens_max` drafts for a sequence
    in a step, and none while more than `batch_max` sequences decode."""

    model: Path | None
    tokens_max: int
    batch_max: int


def make_speculation(
    drafting: Drafting | None,
    vocabulary: Vocabulary,
    sizes: Sizes,
    dtype: str,
    device: torch.device,
    clock_ns: Callable[[], int] = time.perf_counter_ns,
) -> Speculation | None:
    """For an engine of `vocabulary` and `sizes`; a draft model computes in `dtype` on `device`. Raises ModelError."""
    if drafting is None:
        return None
    if min(drafting.tokens_max, drafting.batch_max) < 1:
        raise ModelError("speculative decoding needs tokens_max and batch_max of at least 1")
    drafter: Drafter = NgramDrafter()
    if drafting.model is not None:
        drafter = _model_drafter(drafting, drafting.model, vocabulary, sizes, dtype, device)
    return Speculation(drafter, Pace(drafting.tokens_max, drafting.batch_max), clock_ns)


def _model_drafter(
    drafting: Drafting, path: Path, vocabulary: Vocabulary, sizes: Sizes, dtype: str, device: torch.device
) -> ModelDrafter:
    check_pair(vocabulary, HfTokenizer(path), path)
    slots = min(drafting.batch_max, sizes.max_num_seqs)
    blocks = slots * -(-sizes.context // sizes.block_tokens)
    runner, _, got = directory_parts(path, replace(sizes, max_num_seqs=slots, kv_blocks=blocks), dtype, device)
    return ModelDrafter(
        runner,
        slots=slots,
        context=got.context,
        block_tokens=sizes.block_tokens,
        chunk=sizes.max_num_batched_tokens,
        vocab_size=vocabulary.vocab_size,
    )


def check_pair(vocabulary: Vocabulary, draft: HfTokenizer, path: Path) -> None:
    """A token id has to mean the same in both models. Raises ModelError."""
    if not isinstance(vocabulary, HfTokenizer):
        raise ModelError("a draft model needs a model directory beside it, to compare their tokenizers")
    difference = vocabulary.difference(draft)
    if difference is not None:
        raise ModelError(f"{path.name} cannot draft for this model, their tokenizers differ: {difference}")
