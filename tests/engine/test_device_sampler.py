"""The way through the sampling kernel against the way through torch, on the CPU where the kernel is its reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rungway.engine.protocol import Sampling
from rungway.engine.sampler import Row, _by_kernel, _by_torch

ASKS = [
    Sampling(max_tokens=9, temperature=0.0),
    Sampling(max_tokens=9, temperature=1.0, logprobs=3),
    Sampling(max_tokens=9, temperature=0.7, top_k=5),
    Sampling(max_tokens=9, temperature=0.9, top_k=40, top_p=0.8),
    Sampling(max_tokens=9, temperature=1.2, min_p=0.1),
    Sampling(max_tokens=9, temperature=1.0, presence_penalty=1.5, logit_bias={3: 4.0}),
]


@pytest.mark.parametrize("changed", [False, True], ids=["as they are", "biased, penalised or masked"])
def test_both_ways_give_the_same_tokens_and_logprobs(changed: bool) -> None:
    mask = np.array([0xFFFF0000] * 10, dtype=np.uint32)
    for position in range(8):
        asks = ASKS if changed else ASKS[:5]
        rows = [Row(ask, [1, 2, 3], 1, 11, at, position) for at, ask in enumerate(asks)]
        if changed:
            rows[2] = rows[2]._replace(mask=mask)
        logits = torch.randn(len(rows), 320, generator=torch.Generator().manual_seed(position)) * 3
        one, other = _by_torch(logits, rows), _by_kernel(logits, rows)
        assert other.tokens == one.tokens and other.tops == one.tops and other.lost == one.lost == frozenset()
        assert other.logprobs == pytest.approx(one.logprobs, abs=1e-5)


def test_a_row_that_is_not_finite_is_no_token_on_either_way() -> None:
    logits = torch.zeros(2, 64)
    logits[1, 3] = float("nan")
    rows = [Row(ASKS[1], [1], 1, 11, at, 0) for at in range(2)]
    for way in (_by_torch, _by_kernel):
        assert np.isfinite(way(logits, rows).logprobs).tolist() == [True, False]


def test_a_row_in_which_nothing_may_come_is_lost_on_either_way() -> None:
    logits = torch.zeros(2, 64)
    rows = [
        Row(Sampling(max_tokens=9, allowed_token_ids=(5,), bad_words=((5,),) * at), [1], 1, 11, at, 0) for at in (0, 1)
    ]
    for way in (_by_torch, _by_kernel):
        assert way(logits, rows).tokens[0] == 5 and way(logits, rows).lost == {1}
