"""What a request may say about its tokens beyond temperature and filters: least length, ends, allowed tokens, bad words."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.native_kit import VOCAB, drain, make_core, random_model, random_prompts, run_all, work
from engine.spec_kit import ScriptedDrafter, eager, foretold
from rungway.engine.constraint import DEAD_END
from rungway.engine.processing import processed
from rungway.engine.protocol import Constraint, Sampling
from rungway.engine.row import Row
from rungway.engine.sampler import sample

EOS = 256
A, B, C = b"abc"
PROMPT = [3, 1, 4, 1, 5]


@pytest.fixture(scope="module")
def model() -> Any:
    return random_model("qwen2")


@pytest.mark.parametrize("at", [1, 2, 5, 6, 7])
@pytest.mark.parametrize("how", ["eos", "stop token", "stop string"])
def test_no_end_of_any_kind_before_min_tokens(model: Any, at: int, how: str) -> None:
    """vllm#3672 and the order of end and stop checks: an end that is forced from token `at` on."""
    forced = EOS if how == "eos" else A
    ask: dict[str, Any] = {"logit_bias": {forced: 999.0}, "min_tokens": 5, "ignore_eos": False, "max_tokens": 12}
    if how == "stop token":
        ask["stop_token_ids"] = (A,)
    if how == "stop string":
        ask["stop"] = ("a",)
    heard = run_all(make_core(model)[0], [work("r", PROMPT, resume=[[B] * (at - 1)], **ask)])
    assert at - 1 + len(heard.tokens("r")) == max(at, 6) and heard.last("r").finish == "stop"
    assert heard.tokens("r")[-1] == forced and heard.tokens("r")[:-1].count(EOS) == 0
    if how == "stop string":
        assert heard.text("r") == "a" * max(0, 6 - at)


def test_min_tokens_ends_at_max_tokens_where_both_are_the_same(model: Any) -> None:
    ask: dict[str, Any] = {"logit_bias": {EOS: 999.0}, "ignore_eos": False, "min_tokens": 4, "max_tokens": 4}
    heard = run_all(make_core(model)[0], [work("r", PROMPT, **ask)])
    assert len(heard.tokens("r")) == 4 and heard.last("r").finish == "length" and EOS not in heard.tokens("r")


@pytest.mark.parametrize(("keep", "text"), [(False, "bb"), (True, "bba")])
def test_a_stop_token_ends_and_is_cut_like_a_stop_string(model: Any, keep: bool, text: str) -> None:
    for stop in ({"stop_token_ids": (A,)}, {"stop": ("a",)}):
        core, _ = make_core(model)
        ask: dict[str, Any] = {"logit_bias": {A: 999.0}, "include_stop_str_in_output": keep, **stop}
        core.add(work("r", PROMPT, resume=[[B, B]], max_tokens=9, **ask))
        (delta,) = core.step()
        assert delta.finish == "stop" and delta.token_ids == [A] and "bb" + delta.text == text
        heard = run_all(make_core(model)[0], [work("r", PROMPT, resume=[[B, B, A]], max_tokens=9, **ask)])
        assert heard.last("r").finish == "stop" and heard.tokens("r") == [], "the end was said by an earlier attempt"


def test_special_tokens_are_named_where_that_is_asked_for(model: Any) -> None:
    ask: dict[str, Any] = {"logit_bias": {EOS: 999.0}, "max_tokens": 2}
    heard = run_all(
        make_core(model)[0], [work("r", PROMPT, **ask), work("s", PROMPT, skip_special_tokens=False, **ask)]
    )
    assert (heard.text("r"), heard.text("s")) == ("", "<end><end>")


def test_only_allowed_tokens_come_and_logprobs_stay_raw_and_finite(model: Any) -> None:
    """vllm#10234: a mask leaves no infinity behind in the JSON."""
    allowed = (7, 9, 200)
    ask: dict[str, Any] = {"temperature": 1.0, "seed": 3, "logprobs": 5, "allowed_token_ids": allowed, "max_tokens": 40}
    heard = run_all(make_core(model)[0], [work("r", PROMPT, **ask)])
    tokens = heard.tokens("r")
    assert len(tokens) == 40 and set(tokens) == set(allowed)
    with torch.no_grad():
        raw = torch.log_softmax(model(torch.tensor([[*PROMPT, *tokens]])).logits[0, len(PROMPT) - 1 : -1].float(), -1)
    entries = [entry for delta in heard.deltas["r", 0] for entry in delta.logprobs or []]
    want = [float(raw[at, token]) for at, token in enumerate(tokens)]
    assert [entry.logprob for entry in entries] == pytest.approx(want, abs=1e-4)
    json.dumps([[entry.logprob, [value for *_, value in entry.top]] for entry in entries], allow_nan=False)


