"""Drafts change how long an answer takes and nothing else."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from engine.native_kit import Heard, drain, generate, make_core, random_model, random_prompts, run_all, work
from engine.spec_kit import ScriptedDrafter, eager, foretold
from engine.test_sampler import expected
from engine.test_scheduler import rig
from rungway.engine.core import Core
from rungway.engine.ngram import NgramDrafter
from rungway.engine.protocol import Sampling, Work
from rungway.engine.runner import Step
from rungway.engine.scheduler import Slice

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


@pytest.mark.parametrize("at", range(7))
def test_a_stop_string_inside_a_run_ends_the_answer_there(at: int) -> None:
    """The scripted model counts on; each place of a run of six may complete the stop."""
    stop = bytes([100 + at, 101 + at]).decode()
    item = work("r", [*range(95), 99], max_tokens=30, stop=(stop,))
    plain, _, _ = rig(blocks=100, context=400)
    fast, scheduler, _ = rig(blocks=100, context=400, speculation=eager(ScriptedDrafter(right), 5))
    one, other = run_all(plain, [item]), run_all(fast, [item])
    assert other.tokens("r") == one.tokens("r") == list(range(100, 102 + at))
    assert other.text("r") == one.text("r") and other.last("r").finish == "stop"
    assert other.usage("r") == one.usage("r") and other.usage("r").output_tokens == 2 + at
    assert scheduler.pool.free == scheduler.pool.total


@pytest.mark.parametrize("max_tokens", range(1, 9))
def test_the_limit_inside_a_run_is_kept(max_tokens: int) -> None:
    item = work("r", [1, 2, 3], max_tokens=max_tokens)
    core, _, runner = rig(blocks=100, speculation=eager(ScriptedDrafter(right), 5))
    heard = run_all(core, [item])
    assert heard.tokens("r") == list(range(4, 4 + max_tokens)) and heard.last("r").finish == "length"
    assert heard.usage("r").output_tokens == max_tokens
    # a prompt of three and all tokens but the last: nothing is computed that the limit would cut off
    assert sum(size for step in runner.steps for _, _, size in step) == 3 + max_tokens - 1


@pytest.mark.parametrize("at", range(6))
def test_an_end_token_inside_a_run_ends_the_answer_there(model: Any, at: int) -> None:
    item = work("r", PROMPTS[0], max_tokens=8 + at, ignore_eos=False, seed=3, temperature=1.0, logit_bias={256: -50.0})
    spoken = run_all(make_core(model)[0], [item]).tokens("r")[:at]
    script = {"r": [*spoken, 256, 5, 5, 5, 5]}
    forced = [
        EndAfter(make_core(model, speculation=what)[0], at)
        for what in (None, eager(ScriptedDrafter(foretold(script, 0.0)), 5))
    ]
    for core in forced:
        heard = run_all(core.core, [item])
        assert heard.tokens("r") == [*spoken, 256] and heard.last("r").finish == "stop"
        assert heard.usage("r").output_tokens == at + 1


class EndAfter:
    """Makes the model end after so many tokens of the answer: its logits are changed on the way out."""

    def __init__(self, core: Core, count: int) -> None:
        self.core = core
        inner = core._runner

        def run(step: list[Slice]) -> Step:
            done = inner.run(step)
            logits = done.logits.clone()
            places = [
                len(seq.tokens) - seq.context + ahead for seq in done.sequences for ahead in range(1 + len(seq.drafts))
            ]
            for row, place in enumerate(places):
                if place == count:
                    logits[row, 256] = 500.0
            return Step(done.sequences, logits)

        core._runner = type("Ending", (), {"run": staticmethod(run), "vocab_size": inner.vocab_size})()


def test_blocks_of_wrong_drafts_are_given_back_at_once() -> None:
    core, scheduler, runner = rig(blocks=100, speculation=eager(ScriptedDrafter(lambda seq, count: [7] * count), 5))
    core.add(work("r", [9, 9, 9], max_tokens=30))
    while core.busy:
        core.step()
        for seq in scheduler.running:
            assert len(seq.blocks) <= scheduler.pool.needed(len(seq.tokens)) and not seq.drafts
    assert max(size for step in runner.steps for _, _, size in step) == 6


def test_rejected_drafts_are_neither_charged_nor_found_again(model: Any) -> None:
    """All drafts are wrong: the share pays for the answer, and the prefix cache knows the answer only."""
    item = work("r", PROMPTS[1], max_tokens=NEW, share="s")
    core, scheduler = make_core(model, speculation=eager(ScriptedDrafter(lambda seq, count: [7] * count), 5))
    plain_core, plain_scheduler = make_core(model)
    heard, plain = run_all(core, [item]), run_all(plain_core, [item])
    assert heard.usage("r") == plain.usage("r")
    assert scheduler.waiting.got("s") == plain_scheduler.waiting.got("s")
    whole = [*PROMPTS[1], *plain.tokens("r")]
    again = [work("r2", whole, max_tokens=4, share="s")]
    first, second = run_all(core, again), run_all(plain_core, again)
    assert first.usage("r2") == second.usage("r2") and first.usage("r2").cached_tokens > 0
    assert first.tokens("r2") == second.tokens("r2")


def test_an_answer_that_goes_on_elsewhere_is_the_same_with_drafts(model: Any) -> None:
    whole = run_all(make_core(model)[0], asks(temperature=0.9))
    for at, item in enumerate(asks(temperature=0.9)):
        said_before = whole.tokens(item.request_id)[: 5 + at]
        rest = work(item.request_id, PROMPTS[at], max_tokens=NEW, seed=at, temperature=0.9, resume=[said_before])
        core, _ = make_core(model, speculation=eager(NgramDrafter()))
        assert said_before + run_all(core, [rest]).tokens(item.request_id) == whole.tokens(item.request_id)


class MarkovRunner:
    """Eight tokens, each followed by a distribution of its own."""

    vocab_size = 300

    def __init__(self) -> None:
        self.table = torch.full((300, 300), -1e9)
        self.table[:, :8] = 1.5 * torch.randn(300, 8, generator=torch.Generator().manual_seed(2))

    def run(self, step: list[Slice]) -> Step:
        ready = [seq for seq, size in step if seq.wanted + len(seq.drafts) == size]
        return Step(ready, self.table[[token for seq in ready for token in (seq.tokens[-1], *seq.drafts)]].clone())


CHI_ASKS: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.3, "top_k": 5},
    {"temperature": 1.0, "min_p": 0.1, "logit_bias": {3: 1.0}},
]


@pytest.mark.parametrize("ask", CHI_ASKS)
def test_pairs_of_tokens_have_the_distribution_of_the_model(ask: dict[str, Any]) -> None:
    """Chi-squared over the answers' first two tokens, with drafts that are the most likely ones: bins with at least five
    expected draws, the rest in one; threshold df + 10 sqrt(2 df). The seeds are fixed."""
    draws = 3000
    runner = MarkovRunner()
    likely = runner.table.argmax(-1).tolist()

    def guess(seq: Any, count: int) -> list[int]:
        found = [likely[seq.tokens[-1]]]
        return [*found, likely[found[0]]][:count]

    speculation = eager(ScriptedDrafter(guess), 2)
    core, _, _ = rig(blocks=1000, seqs=100, batched=400, speculation=speculation)
    core._runner = runner
    heard = run_all(core, [work(str(at), [9], max_tokens=3, seed=at, **ask) for at in range(draws)])
    pairs = Counter(tuple(heard.tokens(str(at))[:2]) for at in range(draws))
    sampling = Sampling(max_tokens=1, **ask)
    biased = runner.table.clone()
    for token, bias in sampling.logit_bias.items():
        biased[:, token] += bias
    first = expected(biased[9], sampling)
    wanted = {(a, b): first[a] * expected(biased[a], sampling)[b] * draws for a in range(8) for b in range(8)}
    assert all(wanted.get(pair, 0.0) > 0 for pair in pairs), "a pair that the rules exclude was drawn"
    bins = [(pairs[pair], want) for pair, want in wanted.items() if want >= 5]
    bins.append((draws - sum(seen for seen, _ in bins), draws - sum(want for _, want in bins)))
    chi = sum((seen - want) ** 2 / want for seen, want in bins if want >= 1)
    freedom = len(bins) - 1
    assert freedom >= 4 and chi < freedom + 10 * (2 * freedom) ** 0.5
    assert 0 < speculation.accepted < speculation.drafted


def right(seq: Any, count: int) -> list[int]:
    return [(seq.tokens[-1] + at + 1) % 250 for at in range(count)]
