"""Log-probabilities of a prompt's own tokens: those of a whole forward pass, whatever happened on the way."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from engine.native_kit import VOCAB, Heard, drain, generate, make_core, random_model, random_prompts, run_all, work
from engine.spec_kit import ScriptedDrafter, eager, foretold
from rungway.engine.core import Core
from rungway.engine.kernel_ops import KernelOps
from rungway.engine.protocol import PromptToken
from rungway.engine.sampler import LOGPROB_MIN
from rungway.engine.scoring import LOGITS_BYTES_MAX, rows_max, score

PROMPTS = random_prompts(6, longest=60, seed=31)
LONG = [token for prompt in PROMPTS for token in prompt][:61]


@pytest.fixture(scope="module")
def model() -> Any:
    return random_model("qwen2")


def told(heard: Heard, name: str) -> list[PromptToken]:
    """What came of the prompt: once, and on the first delta of the request."""
    deltas = [delta for (request, _), all_of in heard.deltas.items() if request == name for delta in all_of]
    carrying = [delta for delta in deltas if delta.prompt_logprobs is not None]
    assert len(carrying) == 1, "the prompt's log-probabilities come once"
    assert carrying[0] is heard.deltas[name, 0][0], "and with the first delta"
    return carrying[0].prompt_logprobs or []


def expected(model: Any, prompt: list[int]) -> torch.Tensor:
    """Log-probabilities [prompt - 1, vocabulary] by transformers' own pass."""
    with torch.no_grad():
        return torch.log_softmax(model(torch.tensor([prompt])).logits[0, :-1].float(), -1)


def check(model: Any, prompt: list[int], tokens: list[PromptToken], tops: int) -> None:
    assert [token.id for token in tokens] == prompt
    first, *rest = tokens
    assert (first.logprob, first.rank, first.top) == (None, 0, [])
    for row, token in zip(expected(model, prompt), rest, strict=True):
        assert token.logprob == pytest.approx(float(row[token.id]), abs=1e-4)
        best = torch.topk(row, tops)
        assert [value for _, _, value in token.top] == pytest.approx(best.values.tolist(), abs=1e-4)
        assert abs(token.rank - 1 - int((row > row[token.id]).sum())) <= 1
        for id_, _, value in token.top:
            assert value == pytest.approx(float(row[id_]), abs=1e-4)


@pytest.mark.parametrize("tops", [0, 1, 5])
@pytest.mark.parametrize("batched", [256, 9])
def test_they_are_those_of_a_full_forward_pass_however_the_prompt_is_cut(model: Any, tops: int, batched: int) -> None:
    core, scheduler = make_core(model, batched=batched)
    works = [work(f"r{at}", prompt, prompt_logprobs=tops, max_tokens=4) for at, prompt in enumerate(PROMPTS)]
    heard = run_all(core, works)
    for at, prompt in enumerate(PROMPTS):
        check(model, prompt, told(heard, f"r{at}"), tops)
        assert len(heard.tokens(f"r{at}")) == 4
    assert scheduler.pool.free == scheduler.pool.total


@pytest.mark.parametrize("batched", [256, 3])
def test_through_the_kernel_registry(model: Any, batched: int) -> None:
    """The CUDA path's wiring, where short parts of prompts share a span with decodes."""
    core, _ = make_core(model, seqs=3, batched=batched, ops=KernelOps())
    works = [work(f"r{at}", prompt[:20], prompt_logprobs=2, max_tokens=4) for at, prompt in enumerate(PROMPTS[:4])]
    heard = run_all(core, works)
    for at, prompt in enumerate(PROMPTS[:4]):
        check(model, prompt[:20], told(heard, f"r{at}"), 2)
        assert heard.tokens(f"r{at}") == generate(model, prompt[:20], 4)


