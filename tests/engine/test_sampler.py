"""The sampler against a plain reference of each rule, and its distribution against the one that it claims."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from rungway.engine.protocol import Sampling
from rungway.engine.sampler import Row, sample, uniform


def rows(count: int, **ask: Any) -> list[Row]:
    sampling = Sampling(max_tokens=1, **ask)
    return [Row(sampling, [1, 2, 2], 1, 77, at % 8, at) for at in range(count)]


def expected(logits: torch.Tensor, ask: Sampling) -> np.ndarray:
    """The rules one by one over the whole vocabulary, in float64."""
    probs = torch.softmax(logits.double() / ask.temperature, -1).numpy()
    order = np.argsort(-probs, kind="stable")
    kept = probs[order].copy()
    if ask.min_p:
        kept[kept < ask.min_p * kept[0]] = 0
    if ask.top_k:
        kept[ask.top_k :] = 0
    kept /= kept.sum()
    before = np.cumsum(kept) - kept
    kept[before >= ask.top_p] = 0
    result = np.zeros_like(probs)
    result[order] = kept / kept.sum()
    return result


@pytest.mark.parametrize("vocab", [12, 1000])
@pytest.mark.parametrize(
    "ask",
    [
        {"temperature": 1.0},
        {"temperature": 0.5},
        {"temperature": 1.0, "top_k": 3},
        {"temperature": 1.0, "top_k": 306},
        {"temperature": 2.0, "top_p": 0.7},
        {"temperature": 4.0, "top_p": 0.98},
        {"temperature": 1.0, "min_p": 0.1},
        {"temperature": 2.0, "min_p": 0.001, "top_k": 300, "top_p": 0.9},
    ],
)
def test_distribution(vocab: int, ask: dict[str, Any]) -> None:
    """Chi-squared over bins of at least five expected draws; the seed is fixed, so this passes or fails for ever."""
    draws = 4000
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(3)) * 1.5
    want = expected(logits, Sampling(max_tokens=1, **ask))
    got = [s.token for s in sample(logits.expand(draws, vocab), rows(draws, **ask))]
    counts = np.bincount(np.array(got), minlength=vocab)
    assert not counts[want == 0].any(), "a token that the rules exclude was drawn"
    big = want * draws >= 5
    bins = [(counts[at], want[at] * draws) for at in np.flatnonzero(big)]
    if not big.all():
        bins.append((counts[~big].sum(), want[~big].sum() * draws))
    chi = sum((seen - wish) ** 2 / wish for seen, wish in bins if wish > 0)
    freedom = max(1, len(bins) - 1)
    assert chi < freedom + 5 * (2 * freedom) ** 0.5


def test_greedy_rows_and_hot_rows_mix() -> None:
    logits = torch.randn(6, 500, generator=torch.Generator().manual_seed(1))
    mixed = [rows(6)[at] if at % 2 else rows(6, temperature=0.0)[at] for at in range(6)]
    got = [s.token for s in sample(logits, mixed)]
    assert got[::2] == logits.argmax(-1).tolist()[::2]
    alone = [sample(logits[at : at + 1], [mixed[at]])[0].token for at in range(6)]
    assert got == alone


def test_penalties_and_bias_are_applied_in_order() -> None:
    logits = torch.tensor([[1.0, 2.0, 4.0, -1.0]])
    ask = {"repetition_penalty": 2.0, "frequency_penalty": 0.25, "presence_penalty": 0.5, "logit_bias": {1: 2.0}}
    # token 1 is in the prompt, token 2 twice in the answer: (2+2)/2 = 2; 4/2 - 2*0.25 - 0.5 = 1
    kept = logits.clone()
    (got,) = sample(logits, rows(1, temperature=0.0, logprobs=4, **ask))
    assert got.token == 1 and torch.equal(logits, kept)
    (without,) = sample(
        logits, rows(1, temperature=0.0, logprobs=4, **{**ask, "logit_bias": {1: 1.9}, "presence_penalty": -0.5})
    )
    assert without.token == 2
    raw = torch.log_softmax(logits[0], -1)
    assert got.logprob == pytest.approx(float(raw[1])), "logprobs are of the raw logits"
    assert [token for token, _ in got.top] == [2, 1, 0, 3]


def test_logprobs_are_never_infinite() -> None:
    logits = torch.tensor([[0.0, float("-inf"), -3e38]])
    (got,) = sample(logits, rows(1, temperature=0.0, logprobs=3))
    assert got.token == 0 and all(value >= -9999.0 for _, value in got.top)


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_a_broken_row_has_no_token_and_harms_no_other(broken: float) -> None:
    logits = torch.zeros(3, 10)
    logits[:, 4] = 5.0
    logits[1, 2] = broken
    got = sample(logits, [rows(1, temperature=0.0)[0], rows(1)[0], rows(1, temperature=1.0, top_p=0.1)[0]])
    assert got[0].token == 4 and got[1].token is None and got[2].token == 4


def test_uniform_numbers_depend_on_each_part_of_the_key() -> None:
    numbers = {uniform(seed, index, position) for seed in (0, 1, -1) for index in range(5) for position in range(200)}
    assert len(numbers) == 3000 and 0.45 < sum(numbers) / 3000 < 0.55
    assert uniform(5, 1, 2) == uniform(5, 1, 2) and all(0.0 <= number < 1.0 for number in numbers)