def test_bad_words_never_come_whole(model: Any) -> None:
    ask: dict[str, Any] = {"temperature": 2.0, "allowed_token_ids": (A, B, C), "max_tokens": 200}
    words = ((A, B), (C, C, A), (B, B))
    core, _ = make_core(model)
    heard = run_all(core, [work("free", PROMPT, seed=1, **ask), work("r", PROMPT, seed=1, bad_words=words, **ask)])
    for word in words:
        assert bytes(word) in bytes(heard.tokens("free")) and bytes(word) not in bytes(heard.tokens("r"))
    assert {A, B, C} == set(heard.tokens("r"))


YES = Constraint("choice", '["yes"]')


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "demands",
    [
        {"allowed_token_ids": (A,), "bad_words": ((A,),)},
        {"allowed_token_ids": (EOS,), "ignore_eos": False, "min_tokens": 2},
        {"allowed_token_ids": (A,), "constraint": YES, "ignore_eos": False},
        {"bad_words": ((ord("e"),),), "constraint": YES, "ignore_eos": False},
    ],
    ids=lambda demands: "+".join(demands),
)
def test_demands_that_leave_no_token_are_the_requests_own_dead_end(
    model: Any, demands: dict[str, Any], temperature: float
) -> None:
    """Not a failure of the engine, for which it would be tried elsewhere and count against the replica. Neighbours go on."""
    core, scheduler = make_core(model)
    impossible = work("r", PROMPT, temperature=temperature, seed=1, **demands)
    heard = run_all(core, [impossible, work("other", PROMPT)])
    assert (heard.last("r").finish, heard.last("r").error) == ("error", DEAD_END)
    assert scheduler.pool.free == scheduler.pool.total
    assert heard.tokens("other") == run_all(make_core(model)[0], [work("other", PROMPT)]).tokens("other")


@pytest.mark.parametrize("token", [-1, VOCAB, VOCAB + 1, 2**31])
@pytest.mark.parametrize("field", ["logit_bias", "stop_token_ids", "allowed_token_ids", "bad_words"])
def test_ids_outside_of_the_vocabulary_harm_nobody_else(model: Any, field: str, token: int) -> None:
    """vllm#16529, #28307, #21731."""
    value = {"logit_bias": {token: 1.0}, "bad_words": ((1, token),)}.get(field, (token,))
    core, _ = make_core(model)
    core.add(work("other", PROMPT))
    core.step()
    (refused,) = core.add(work("r", PROMPT, **{field: value}))
    assert refused.finish == "error" and f"{field} names token {token}" in (refused.error or "")
    assert len(drain(core).tokens("other")) == 15


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"min_tokens": -1}, "min_tokens"),
        ({"min_tokens": 17}, "min_tokens"),
        ({"allowed_token_ids": ()}, "allowed_token_ids"),
        ({"bad_words": ((),)}, "bad_words"),
        ({"bad_words": ((1,),) * 257}, "bad_words"),
        ({"stop_token_ids": (1,) * 65}, "stop_token_ids"),
    ],
)
def test_what_makes_no_sense_is_refused(model: Any, change: dict[str, Any], why: str) -> None:
    (refused,) = make_core(model)[0].add(work("r", PROMPT, **change))
    assert refused.finish == "error" and why in (refused.error or "")


FIELDS: list[dict[str, Any]] = [
    {"min_tokens": 9, "ignore_eos": False, "logit_bias": {EOS: 6.0}},
    {"min_tokens": 6, "stop_token_ids": tuple(range(0, VOCAB, 7)), "temperature": 1.0},
    {"bad_words": tuple((at, at) for at in range(250)), "repetition_penalty": 0.7, "temperature": 0.7},
    {"allowed_token_ids": (A, B, C), "bad_words": ((A, B), (B, C, A)), "temperature": 1.5},
    {
        "allowed_token_ids": (A, B, C),
        "frequency_penalty": 0.4,
        "presence_penalty": 0.2,
        "temperature": 0.9,
        "top_p": 0.9,
    },
]


@pytest.mark.parametrize("fields", FIELDS)
@pytest.mark.parametrize("wrong", [0.0, 0.4])
def test_drafts_are_verified_under_the_same_rules(model: Any, fields: dict[str, Any], wrong: float) -> None:
    """Least length, bad words and penalties count the drafts before a place."""
    works = [work(f"r{at}", prompt, seed=at, max_tokens=24, **fields) for at, prompt in enumerate(random_prompts(3))]
    plain = run_all(make_core(model)[0], works)
    answers = {item.request_id: plain.tokens(item.request_id) for item in works}
    speculation = eager(ScriptedDrafter(foretold(answers, wrong)))
    drafted = run_all(make_core(model, speculation=speculation)[0], works)
    assert {name: drafted.tokens(name) for name in answers} == answers
    assert [drafted.last(name).finish for name in answers] == [plain.last(name).finish for name in answers]
    assert speculation.accepted > 0


