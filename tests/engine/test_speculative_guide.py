"""Drafts under a constraint: each place is masked as the drafts before it would have it, and what was refused is taken back."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engine.native_kit import GRAMMARS, Heard, drain, make_core, random_model, random_prompts, work
from engine.spec_kit import Guess, ScriptedDrafter, eager, foretold
from rungway.engine.protocol import Constraint, Work

SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["alpha", "alpine", "beta"]},
        "sizes": {"type": "array", "items": {"enum": [10, 12, 250]}},
    },
    "required": ["kind", "sizes"],
    "additionalProperties": False,
}
DEMAND = Constraint("json_schema", json.dumps(SCHEMA))
PROMPTS = random_prompts(3, longest=20, seed=4)


@pytest.fixture(scope="module")
def model() -> Any:
    return random_model("llama")


def answered(model: Any, works: list[Work], guess: Guess | None) -> tuple[Heard, int]:
    speculation = eager(ScriptedDrafter(guess), 4) if guess else None
    core, scheduler = make_core(model, speculation=speculation)
    heard = Heard()
    for item in works:
        heard.take(core.add(item, GRAMMARS.compile(DEMAND)))
    drain(core, heard)
    assert scheduler.pool.free == scheduler.pool.total
    return heard, speculation.accepted if speculation else 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_constrained_answers_are_those_without_drafts(model: Any, temperature: float) -> None:
    """Mostly right drafts, drafts that fit the schema but not the model, and drafts that may not come at all."""
    works = [
        work(f"r{at}", prompt, max_tokens=60, seed=at, temperature=temperature, ignore_eos=False, constraint=DEMAND)
        for at, prompt in enumerate(PROMPTS)
    ]
    plain, _ = answered(model, works, None)
    texts = {item.request_id: plain.tokens(item.request_id) for item in works}
    fitting = list(b'{"kind": "alpha", "sizes": [10, 12]}')
    guesses: list[Guess] = [
        foretold(texts, 0.4),
        lambda seq, count: fitting[len(seq.tokens) - seq.context :][:count],
        lambda seq, count: [256, 7, 300 - 1, 65][:count],
    ]
    rights = []
    for guess in guesses:
        heard, right = answered(model, works, guess)
        rights.append(right)
        for item in works:
            name = item.request_id
            assert heard.tokens(name) == texts[name] and heard.text(name) == plain.text(name)
            assert heard.last(name).finish == plain.last(name).finish and heard.usage(name) == plain.usage(name)
    assert rights[0] > 0 and rights[1] > 0
