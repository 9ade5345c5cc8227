"""A second model that decodes ahead: with the same weights it is always right, with others the answer is still the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.native_kit import VOCAB, ByteVocabulary, Heard, make_core, random_model, random_prompts, run_all, work
from engine.spec_kit import eager
from engine.tiny_model import save_tiny_llama
from rungway.engine.assemble import Sizes, module_parts
from rungway.engine.draft_model import ModelDrafter
from rungway.engine.drafting import Drafting
from rungway.engine.engine import NativeEngine
from rungway.engine.errors import ModelError
from rungway.engine.protocol import Work

CONTEXT = 128
PROMPTS = random_prompts(4, longest=40, seed=21)


@pytest.fixture(scope="module")
def model() -> Any:
    return random_model("qwen2")


def drafter(model: Any, *, slots: int = 4, chunk: int = 16, context: int = CONTEXT) -> ModelDrafter:
    wish = Sizes(slots, context, 64, slots * -(-context // 4), 4)
    runner, _, sizes = module_parts(model, ByteVocabulary(), wish, "float32", torch.device("cpu"))
    return ModelDrafter(runner, slots=slots, context=sizes.context, block_tokens=4, chunk=chunk, vocab_size=VOCAB)


def asks(**more: Any) -> list[Work]:
    return [work(f"r{at}", prompt, max_tokens=20, seed=at, **more) for at, prompt in enumerate(PROMPTS)]


def tokens(heard: Heard) -> list[list[int]]:
    return [heard.tokens(f"r{at}") for at in range(len(PROMPTS))]


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8, "top_p": 0.95}, {"repetition_penalty": 1.2}])
def test_the_same_weights_are_right_every_time(model: Any, sampling: dict[str, Any]) -> None:
    """Whatever the sampling: both choose by the same numbers."""
    plain = run_all(make_core(model)[0], asks(**sampling))
    speculation = eager(drafter(model), 3)
    heard = run_all(make_core(model, speculation=speculation)[0], asks(**sampling))
    assert tokens(heard) == tokens(plain)
    assert speculation.accepted == speculation.drafted > 30


def test_other_weights_change_nothing(model: Any) -> None:
    plain = run_all(make_core(model)[0], asks(temperature=1.0))
    torch.manual_seed(1)
    other = random_model("llama")
    speculation = eager(drafter(other), 3)
    heard = run_all(make_core(model, speculation=speculation)[0], asks(temperature=1.0))
    assert tokens(heard) == tokens(plain) and speculation.accepted < speculation.drafted


def test_fewer_slots_than_sequences_take_turns(model: Any) -> None:
    """One slot: each sequence drives the other's text out, and is read again."""
    maker = drafter(model, slots=1)
    speculation = eager(maker, 3)
    core, _ = make_core(model, seqs=1, speculation=speculation)
    heard = run_all(core, asks())
    assert tokens(heard) == tokens(run_all(make_core(model)[0], asks()))
    assert speculation.accepted == speculation.drafted > 20 and maker._mirrors == {}


def test_a_text_longer_than_the_draft_model_reads_has_no_drafts(model: Any) -> None:
    speculation = eager(drafter(model, context=8), 3)
    long = [work("r", list(range(40)), max_tokens=10)]
    heard = run_all(make_core(model, speculation=speculation)[0], long)
    assert heard.tokens("r") == run_all(make_core(model)[0], long).tokens("r") and speculation.drafted == 0


def native(path: Path, draft: Path, tokens_max: int = 3) -> NativeEngine:
    return NativeEngine.from_dir(
        path,
        max_num_seqs=2,
        max_context=64,
        max_num_batched_tokens=32,
        kv_blocks=None,
        block_tokens=4,
        dtype="float32",
        drafting=Drafting(draft, tokens_max, 2),
    )


def test_tokenizers_are_compared_at_load(tmp_path: Path) -> None:
    target, twin, stranger = (save_tiny_llama(tmp_path / name, seed) for seed, name in enumerate(("a", "b", "c")))
    native(target, twin)
    tokenizer = json.loads((stranger / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["A"], vocabulary["B"] = vocabulary["B"], vocabulary["A"]
    (stranger / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(
        ModelError, match="c cannot draft for this model, their tokenizers differ: token 'A' is 65 and 66"
    ):
        native(target, stranger)
    with pytest.raises(ModelError, match="at least 1"):
        native(target, twin, 0)
