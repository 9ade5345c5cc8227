"""Constrained answers from the native engine: masks, ends, resumption, dead ends, and what happens before the first step.
Numbers in brackets are those of known faults of other engines that a test stands for."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
from llguidance import LLParserLimits

from engine.native_kit import GRAMMARS, ByteVocabulary, Heard, drain, make_core, random_model, run_all, work
from engine.spec_kit import ScriptedDrafter, eager, foretold
from rungway.engine import grammar
from rungway.engine.constraint import DEAD_END
from rungway.engine.grammar import Grammars
from rungway.engine.protocol import Constraint, Sampling, TokenLogprob, Work
from rungway.engine.sampler import Row, sample

END = 256
PROMPT = [10, 20, 30, 40, 50]
POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 99}, "on": {"type": "boolean"}},
    "required": ["x", "on"],
    "additionalProperties": False,
}


def schema(shape: Any) -> Constraint:
    return Constraint("json_schema", json.dumps(shape))


def ask(name: str, constraint: Constraint | None, **more: Any) -> Work:
    values = {"max_tokens": 200, "temperature": 1.0, "seed": 3, "ignore_eos": False, "constraint": constraint}
    return work(name, PROMPT, **{**values, **more})


@pytest.fixture(scope="module")
def model() -> Any:
    return random_model("llama")


# --- the sampler


def row(mask: np.ndarray | None, **sampling: Any) -> Row:
    values = {"max_tokens": 9, "logprobs": 3, **sampling}
    return Row(Sampling(**values), [1, 2], 2, 5, 0, 0, mask)


def only(*tokens: int) -> np.ndarray:
    mask = np.zeros(2, dtype=np.uint32)
    for token in tokens:
        mask[token // 32] |= np.uint32(1 << token % 32)
    return mask


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.0},
        {},
        {"top_k": 2},
        {"top_p": 0.3},
        {"min_p": 0.5},
        {"logit_bias": {7: 100.0}},
        {"temperature": 1e-4},
    ],
    ids=str,
)
def test_only_tokens_of_the_mask_are_sampled(sampling: dict[str, Any]) -> None:
    """The vocabulary is padded beyond the mask; neighbours are not touched; logprobs stay finite [33]."""
    logits = torch.randn(3, 70, generator=torch.Generator().manual_seed(1))
    logits[:, 69] = 50.0
    plain = sample(logits, [row(None, **sampling)] * 3)
    masked = sample(logits, [row(only(3, 33), **sampling), row(None, **sampling), row(only(0), **sampling)])
    assert masked[0].token in (3, 33) and masked[2].token == 0
    assert masked[1] == plain[1]
    for got in masked:
        assert json.loads(json.dumps(got.logprob, allow_nan=False)) <= 0
        assert all(np.isfinite(value) for _, value in got.top)
    assert [token for token, _ in masked[0].top] == [token for token, _ in plain[0].top], (
        "logprobs are of the raw logits"
    )


def test_a_mask_that_allows_nothing_gives_no_token() -> None:
    for sampling in ({"temperature": 0.0}, {}, {"top_p": 0.3}, {"top_k": 1}):
        dead, alive = sample(torch.zeros(2, 70), [row(only(), **sampling), row(only(5), **sampling)])
        assert dead.token is None and alive.token == 5


# --- the engine, with a model whose logits mean nothing

SCHEMAS: list[dict[str, Any]] = [
    {"type": "boolean"},
    {"type": "null"},
    {"type": "integer", "minimum": -5, "maximum": 5000},
    {"type": "number", "minimum": 0, "maximum": 1, "multipleOf": 0.25},
    {"type": "string", "maxLength": 8},
    {"type": "string", "minLength": 3, "maxLength": 5, "pattern": "^[a-c]+$"},
    {"type": "string", "format": "date"},
    {"type": "string", "format": "uuid"},
    {"enum": ["red", 7, None, {"a": [1]}]},
    {"const": {"deep": ["x", {"y": 1.5}]}},
    {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4},
    {"type": "array", "prefixItems": [{"type": "null"}, {"enum": ["a", "b"]}], "items": False, "minItems": 2},
    POINT,
    {"type": "object", "properties": {"a": {"type": "boolean"}, "b": POINT}, "additionalProperties": False},
    {"type": "object", "additionalProperties": {"type": "null"}, "maxProperties": 0},
    {
        "type": "object",
        "patternProperties": {"^k[a-c]$": {"type": "boolean"}},
        "additionalProperties": False,
        "required": ["ka"],
        "maxProperties": 2,
    },
    {"anyOf": [{"type": "boolean"}, {"type": "array", "items": {"type": "null"}, "maxItems": 2}]},
    {"oneOf": [{"type": "boolean"}, {"type": "null"}]},
    {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 5}]},
    {
        "$defs": {"leaf": {"type": "object", "properties": {"v": {"enum": [1, 2]}}, "required": ["v"]}},
        "type": "array",
        "items": {"allOf": [{"$ref": "#/$defs/leaf"}], "additionalProperties": False},
        "maxItems": 2,
    },
]


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_random_logits_give_valid_json(model: Any, temperature: float) -> None:
    """20 schemas in one batch with unconstrained neighbours, several samples of each."""
    core, _ = make_core(model, seqs=16, blocks=900)
    asks = [ask(f"r{at}", schema(one), temperature=temperature, sequences=2) for at, one in enumerate(SCHEMAS)]
    free = [ask(f"free{at}", None, max_tokens=20, temperature=temperature) for at in range(3)]
    heard = run_all(core, asks + free)
    for at, one in enumerate(SCHEMAS):
        for index in range(2):
            assert heard.last(f"r{at}", index).finish == "stop", one
            jsonschema.validate(json.loads(heard.text(f"r{at}", index)), one)
    alone = run_all(make_core(model)[0], free)
    assert [heard.tokens(f"free{at}") for at in range(3)] == [alone.tokens(f"free{at}") for at in range(3)]


def test_a_complete_answer_ends_without_an_end_token(model: Any) -> None:
    heard = run_all(make_core(model)[0], [ask("a", Constraint("choice", '["ab"]'))])
    assert heard.tokens("a") == [ord("a"), ord("b")] and heard.last("a").finish == "stop"
    assert heard.usage("a").output_tokens == 2


def test_an_open_end_waits_for_the_end_token(model: Any) -> None:
    heard = run_all(make_core(model)[0], [ask("a", Constraint("regex", "a+"), logit_bias={END: 20.0})])
    assert heard.tokens("a") == [ord("a"), END] and heard.text("a") == "a" and heard.last("a").finish == "stop"


def test_length_stop_strings_and_logprobs_hold_under_a_constraint(model: Any) -> None:
    """[33] Strict JSON of every logprob."""
    long = Constraint("regex", "(abc){50}")
    heard = run_all(
        make_core(model)[0],
        [ask("cut", long, max_tokens=7), ask("stop", long, stop=("ca",)), ask("prob", long, max_tokens=4, logprobs=5)],
    )
    assert (heard.text("cut"), heard.last("cut").finish) == ("abcabca", "length")
    assert (heard.text("stop"), heard.last("stop").finish) == ("ab", "stop")
    told = [one for delta in heard.deltas["prob", 0] for one in delta.logprobs or []]
    assert len(told) == 4 and all(isinstance(one, TokenLogprob) for one in told)
    for one in told:
        json.dumps([one.logprob, *(value for _, _, value in one.top)], allow_nan=False)


def test_resumed_tokens_advance_the_guide(model: Any) -> None:
    whole = run_all(make_core(model)[0], [ask("a", schema(SCHEMAS[13]))]).tokens("a")
    for cut in range(1, len(whole)):
        heard = run_all(make_core(model)[0], [ask("a", schema(SCHEMAS[13]), resume=[whole[:cut]])])
        assert whole[:cut] + heard.tokens("a") == whole


def test_resumed_tokens_that_do_not_fit_are_an_error(model: Any) -> None:
    heard = run_all(make_core(model)[0], [ask("a", schema(POINT), resume=[[ord("x")]]), ask("b", schema(POINT))])
    assert (heard.last("a").finish, heard.last("a").error) == ("error", DEAD_END)
    jsonschema.validate(json.loads(heard.text("b")), POINT)


def test_preemption_does_not_change_a_constrained_answer(model: Any) -> None:
    asks = [ask(f"r{at}", schema(SCHEMAS[7]), seed=at, priority=at % 2) for at in range(6)]
    roomy = run_all(make_core(model)[0], asks)
    core, scheduler = make_core(model, blocks=30)
    preempted = 0
    heard = Heard()
    for item in asks:
        heard.take(core.add(item, GRAMMARS.compile(schema(SCHEMAS[7]))))
    seen = [seq for group in scheduler.groups.values() for seq in group.members]
    drain(core, heard)
    preempted = sum(seq.preemptions for seq in seen)
    assert preempted > 0
    assert [heard.tokens(f"r{at}") for at in range(6)] == [roomy.tokens(f"r{at}") for at in range(6)]


def test_drafts_do_not_change_a_constrained_answer(model: Any) -> None:
    """Right ones are taken under the mask of their place, wrong ones are rolled back out of the guide."""
    asks = [ask(f"r{at}", schema(SCHEMAS[at]), seed=at) for at in (2, 6, 7, 12)]
    plain = run_all(make_core(model)[0], asks)
    told = {item.request_id: plain.tokens(item.request_id) for item in asks}
    for wrong in (0.0, 0.3, 1.0):
        speculation = eager(ScriptedDrafter(foretold(told, wrong)))
        drafted = run_all(make_core(model, speculation=speculation)[0], asks)
        assert {item.request_id: drafted.tokens(item.request_id) for item in asks} == told
        assert speculation.drafted > 0 and (speculation.accepted > 0) == (wrong < 1.0)


class NoBraces(ByteVocabulary):
    """A vocabulary that cannot write `}`."""

    def token_bytes(self, token: int) -> bytes:
        return b"" if token == ord("}") else super().token_bytes(token)

    def token_name(self, token: int) -> bytes:
        return b"" if token == ord("}") else super().token_name(token)


def test_a_dead_end_is_a_clean_error(model: Any) -> None:
    """[36] The grammar needs what the vocabulary cannot write: an error that says so, blocks free, neighbours unharmed."""
    grammars = Grammars(NoBraces())
    core, scheduler = make_core(model)
    heard = Heard()
    constraint = Constraint("grammar", 'start: "a{" "}"')
    heard.take(core.add(ask("dead", constraint), grammars.compile(constraint)))
    heard.take(core.add(ask("good", schema(POINT)), GRAMMARS.compile(schema(POINT))))
    drain(core, heard)
    assert (heard.last("dead").finish, heard.last("dead").error) == ("error", DEAD_END)
    jsonschema.validate(json.loads(heard.text("good")), POINT)
    assert scheduler.pool.free == scheduler.pool.total


def test_a_grammar_that_outgrows_its_limits_is_a_clean_error(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    core, heard = make_core(model)[0], Heard()
    constraint = schema({"type": "array", "items": {"type": "string"}, "minItems": 1})
    with monkeypatch.context() as patched:
        patched.setattr(grammar, "LIMITS", LLParserLimits(step_lexer_fuel=200, verbose_errors=False))
        heard.take(core.add(ask("big", constraint), Grammars(ByteVocabulary()).compile(constraint)))
    heard.take(core.add(ask("b", schema(POINT)), GRAMMARS.compile(schema(POINT))))
    drain(core, heard)
    assert (heard.last("big").finish, heard.last("big").error) == ("error", DEAD_END) and heard.tokens("big")
    jsonschema.validate(json.loads(heard.text("b")), POINT)


def test_a_constraint_that_was_not_compiled_is_never_dropped(model: Any) -> None:
    core, _ = make_core(model)
    (end,) = core.add(ask("a", schema(POINT)))
    assert end.finish == "error" and "not compiled" in (end.error or "")


def test_ignoring_the_end_cannot_go_with_a_constraint(model: Any) -> None:
    heard = run_all(make_core(model)[0], [ask("a", schema(POINT), ignore_eos=True)])
    assert heard.last("a").finish == "error" and "ignore_eos" in (heard.last("a").error or "")