@pytest.mark.parametrize("rows", [1, 3, 7])
def test_no_step_reads_more_logits_than_the_bound(model: Any, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    core, scheduler = make_core(model)
    scheduler.score_rows_max = rows
    most = 0
    run = core._runner.run

    def counted(step: Any) -> Any:
        nonlocal most
        done = run(step)
        most = max(most, sum(len(read.logits) for read in done.reads))
        return done

    monkeypatch.setattr(core._runner, "run", counted)
    works = [work(f"r{at}", prompt, prompt_logprobs=2, max_tokens=3) for at, prompt in enumerate(PROMPTS)]
    heard = run_all(core, [*works, work("plain", LONG)])
    assert most == rows
    for at, prompt in enumerate(PROMPTS):
        check(model, prompt, told(heard, f"r{at}"), 2)
    assert heard.tokens("plain") == run_all(make_core(model)[0], [work("plain", LONG)]).tokens("plain")


def test_a_prefix_hit_gives_the_values_of_a_cold_run(model: Any) -> None:
    """What the cache holds has no logits: a request that wants them computes its prompt, and may be found afterwards."""
    core, _ = make_core(model)
    cold = run_all(core, [work("cold", LONG, prompt_logprobs=3)])
    warm = run_all(core, [work("warm", LONG, prompt_logprobs=3)])
    check(model, LONG, told(warm, "warm"), 3)
    assert told(warm, "warm") == told(cold, "cold")
    assert warm.usage("warm").cached_tokens == 0, "nothing was taken from the cache"
    assert warm.tokens("warm") == cold.tokens("cold")
    plain = run_all(core, [work("plain", LONG)])
    assert plain.usage("plain").cached_tokens > 0, "its own blocks can be found"


@pytest.mark.parametrize("at", range(1, 9))
def test_a_preemption_at_any_step_changes_no_value(model: Any, at: int) -> None:
    want = told(run_all(make_core(model)[0], [work("r", LONG, prompt_logprobs=4)]), "r")
    core, scheduler = make_core(model, batched=11)
    heard = Heard()
    heard.take(core.add(work("r", LONG, prompt_logprobs=4)))
    for _ in range(at):
        heard.take(core.step())
    for seq in list(scheduler.running):
        scheduler.preempt(seq)
    drain(core, heard)
    got = told(heard, "r")
    check(model, LONG, got, 4)
    assert [token.id for token in got] == [token.id for token in want]
    assert scheduler.preemptions == 1


def test_what_was_read_is_not_read_again_after_a_preemption(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    core, scheduler = make_core(model, batched=11)
    reads: list[tuple[int, int]] = []
    run = core._runner.run

    def noted(step: Any) -> Any:
        done = run(step)
        reads.extend((read.first, len(read.logits)) for read in done.reads)
        return done

    monkeypatch.setattr(core._runner, "run", noted)
    heard = Heard()
    heard.take(core.add(work("r", LONG, prompt_logprobs=0)))
    for _ in range(2):
        heard.take(core.step())
    scheduler.preempt(next(iter(scheduler.running)))
    drain(core, heard)
    assert [at for first, count in reads for at in range(first, first + count)] == list(range(len(LONG) - 1))


def test_tokens_of_an_earlier_attempt_are_not_taken_for_the_prompt(model: Any) -> None:
    """Resumed elsewhere after a lost replica: the values are the prompt's, and the answer goes on."""
    whole = run_all(make_core(model)[0], [work("r", LONG, prompt_logprobs=2)])
    core, _ = make_core(model, batched=13)
    rest = run_all(core, [work("r", LONG, prompt_logprobs=2, resume=[whole.tokens("r")[:6]])])
    check(model, LONG, told(rest, "r"), 2)
    assert rest.tokens("r") == whole.tokens("r")[6:]


@pytest.mark.parametrize("sequences", [1, 3])
def test_no_token_has_to_be_said(model: Any, sequences: int) -> None:
    core, scheduler = make_core(model, batched=13)
    heard = run_all(
        core, [work("r", LONG, prompt_logprobs=1, max_tokens=0, sequences=sequences), work("o", PROMPTS[0])]
    )
    check(model, LONG, told(heard, "r"), 1)
    usage = heard.usage("r")
    assert (usage.prompt_tokens, usage.output_tokens) == (len(LONG), 0)
    for index in range(sequences):
        assert heard.tokens("r", index) == []
        assert heard.last("r", index).finish == "length"
    assert len(heard.tokens("o")) == 16
    assert scheduler.pool.free == scheduler.pool.total


def test_chunks_and_drafts_beside_it_shift_no_value(model: Any) -> None:
    """Logprobs of prompt and answer of one request, while others draft and prompts are cut."""
    answers = {f"r{at}": generate(model, prompt, 12) for at, prompt in enumerate(PROMPTS)}
    speculation = eager(ScriptedDrafter(foretold(answers, wrong=0.3)))
    core, scheduler = make_core(model, batched=24, speculation=speculation)
    scheduler.score_rows_max = 5
    works = [work(f"r{at}", prompt, prompt_logprobs=2, logprobs=1, max_tokens=12) for at, prompt in enumerate(PROMPTS)]
    heard = Heard()
    for item in works:  # so that some draft while others are computed
        heard.take(core.add(item))
        for _ in range(4):
            heard.take(core.step())
    drain(core, heard)
    assert speculation.accepted > 0
    for at, prompt in enumerate(PROMPTS):
        check(model, prompt, told(heard, f"r{at}"), 2)
        tokens = heard.tokens(f"r{at}")
        assert tokens == answers[f"r{at}"]
        rows = expected(model, [*prompt, *tokens])[len(prompt) - 1 :]
        entries = [entry for delta in heard.deltas[f"r{at}", 0] for entry in delta.logprobs or []]
        values = [float(row[token]) for row, token in zip(rows, tokens, strict=True)]
        assert [entry.logprob for entry in entries] == pytest.approx(values, abs=1e-4)


def test_samples_and_beams_of_one_prompt_tell_it_once(model: Any) -> None:
    core, _ = make_core(model, batched=13)
    heard = run_all(
        core,
        [
            work("n", LONG, prompt_logprobs=2, sequences=3, temperature=1.0, seed=5),
            work("b", PROMPTS[1], prompt_logprobs=2, sequences=3, use_beam_search=True),
        ],
    )
    check(model, LONG, told(heard, "n"), 2)
    check(model, PROMPTS[1], told(heard, "b"), 2)


def test_a_prompt_of_one_token_has_nothing_to_tell(model: Any) -> None:
    heard = run_all(make_core(model)[0], [work("r", [7], prompt_logprobs=5)])
    assert told(heard, "r") == [PromptToken(7, b"\x07", None, 0, [])]


def test_cancel_in_the_middle_of_a_prompt_tells_nothing(model: Any) -> None:
    core, scheduler = make_core(model, batched=8)
    core.add(work("r", LONG, prompt_logprobs=1))
    assert core.step() == []
    (last,) = core.cancel("r")
    assert last.prompt_logprobs is None and last.finish == "cancelled"
    assert scheduler.pool.free == scheduler.pool.total


def test_values_that_are_no_numbers_stay_out_of_the_answer() -> None:
    logits = torch.zeros(3, VOCAB)
    logits[0, 5:] = float("-inf")
    logits[1, 3] = float("nan")
    got = score(logits, None, [200, 3, 4], tops=6, name=lambda token: b"x")
    assert got[0].logprob == LOGPROB_MIN and got[1].logprob == LOGPROB_MIN
    values = [value for token in got for _, _, value in token.top]
    assert all(math.isfinite(value) for value in values) and min(values) == LOGPROB_MIN
    assert got[2].logprob == pytest.approx(-math.log(VOCAB))


def test_the_bound_of_rows_is_one_of_bytes() -> None:
    assert rows_max(151_936) * 151_936 * 4 <= LOGITS_BYTES_MAX < (rows_max(151_936) + 1) * 151_936 * 4
    assert rows_max(10**9) == 1


@pytest.mark.parametrize("count", [-1, 65])
def test_a_wrong_number_ends_alone(model: Any, count: int) -> None:
    core: Core = make_core(model)[0]
    (end,) = core.add(work("r", PROMPTS[0], prompt_logprobs=count))
    assert end.finish == "error" and "prompt_logprobs" in (end.error or "")
