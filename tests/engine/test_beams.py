"""Beam search: the results of transformers', in whatever batch and pool, and the bill for every beam."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import StoppingCriteria, StoppingCriteriaList

from engine.native_kit import (
    ByteVocabulary,
    Heard,
    drain,
    generate,
    make_core,
    random_model,
    random_prompts,
    run_all,
    work,
)
from engine.spec_kit import ScriptedDrafter, eager
from rungway.engine.beams import Stops
from rungway.engine.protocol import Work
from rungway.engine.sequence import Status

EOS = 256
PROMPTS = random_prompts(4, longest=40, seed=21)


@pytest.fixture(scope="module")
def model() -> Any:
    return random_model("qwen2")


def search(model: Any, prompt: list[int], beams: int, count: int, **more: Any) -> list[list[int]]:
    """What transformers finds."""
    ids = torch.tensor([prompt])
    out = model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, num_beams=beams,
        num_return_sequences=beams, early_stopping=False, pad_token_id=0, **more,
    )  # fmt: skip
    found = [row[len(prompt) :].tolist() for row in out]
    ends = set(more.get("eos_token_id") or ())
    return [row[: next((at + 1 for at, token in enumerate(row) if token in ends), count)] for row in found]


def asked(name: str, prompt: list[int], beams: int, **more: Any) -> Work:
    return work(name, prompt, sequences=beams, use_beam_search=True, **more)


def results(heard: Heard, name: str, beams: int) -> list[list[int]]:
    return [heard.tokens(name, index) for index in range(beams)]


@pytest.mark.parametrize("beams", [1, 2, 3, 4])
def test_beams_are_those_of_transformers(model: Any, beams: int) -> None:
    works = [asked(f"r{at}", prompt, beams, max_tokens=18) for at, prompt in enumerate(PROMPTS)]
    core, scheduler = make_core(model)
    heard = run_all(core, works)
    for at, prompt in enumerate(PROMPTS):
        want = generate(model, prompt, 18) if beams == 1 else None
        assert results(heard, f"r{at}", beams) == ([want] if want else search(model, prompt, beams, 18))
        assert heard.usage(f"r{at}").output_tokens == beams * 18, "every token of every beam is counted"
        assert heard.usage(f"r{at}").cached_tokens == 0
        totals = [heard.last(f"r{at}", index).cum_logprob for index in range(beams)]
        assert totals == sorted(totals, reverse=True)
    assert scheduler.pool.free == scheduler.pool.total


@pytest.mark.parametrize("penalty", [0.0, 1.0, 2.0, -1.0])
def test_ends_and_length_penalties(model: Any, penalty: float) -> None:
    """Many tokens end a beam, so that short and long results compete."""
    ends = list(range(0, 300, 9))
    works = [
        asked(f"r{at}", prompt, 3, max_tokens=14, stop_token_ids=tuple(ends), length_penalty=penalty)
        for at, prompt in enumerate(PROMPTS)
    ]
    heard = run_all(make_core(model)[0], works)
    for at, prompt in enumerate(PROMPTS):
        want = search(model, prompt, 3, 14, eos_token_id=ends, length_penalty=penalty)
        assert results(heard, f"r{at}", 3) == want
        finish = ["stop" if row[-1] in ends else "length" for row in want]
        assert [heard.last(f"r{at}", index).finish for index in range(3)] == finish
        assert sum(map(len, want)) <= heard.usage(f"r{at}").output_tokens <= 3 * 14


@pytest.mark.parametrize("logprobs", [0, 3, 40])
def test_logprobs_of_a_beam_are_those_of_its_own_text(model: Any, logprobs: int) -> None:
    """Also where a beam went over to another one's text on the way."""
    works = [asked(f"r{at}", prompt, 3, max_tokens=12, logprobs=logprobs) for at, prompt in enumerate(PROMPTS)]
    heard = run_all(make_core(model, batched=16)[0], works)
    for at, prompt in enumerate(PROMPTS):
        assert results(heard, f"r{at}", 3) == search(model, prompt, 3, 12)
        for index in range(3):
            (delta,) = heard.deltas[f"r{at}", index]
            tokens, entries = delta.token_ids, delta.logprobs or []
            with torch.no_grad():
                logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1].float()
            assert len(entries) == len(tokens)
            for row, token, entry in zip(torch.log_softmax(logits, -1), tokens, entries, strict=True):
                assert entry.logprob == pytest.approx(float(row[token]), abs=1e-4)
                best = torch.topk(row, logprobs).values.tolist() if logprobs else []
                assert [value for _, _, value in entry.top] == pytest.approx(best, abs=1e-4)
            assert delta.cum_logprob == pytest.approx(sum(entry.logprob or 0.0 for entry in entries), abs=1e-3)


class Completes(StoppingCriteria):
    """What transformers is told of stop strings: whether the last token of a row completes one."""

    def __init__(self, prompt: int, stops: list[bytes]) -> None:
        self._prompt, self._stops = prompt, stops

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.Tensor:
        texts = [[ByteVocabulary().token_bytes(token) for token in row[self._prompt :].tolist()] for row in input_ids]
        return torch.tensor([any(stop in b"".join(text) for stop in self._stops) for text in texts])


