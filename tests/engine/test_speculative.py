"""Drafts change how long an answer takes and nothing else."""

from __future__ import annotations

from typing import Any

import pytest

from engine.native_kit import Heard, drain, generate, make_core, random_model, random_prompts, run_all, work
from engine.spec_kit import ScriptedDrafter, eager, foretold
from engine.test_scheduler import rig
from rungway.engine.ngram import NgramDrafter
from rungway.engine.protocol import Work

PROMPTS = random_prompts(5, longest=40, seed=12)
NEW = 24


@pytest.fixture(scope="module")
def model() -> Any:
    return random_model("qwen2")


def asks(**more: Any) -> list[Work]:
    return [work(f"r{at}", prompt, max_tokens=NEW, **{"seed": at, **more}) for at, prompt in enumerate(PROMPTS)]


def said(heard: Heard, works: list[Work]) -> dict[str, list[int]]:
    return {item.request_id: heard.tokens(item.request_id) for item in works}


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_greedy_answers_are_those_of_transformers_with_right_and_wrong_drafts(family: str) -> None:
    model = random_model(family)
    expected = {f"r{at}": generate(model, prompt, NEW) for at, prompt in enumerate(PROMPTS)}
    for wrong in (0.0, 0.3, 1.0):
        speculation = eager(ScriptedDrafter(foretold(expected, wrong)))
        core, scheduler = make_core(model, speculation=speculation)
        assert said(run_all(core, asks()), asks()) == expected
        assert scheduler.pool.free == scheduler.pool.total
        share = speculation.accepted / speculation.drafted
        assert share == 1.0 if wrong == 0.0 else share == 0.0 if wrong == 1.0 else 0.2 < share < 0.9


SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.7},
    {"temperature": 1.0, "top_p": 0.9, "top_k": 40},
    {"temperature": 1.0, "min_p": 0.05, "logit_bias": {7: 2.0}},
    {"temperature": 0.0, "repetition_penalty": 1.3, "frequency_penalty": 0.5, "presence_penalty": 0.4},
    {"temperature": 0.8, "frequency_penalty": 0.7, "top_p": 0.95},
]


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_seeded_answers_and_logprobs_are_those_without_drafts(model: Any, sampling: dict[str, Any]) -> None:
    """Penalties count the drafts before a place; logprobs are those of the place itself."""
    works = asks(logprobs=3, **sampling)
    plain = run_all(make_core(model)[0], works)
    speculation = eager(ScriptedDrafter(foretold(said(plain, works), 0.25)))
    drafted = run_all(make_core(model, speculation=speculation)[0], works)
    assert said(drafted, works) == said(plain, works) and speculation.accepted > 20
    for item in works:
        name = item.request_id
        both = [
            [entry for delta in heard.deltas[name, 0] for entry in delta.logprobs or ()] for heard in (plain, drafted)
        ]
        assert [entry.token for entry in both[0]] == [entry.token for entry in both[1]]
        assert [entry.logprob for entry in both[1]] == pytest.approx([entry.logprob for entry in both[0]], abs=1e-4)
        assert drafted.last(name).cum_logprob == pytest.approx(plain.last(name).cum_logprob, abs=1e-3)


def test_ngram_drafts_make_fewer_steps_and_the_same_answer() -> None:
    """The scripted model counts, and the prompt has counted before."""
    item = work("r", [*range(100), 9, 8, 7], max_tokens=80)
    plain, _, steps = rig(blocks=100, context=400)
    fast, _, fewer = rig(blocks=100, context=400, speculation=eager(NgramDrafter()))
    assert run_all(fast, [item]).tokens("r") == run_all(plain, [item]).tokens("r")
    assert len(fewer.steps) < 0.4 * len(steps.steps)


def test_preemption_and_drafts(model: Any) -> None:
    """A pool that is too small: sequences give way, begin again, and drafts take what is left."""
    works = asks(temperature=0.6)
    plain = run_all(make_core(model)[0], works)
    speculation = eager(ScriptedDrafter(foretold(said(plain, works), 0.2)))
    core, scheduler = make_core(model, blocks=26, context=70, speculation=speculation)
    heard = drain(core, _added(core, works))
    assert said(heard, works) == said(plain, works)
    assert scheduler.preemptions > 0 and speculation.accepted > 0


def _added(core: Any, works: list[Work]) -> Heard:
    heard = Heard()
    for item in works:
        heard.take(core.add(item))
    return heard
