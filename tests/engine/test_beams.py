"""Beam search: the results of transformers', in whatever batch and pool, and the bill for every beam."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine.native_kit import Heard, drain, generate, make_core, random_model, random_prompts, run_all, work
from engine.spec_kit import ScriptedDrafter, eager
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
        {"logprobs": 1},
        {"stop": ("a",)},
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
