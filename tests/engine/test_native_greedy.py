"""Greedy float32 output equals transformers' token for token, whatever the batch, the chunks and the preemptions."""

from __future__ import annotations

from typing import Any

import pytest

from engine.native_kit import generate, make_core, random_model, random_prompts, run_all, work
from rungway.engine.kernel_ops import KernelOps

NEW = 20


@pytest.fixture(scope="module", params=["llama", "llama3", "qwen2"])
def case(request: pytest.FixtureRequest) -> tuple[Any, list[list[int]], list[list[int]]]:
    model = random_model(request.param)
    prompts = random_prompts(20)
    return model, prompts, [generate(model, prompt, NEW) for prompt in prompts]


def test_alone(case: tuple[Any, list[list[int]], list[list[int]]]) -> None:
    model, prompts, expected = case
    core, _ = make_core(model)
    got = [run_all(core, [work("r", prompt, max_tokens=NEW)]).tokens("r") for prompt in prompts]
    assert got == expected


def test_mixed_batch_with_chunked_prefill(case: tuple[Any, list[list[int]], list[list[int]]]) -> None:
    model, prompts, expected = case
    core, scheduler = make_core(model, seqs=7, batched=16)
    heard = run_all(core, [work(str(at), prompt, max_tokens=NEW) for at, prompt in enumerate(prompts)])
    assert [heard.tokens(str(at)) for at in range(20)] == expected
    assert scheduler.preemptions == 0


def test_forced_preemption(case: tuple[Any, list[list[int]], list[list[int]]]) -> None:
    model, prompts, expected = case
    core, scheduler = make_core(model, seqs=7, batched=16, blocks=24, context=96)
    heard = run_all(core, [work(str(at), prompt, max_tokens=NEW) for at, prompt in enumerate(prompts)])
    assert [heard.tokens(str(at)) for at in range(20)] == expected
    assert scheduler.preemptions > 5


def test_resumed_elsewhere(case: tuple[Any, list[list[int]], list[list[int]]]) -> None:
    """A replica is lost after k tokens; another goes on and the whole is what one replica would have said."""
    model, prompts, expected = case
    core, _ = make_core(model)
    for cut in (1, NEW // 2, NEW - 1):
        heard = run_all(
            core,
            [
                work(str(at), prompt, max_tokens=NEW, resume=[expected[at][:cut]])
                for at, prompt in enumerate(prompts[:6])
            ],
        )
        assert [heard.tokens(str(at)) for at in range(6)] == [tokens[cut:] for tokens in expected[:6]]
        usage = heard.last("0").usage
        assert usage is not None and (usage.prompt_tokens, usage.output_tokens) == (len(prompts[0]), NEW - cut)


def test_siblings_share_the_prompt(case: tuple[Any, list[list[int]], list[list[int]]]) -> None:
    """Eight samples of one prompt hold its whole blocks once, and say what each would alone."""
    model, prompts, expected = case
    at = max(range(20), key=lambda index: len(prompts[index]))
    core, scheduler = make_core(model, batched=32)
    assert core.add(work("n", prompts[at], sequences=8, max_tokens=NEW)) == []
    least = scheduler.pool.free
    deltas = []
    while core.busy:
        deltas += core.step()
        least = min(least, scheduler.pool.free)
        assert core.check() == []
    for index in range(8):
        assert [token for d in deltas if d.index == index for token in d.token_ids] == expected[at]
    whole = scheduler.pool.needed(len(prompts[at]) + NEW)
    assert scheduler.pool.total - least < 8 * whole - 6 * (len(prompts[at]) // 4)
    usages = [delta.usage for delta in deltas if delta.usage is not None]
    assert [(usage.prompt_tokens, usage.output_tokens) for usage in usages] == [(len(prompts[at]), 8 * NEW)]


def test_many_siblings_in_a_tiny_pool(case: tuple[Any, list[list[int]], list[list[int]]]) -> None:
    model, prompts, expected = case
    core, scheduler = make_core(model, batched=16, blocks=24, context=96)
    heard = run_all(core, [work(f"n{at}", prompts[at], sequences=6, max_tokens=NEW) for at in range(4)])
    for at in range(4):
        assert [heard.tokens(f"n{at}", index) for index in range(6)] == [expected[at]] * 6
    assert scheduler.preemptions > 0


def test_through_the_kernel_registry(case: tuple[Any, list[list[int]], list[list[int]]]) -> None:
    """The CUDA path's wiring, with the kernels' references in their place."""
    model, prompts, expected = case
    core, _ = make_core(model, seqs=7, batched=16, ops=KernelOps())
    heard = run_all(core, [work(str(at), prompt, max_tokens=NEW) for at, prompt in enumerate(prompts[:8])])
    assert [heard.tokens(str(at)) for at in range(8)] == expected[:8]
