"""Faults that users of other engines met, each as a test of this one. Those about priorities, aborts and the prefix cache
stand in test_in_batch.py and test_prefix_cache.py; stop strings, seeds and bad requests in test_native_requests.py."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch

from engine.native_kit import VOCAB, generate, make_core, random_model, random_prompts, run_all, work
from rungway.engine.sampler import LOGPROB_MIN, Row, sample

PROMPT = random_prompts(1, longest=30, seed=8)[0] + [65, 66, 67]
NEW = 12


@pytest.fixture(scope="module")
def model() -> Any:
    return random_model("qwen2")


def test_a_request_larger_than_the_pool_fails_at_once_and_the_others_go_on(model: Any) -> None:
    core, _ = make_core(model, blocks=10, context=256)
    (end,) = core.add(work("huge", [1] * 60, max_tokens=5))
    assert end.finish == "error" and end.usage is not None
    assert run_all(core, [work("next", [1] * 20, max_tokens=5)]).last("next").finish == "length"


@pytest.mark.parametrize("beside", [-1, 0, 1])
@pytest.mark.parametrize("max_tokens", [1, 2, 10**9])
def test_a_prompt_at_the_edge_of_the_context(model: Any, beside: int, max_tokens: int) -> None:
    context = 32
    core, scheduler = make_core(model, context=context)
    heard = run_all(core, [work("r", [1] * (context + beside), max_tokens=max_tokens)])
    if beside < 0:
        assert len(heard.tokens("r")) == 1 and heard.last("r").finish == "length"
    else:
        assert heard.last("r").finish == "error" and heard.tokens("r") == []
    assert scheduler.pool.free == scheduler.pool.total


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("batched", [8, 256])
def test_usage_does_not_depend_on_chunks_or_samples(model: Any, count: int, batched: int) -> None:
    core, _ = make_core(model, batched=batched)
    usage = run_all(core, [work("r", PROMPT, sequences=count, max_tokens=NEW)]).usage("r")
    assert (usage.prompt_tokens, usage.cached_tokens, usage.output_tokens) == (len(PROMPT), 0, count * NEW)


def test_samples_of_one_seed_differ_and_can_be_had_again(model: Any) -> None:
    ask: dict[str, Any] = {"sequences": 4, "seed": 1, "temperature": 1.0, "max_tokens": NEW}
    first, second = (run_all(make_core(model)[0], [work("r", PROMPT, **ask)]) for _ in range(2))
    answers = [tuple(first.tokens("r", index)) for index in range(4)]
    assert len(set(answers)) == 4
    assert answers == [tuple(second.tokens("r", index)) for index in range(4)]


def test_many_samples_in_a_pool_that_holds_few_recompute_to_the_same(model: Any) -> None:
    core, scheduler = make_core(model, blocks=20, context=64)
    heard = run_all(core, [work("r", PROMPT, sequences=8, max_tokens=20)])
    expected = generate(model, PROMPT, 20)
    assert [heard.tokens("r", index) for index in range(8)] == [expected] * 8
    assert scheduler.preemptions > 0


@pytest.mark.parametrize("company", [2, 8, 32])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_answer_does_not_depend_on_how_many_are_asked_with_it(model: Any, company: int, temperature: float) -> None:
    needle = work("needle", PROMPT, seed=3, temperature=temperature, max_tokens=NEW)
    alone = run_all(make_core(model)[0], [needle]).tokens("needle")
    core, _ = make_core(model, seqs=32, batched=64, blocks=600)
    others = [
        work(f"o{at}", prompt, seed=at, temperature=1.0, max_tokens=NEW)
        for at, prompt in enumerate(random_prompts(company - 1, longest=40, seed=company))
    ]
    assert run_all(core, [*others[: company // 2], needle, *others[company // 2 :]]).tokens("needle") == alone


def test_a_prompt_cut_inside_a_character_leaks_nothing_into_the_answer(model: Any) -> None:
    """The first bytes of the character belong to the prompt; the answer's text is that of its own tokens."""
    core, _ = make_core(model)
    emoji = "🙂".encode()
    bias = {emoji[2]: 999.0}
    heard = run_all(core, [work("r", [*PROMPT, *emoji[:2]], max_tokens=1, logit_bias=bias)])
    assert heard.tokens("r") == [emoji[2]]
    assert heard.text("r") == bytes([emoji[2]]).decode(errors="replace")


def test_text_is_held_back_only_while_it_could_still_become_a_stop(model: Any) -> None:
    core, _ = make_core(model)
    spoken = b"abcabX"
    texts = []
    for at, byte in enumerate(spoken):
        ask: dict[str, Any] = {"resume": [list(spoken[:at])], "logit_bias": {byte: 999.0}, "stop": ("abcabc",)}
        delta = core.add(work(f"r{at}", PROMPT, max_tokens=at + 2, **ask)) or core.step()
        texts.append(delta[0].text)
        core.cancel(f"r{at}")
    assert texts == ["", "", "", "", "", "abcabX"]
    heard = run_all(core, [work("free", PROMPT, max_tokens=1, logit_bias={120: 999.0}, stop=("abc",))])
    assert heard.deltas["free", 0][0].text == "x"


def test_logprobs_are_never_infinite_and_always_json() -> None:
    logits = torch.full((1, VOCAB), float("-inf"))
    logits[0, 7] = 1.0
    ask = work("r", [1], logprobs=5).sampling
    (got,) = sample(logits, [Row(ask, [1], 1, 0, 0, 0)])
    values = [got.logprob, *(value for _, value in got.top)]
    assert got.token == 7 and all(math.isfinite(value) and value >= LOGPROB_MIN for value in values)
    assert json.loads(json.dumps(values, allow_nan=False)) == values


def test_an_id_can_be_used_again_in_the_step_after_its_abort(model: Any) -> None:
    core, _ = make_core(model)
    core.add(work("same", PROMPT, max_tokens=40))
    core.step()
    core.cancel("same")
    heard = run_all(core, [work("same", PROMPT[::-1], max_tokens=NEW)])
    assert heard.tokens("same") == generate(model, PROMPT[::-1], NEW)


def test_a_model_in_memory_is_not_touched_by_the_engine_made_from_it(model: Any) -> None:
    ids = torch.tensor([PROMPT])
    with torch.no_grad():
        before = model(ids).logits
        run_all(make_core(model)[0], [work("r", PROMPT)])
        assert torch.equal(model(ids).logits, before)
