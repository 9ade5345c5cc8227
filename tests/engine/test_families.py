"""Every family says what transformers says, token for token in float32: alone, in a mixed batch with chunked prompts, on
prefix hits, preempted, and through the wiring of the GPU path."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine.family_kit import MODELS
from engine.native_kit import generate, make_core, random_prompts, run_all, work
from engine.spec_kit import ScriptedDrafter, eager, foretold
from rungway.engine.architecture import read_architecture
from rungway.engine.model import Decoder
from rungway.engine.ops import KernelOps
from rungway.engine.precision import plain
from rungway.engine.selftest import read_through

NEW = 12
COUNT = 6


@pytest.fixture(scope="module", params=list(MODELS))
def case(request: pytest.FixtureRequest) -> tuple[Any, list[list[int]], list[list[int]]]:
    model = MODELS[request.param]()
    prompts = random_prompts(COUNT, seed=3)
    return model, prompts, [generate(model, prompt, NEW) for prompt in prompts]


def test_alone_and_again_from_the_prefix_cache(case: tuple[Any, list[list[int]], list[list[int]]]) -> None:
    model, prompts, expected = case
    core, _ = make_core(model)
    for turn in ("first", "again"):
        for at, prompt in enumerate(prompts):
            heard = run_all(core, [work(turn, prompt, max_tokens=NEW)])
            assert heard.tokens(turn) == expected[at]
            whole_blocks = (len(prompt) - 1) // 4 * 4
            assert turn == "first" or heard.usage(turn).cached_tokens == whole_blocks


def test_mixed_batch_with_chunked_prompts(case: tuple[Any, list[list[int]], list[list[int]]]) -> None:
    model, prompts, expected = case
    core, _ = make_core(model, seqs=5, batched=13)
    heard = run_all(core, [work(str(at), prompt, max_tokens=NEW) for at, prompt in enumerate(prompts)])
    assert [heard.tokens(str(at)) for at in range(COUNT)] == expected


def test_preempted(case: tuple[Any, list[list[int]], list[list[int]]]) -> None:
    model, prompts, expected = case
    core, scheduler = make_core(model, seqs=5, batched=16, blocks=18, context=72)
    heard = run_all(core, [work(str(at), prompt, max_tokens=NEW) for at, prompt in enumerate(prompts)])
    assert [heard.tokens(str(at)) for at in range(COUNT)] == expected
    assert scheduler.preemptions > 0


def test_through_the_kernel_registry(case: tuple[Any, list[list[int]], list[list[int]]]) -> None:
    model, prompts, expected = case
    core, _ = make_core(model, seqs=5, batched=16, ops=KernelOps())
    heard = run_all(core, [work(str(at), prompt, max_tokens=NEW) for at, prompt in enumerate(prompts[:3])])
    assert [heard.tokens(str(at)) for at in range(3)] == expected[:3]


@pytest.mark.parametrize("ops", [None, KernelOps()], ids=["plain", "kernels"])
def test_with_right_and_wrong_drafts(case: tuple[Any, list[list[int]], list[list[int]]], ops: KernelOps | None) -> None:
    """Several places of one sequence in one step: windows and latents see each from where it stands."""
    model, prompts, expected = case
    speculation = eager(ScriptedDrafter(foretold({str(at): tokens for at, tokens in enumerate(expected)}, 0.3)))
    core, _ = make_core(model, seqs=5, speculation=speculation, ops=ops)
    heard = run_all(core, [work(str(at), prompt, max_tokens=NEW) for at, prompt in enumerate(prompts)])
    assert [heard.tokens(str(at)) for at in range(COUNT)] == expected
    assert 0 < speculation.accepted < speculation.drafted


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_the_gpu(case: tuple[Any, list[list[int]], list[list[int]]]) -> None:
    """Products there may be rounded to TF32, so a near-tie may fall to the other side, and the rest of its answer with it."""
    model, prompts, expected = case
    core, _ = make_core(model, seqs=5, batched=16, device="cuda")
    heard = run_all(core, [work(str(at), prompt, max_tokens=NEW) for at, prompt in enumerate(prompts)])
    same = [heard.tokens(str(at)) == expected[at] for at in range(COUNT)]
    assert sum(same) >= COUNT - 2


def test_probabilities(case: tuple[Any, list[list[int]], list[list[int]]]) -> None:
    """Greedy answers do not see what leaves the order of the logits alone, such as a cap on them."""
    model, prompts, _ = case
    ids = max(prompts, key=len)
    arch, weights = read_architecture(model.config.to_dict()), model.state_dict().__getitem__
    with torch.inference_mode():
        got = read_through(Decoder(arch, weights, plain(torch.float32), torch.device("cpu")), ids)
        expected = torch.log_softmax(model(torch.tensor([ids])).logits[0], -1)
    torch.testing.assert_close(got, expected, atol=2e-4, rtol=1e-4)
