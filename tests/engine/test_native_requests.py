"""What one request asks for: seeds, logprobs, stops, ends and errors, each independent of its neighbours."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from engine.native_kit import Heard, drain, make_core, random_model, random_prompts, run_all, work


@pytest.fixture(scope="module")
def model() -> Any:
    return random_model("qwen2")


PROMPTS = random_prompts(12, longest=30, seed=5)


def test_seeded_answers_do_not_depend_on_the_batch(model: Any) -> None:
    asks: list[dict[str, Any]] = [
        {"temperature": 1.0},
        {"temperature": 0.8, "top_p": 0.9},
        {"temperature": 1.3, "top_k": 20},
        {"temperature": 1.0, "min_p": 0.02},
        {"temperature": 0.9, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
    ]
    works = [
        work(str(at), prompt, seed=at, sequences=2, max_tokens=15, **asks[at % 5]) for at, prompt in enumerate(PROMPTS)
    ]
    alone = [run_all(make_core(model)[0], [item]) for item in works]
    core, scheduler = make_core(model, batched=12, blocks=30, context=90)
    together = run_all(core, works)
    assert scheduler.preemptions > 0
    for at, heard in enumerate(alone):
        for index in (0, 1):
            assert heard.tokens(str(at), index) == together.tokens(str(at), index)
        assert heard.tokens(str(at), 0) != heard.tokens(str(at), 1), "samples of one prompt must differ"


def test_a_seeded_answer_resumes_as_it_would_have_gone_on(model: Any) -> None:
    whole = run_all(make_core(model)[0], [work("r", PROMPTS[0], seed=4, temperature=1.0)]).tokens("r")
    rest = run_all(make_core(model)[0], [work("r", PROMPTS[0], seed=4, temperature=1.0, resume=[whole[:7]])]).tokens(
        "r"
    )
    assert rest == whole[7:]


def test_unseeded_answers_differ(model: Any) -> None:
    core, _ = make_core(model)
    heard = run_all(core, [work(str(at), PROMPTS[0], temperature=1.0) for at in range(4)])
    assert len({tuple(heard.tokens(str(at))) for at in range(4)}) > 1


def test_logprobs_are_those_of_a_full_forward_pass(model: Any) -> None:
    core, _ = make_core(model, batched=8)
    heard = run_all(
        core, [work(str(at), prompt, logprobs=5, temperature=0.7, seed=at) for at, prompt in enumerate(PROMPTS)]
    )
    for at, prompt in enumerate(PROMPTS):
        tokens = heard.tokens(str(at))
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1].float()
        expected = torch.log_softmax(logits, -1)
        entries = [entry for delta in heard.deltas[str(at), 0] for entry in delta.logprobs or []]
        assert len(entries) == len(tokens)
        for position, (token, entry) in enumerate(zip(tokens, entries, strict=True)):
            assert entry.logprob == pytest.approx(float(expected[position, token]), abs=1e-4)
            best = torch.topk(expected[position], 5).values.tolist()
            assert [value for _, _, value in entry.top] == pytest.approx(best, abs=1e-4)
            assert all(math.isfinite(value) for _, _, value in entry.top)
        assert heard.last(str(at)).cum_logprob == pytest.approx(sum(entry.logprob for entry in entries), abs=1e-3)


@pytest.mark.parametrize(
    ("what", "changes"),
    [
        ("outside the vocabulary", {"logit_bias": {-1: 1.0}}),
        ("outside the vocabulary", {"logit_bias": {300: 1.0}}),
        ("outside the vocabulary", {"logit_bias": {2**31: 1.0}}),
        ("finite", {"temperature": float("nan")}),
        ("max_tokens", {"max_tokens": -1}),
        ("logprobs", {"logprobs": 1000}),
        ("resume", {"resume": [[1], [2]]}),
        ("weight", {"weight": 0.0}),
    ],
)
def test_a_bad_request_ends_alone(model: Any, what: str, changes: dict[str, Any]) -> None:
    core, _ = make_core(model)
    expected = run_all(core, [work("good", PROMPTS[1])]).tokens("good")
    heard = run_all(core, [work("good", PROMPTS[1]), work("bad", PROMPTS[2], **changes)])
    assert heard.last("bad").finish == "error" and what in (heard.last("bad").error or "")
    assert heard.tokens("bad") == [] and heard.last("bad").usage is not None
    assert heard.tokens("good") == expected and heard.last("good").finish == "length"


@pytest.mark.parametrize("prompt", [[], [300], [-1], [5] * 256])
def test_an_impossible_prompt_is_an_error(model: Any, prompt: list[int]) -> None:
    assert run_all(make_core(model)[0], [work("bad", prompt)]).last("bad").finish == "error"


def test_a_live_id_is_refused_and_free_again_after_the_end(model: Any) -> None:
    core, _ = make_core(model)
    assert core.add(work("same", PROMPTS[0])) == []
    assert [delta.finish for delta in core.add(work("same", PROMPTS[1]))] == ["error"]
    assert [delta.finish for delta in core.cancel("same")] == ["cancelled"]
    assert core.cancel("same") == [] and core.check() == []
    assert run_all(core, [work("same", PROMPTS[0])]).last("same").finish == "length"


def test_the_context_ends_an_answer(model: Any) -> None:
    core, _ = make_core(model, context=40)
    heard = run_all(core, [work("r", [1] * 30, max_tokens=1000), work("last", [1] * 39, max_tokens=1000)])
    assert len(heard.tokens("r")) == 10 and heard.last("r").finish == "length"
    assert len(heard.tokens("last")) == 1


def test_logit_bias_and_the_end_token(model: Any) -> None:
    core, _ = make_core(model)
    ask: dict[str, Any] = {"logit_bias": {256: 1000.0}, "max_tokens": 5}
    heard = run_all(
        core,
        [
            work("stops", PROMPTS[0], ignore_eos=False, **ask),
            work("goes-on", PROMPTS[0], ignore_eos=True, **ask),
        ],
    )
    assert heard.tokens("stops") == [256] and heard.last("stops").finish == "stop" and heard.text("stops") == ""
    assert heard.tokens("goes-on") == [256] * 5 and heard.last("goes-on").finish == "length"


def test_stop_strings_cut_the_text_at_every_place(model: Any) -> None:
    core, _ = make_core(model)
    plain = run_all(core, [work("r", PROMPTS[3], max_tokens=24)])
    text = plain.text("r")
    for start in range(len(text) - 3):
        stop = text[start : start + 3]
        heard = run_all(core, [work("r", PROMPTS[3], max_tokens=24, stop=(stop,))])
        assert heard.text("r") == text[: text.index(stop)] and heard.last("r").finish == "stop"
        assert plain.tokens("r")[: len(heard.tokens("r"))] == heard.tokens("r")


@pytest.mark.parametrize("cut", range(1, 12))
def test_a_character_cut_by_max_tokens_is_left_out(model: Any, cut: int) -> None:
    """The model is made to write emoji byte by byte; each length gives the whole characters so far."""
    core, _ = make_core(model)
    written = "é🙂x👍".encode()
    heard = Heard()
    heard.take(
        core.add(
            work(
                "r", PROMPTS[0], max_tokens=cut, resume=[list(written[: cut - 1])], logit_bias={written[cut - 1]: 999.0}
            )
        )
    )
    drain(core, heard)
    before = written[: cut - 1].decode(errors="ignore")
    assert before + heard.text("r") == written[:cut].decode(errors="ignore")


@pytest.mark.parametrize(
    ("resumed", "ask", "finish"),
    [
        ([1] * 16, {}, "length"),
        ([1, 256], {"ignore_eos": False}, "stop"),
        (list(b"abSTOP"), {"stop": ("STOP",)}, "stop"),
    ],
)
def test_nothing_is_sampled_for_an_answer_that_was_complete(
    model: Any, resumed: list[int], ask: dict[str, Any], finish: str
) -> None:
    core, _ = make_core(model)
    (delta,) = core.add(work("r", PROMPTS[0], resume=[resumed], **ask))
    assert delta.finish == finish and delta.token_ids == [] and delta.usage is not None
    assert not core.busy and core.check() == []