ids = st.integers(0, 11)
asks = st.builds(
    Sampling,
    max_tokens=st.just(9),
    allowed_token_ids=st.none() | st.lists(ids, min_size=1, max_size=9).map(tuple),
    bad_words=st.lists(st.lists(ids, min_size=1, max_size=3).map(tuple), max_size=4).map(tuple),
    min_tokens=st.integers(0, 6),
    stop_token_ids=st.lists(ids, max_size=3).map(tuple),
    logit_bias=st.dictionaries(ids, st.floats(-5, 5), max_size=3),
    repetition_penalty=st.sampled_from([1.0, 1.5, 0.5]),
    frequency_penalty=st.sampled_from([0.0, 0.7]),
    presence_penalty=st.sampled_from([0.0, -0.3]),
)


def one_by_one(raw: list[float], ask: Sampling, prompt: list[int], answer: list[int], eos: int) -> list[float]:
    """vLLM's order, token by token: allowed, bad words, least length, bias, penalties."""
    result = []
    for token, value in enumerate(raw):
        if ask.allowed_token_ids is not None and token not in ask.allowed_token_ids:
            value = -math.inf
        for word in ask.bad_words:
            if [*answer, token][-len(word) :] == list(word):
                value = -math.inf
        if len(answer) < ask.min_tokens and (token == eos or token in ask.stop_token_ids):
            value = -math.inf
        value += ask.logit_bias.get(token, 0.0)
        if token in prompt or token in answer:
            value = value / ask.repetition_penalty if value > 0 else value * ask.repetition_penalty
        value -= ask.frequency_penalty * answer.count(token)
        value -= ask.presence_penalty if token in answer else 0.0
        result.append(value)
    return result


@given(asks, st.lists(ids, min_size=1, max_size=4), st.lists(ids, max_size=8), st.integers(0, 999))
@settings(max_examples=200, deadline=None)
def test_rules_apply_in_order(ask: Sampling, prompt: list[int], answer: list[int], seed: int) -> None:
    raw = torch.randn(2, 12, generator=torch.Generator().manual_seed(seed)) * 3
    row = Row(ask, [*prompt, *answer], len(prompt), 1, 0, len(answer), eos=frozenset({4}))
    kept = raw.clone()
    got = processed(raw, [Row(Sampling(max_tokens=1), [1], 1, 1, 0, 0), row])
    want = one_by_one(raw[1].tolist(), ask, prompt, answer, 4)
    np.testing.assert_allclose(got[1].double().numpy(), want, rtol=1e-5, atol=1e-5)
    assert torch.equal(got[0], raw[0]) and torch.equal(raw, kept)


def test_allowed_tokens_are_drawn_as_often_as_their_own_distribution_says() -> None:
    """Chi-squared, with every filter behind the mask."""
    logits = torch.randn(50, generator=torch.Generator().manual_seed(1)) * 1.5
    allowed = tuple(range(0, 50, 2))
    ask = Sampling(max_tokens=1, temperature=1.5, allowed_token_ids=allowed, top_k=20, top_p=0.95, min_p=0.01)
    p = torch.softmax(logits[list(allowed)].double() / 1.5, -1).numpy()
    order = np.argsort(-p)
    kept = np.zeros(50)
    ranked = p[order] * (p[order] >= 0.01 * p.max())
    ranked[20:] = 0.0
    ranked[np.cumsum(ranked) - ranked >= 0.95 * ranked.sum()] = 0.0
    kept[np.array(allowed)[order]] = ranked / ranked.sum()
    draws = 4000
    got = sample(logits.expand(draws, 50), [Row(ask, [1], 1, 5, at, 0) for at in range(draws)])
    counts = np.bincount([one.token or 0 for one in got], minlength=50)
    assert not counts[kept == 0].any()
    want = kept[kept > 0] * draws
    freedom = len(want) - 1
    assert ((counts[kept > 0] - want) ** 2 / want).sum() < freedom + 5 * (2 * freedom) ** 0.5


def test_samples_of_one_seed_are_distinct_and_their_prompt_and_its_cached_part_count_once(model: Any) -> None:
    """vllm#11898, with the bill of `best_of`: children share the prompt, and every one's tokens are output."""
    (prompt,) = random_prompts(1, longest=40, seed=8)
    prompt = (prompt * 40)[:30]
    core, _ = make_core(model)
    run_all(core, [work("first", prompt, max_tokens=1)])
    ask: dict[str, Any] = {"sequences": 4, "seed": 1, "temperature": 1.0, "max_tokens": 10}
    heard = run_all(core, [work("r", prompt, **ask)])
    answers = [tuple(heard.tokens("r", index)) for index in range(4)]
    assert len(set(answers)) == 4
    usage = heard.usage("r")
    assert (usage.prompt_tokens, usage.cached_tokens, usage.output_tokens) == (30, 28, 40)
    again = run_all(make_core(model)[0], [work("r", prompt, **ask)])
    assert [tuple(again.tokens("r", index)) for index in range(4)] == answers