@pytest.mark.parametrize("penalty", [1.0, -0.5])
@pytest.mark.parametrize("keep", [False, True])
def test_a_beam_ends_where_its_text_completes_a_stop_string(model: Any, penalty: float, keep: bool) -> None:
    """Strings of one and of several tokens, one of which cuts a text in the middle of a token's bytes."""
    ended = 0
    for at, prompt in enumerate(PROMPTS):
        free = search(model, prompt, 3, 14)
        spelled = [ByteVocabulary().token_bytes(token) for token in free[0]]
        runs = [b"".join(spelled[3:5]), b"".join(spelled[6:9])[1:], *(bytes([byte]) for byte in range(65, 91, 3))]
        stops = [run.decode() for run in runs if run and run.isascii()]
        criteria = StoppingCriteriaList([Completes(len(prompt), [stop.encode() for stop in stops])])
        want = search(model, prompt, 3, 14, stopping_criteria=criteria, length_penalty=penalty)
        asks = {"stop": tuple(stops), "length_penalty": penalty, "include_stop_str_in_output": keep}
        core, scheduler = make_core(model, batched=16)
        heard = run_all(core, [asked("r", prompt, 3, max_tokens=14, **asks)])
        for index, row in enumerate(results(heard, "r", 3)):
            whole = b"".join(map(ByteVocabulary().token_bytes, row))
            met = [place for stop in stops if (place := whole.find(stop.encode())) >= 0]
            ended += bool(met)
            assert heard.last("r", index).finish == ("stop" if met else "length"), at
            assert row == want[index][: len(row)] and (met or row == want[index])
            text = heard.text("r", index)
            assert any(stop in text for stop in stops) == (bool(met) and keep)
            assert whole.decode("utf-8", "replace").startswith(text)
        assert scheduler.pool.free == scheduler.pool.total
    assert ended, "something ends by a stop string"


def test_a_stop_string_is_seen_wherever_it_is_cut_into_tokens() -> None:
    pieces = {1: b"the e", 2: b"nd", 3: b"n", 4: b"d of", 5: b"end", 6: b""}
    stops = Stops(("end", "oß"), lambda token: pieces.get(token, bytes([token % 256])))
    assert stops.met([1], 2) and stops.met([], 5) and stops.met([1, 3], 4) and stops.met([1, 6, 3, 6], 4)
    assert not stops.met([5], 4), "one that was complete before is not completed again"
    assert not stops.met([1], 3) and not stops.met([], 2) and not Stops((), pieces.__getitem__).met([1], 2)
    assert stops.met([ord("o"), 0xC3], 0x9F) and not stops.met([ord("o")], 0xC3)


def test_neighbours_a_tiny_pool_and_no_prefix_cache_change_nothing(model: Any) -> None:
    works = [asked(f"r{at}", prompt, 3, max_tokens=12) for at, prompt in enumerate(PROMPTS)]
    others = [work(f"o{at}", prompt, max_tokens=20) for at, prompt in enumerate(PROMPTS)]
    want = results(run_all(make_core(model)[0], works[:1]), "r0", 3)
    for ways in ({"blocks": 24, "context": 80, "batched": 12}, {"prefix_cache": False}):
        core, scheduler = make_core(model, **ways)
        heard = run_all(core, [*works, *others])
        assert results(heard, "r0", 3) == want and scheduler.pool.free == scheduler.pool.total
        assert heard.tokens("o0") == generate(model, PROMPTS[0], 20)


def test_drafts_leave_beams_alone(model: Any) -> None:
    speculation = eager(ScriptedDrafter(lambda seq, count: [7] * count))
    works = [asked("r", PROMPTS[0], 3, max_tokens=10), work("o", PROMPTS[1], max_tokens=24)]
    heard = run_all(make_core(model, speculation=speculation)[0], works)
    assert results(heard, "r", 3) == results(run_all(make_core(model)[0], works[:1]), "r", 3)
    assert heard.tokens("o") == generate(model, PROMPTS[1], 24)


@pytest.mark.parametrize("steps", [0, 1, 2, 7])
def test_a_search_can_be_cancelled_at_any_time(model: Any, steps: int) -> None:
    core, scheduler = make_core(model, batched=8)
    heard = Heard()
    heard.take(core.add(asked("r", PROMPTS[0], 4, max_tokens=20)))
    for _ in range(steps):
        heard.take(core.step())
        assert core.check() == []
    scheduler.preempt(next(iter(scheduler.running))) if len(scheduler.running) else None
    heard.take(core.cancel("r"))
    assert [heard.last("r", index).finish for index in range(4)] == ["cancelled"] * 4
    assert core.check() == [] and not core.busy and scheduler.pool.free == scheduler.pool.total
    assert heard.usage("r").output_tokens % 4 == 0
    assert drain(core).deltas == {}


def test_a_failing_step_ends_the_whole_search(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    core, scheduler = make_core(model, batched=8)
    heard = Heard()
    heard.take(core.add(asked("r", PROMPTS[0], 4, max_tokens=20)))
    while sum(seq.status is Status.HELD for seq in scheduler.groups["r"].members) != 2:
        heard.take(core.step())

    def fail(step: object) -> None:
        raise RuntimeError("the device is gone")

    with monkeypatch.context() as patch:
        patch.setattr(core._runner, "run", fail)
        heard.take(core.step())
    assert {heard.last("r", index).finish for index in range(4)} == {"error"}
    assert core.check() == [] and not core.busy and scheduler.pool.free == scheduler.pool.total


@pytest.mark.parametrize(
    "change",
    [
        {"max_tokens": 0},
        {"logit_bias": {1: 1.0}},
        {"min_tokens": 1},
        {"allowed_token_ids": (1,)},
        {"repetition_penalty": 1.1},
        {"length_penalty": 11.0},
        {"length_penalty": float("nan")},
        {"resume": [[1]]},
        {"sequences": 17},
    ],
    ids=str,
)
def test_what_a_search_does_not_take_is_refused(model: Any, change: dict[str, Any]) -> None:
    deltas = make_core(model)[0].add(work("r", [1, 2], **{"sequences": 2, "use_beam_search": True, **change}))
    assert {delta.finish for delta in deltas} == {"error"}
