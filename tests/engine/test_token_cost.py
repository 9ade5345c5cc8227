"""What a further token of a prompt costs, learnt from steps that are mostly something else."""

from __future__ import annotations

import random

import pytest

from rungway.engine.step_costs import TokenCost

CPU = (4.0, 1.0, 0.3, 0.4)  # ms: a step, a row, 1,024 tokens of context, a token of a prompt
GPU = (8.0, 0.02, 0.05, 0.02)
SHORT, MIXED, LONG = (20, 40), (20, 40, 2048), (2048, 4096)


@pytest.mark.parametrize("noise", [0.0, 0.1, 0.4])
@pytest.mark.parametrize(
    ("costs", "prompts", "rows_most"),
    [(CPU, SHORT, 8), (CPU, SHORT, 0), (CPU, MIXED, 8), (GPU, SHORT, 64), (GPU, MIXED, 64), (GPU, LONG, 64)],
)
def test_neither_decodes_nor_short_prompts_make_an_engine_look_slow(
    costs: tuple[float, float, float, float], prompts: tuple[int, ...], rows_most: int, noise: float
) -> None:
    step, row, context, token = costs
    rng, cost = random.Random(1), TokenCost()
    for _ in range(3000):
        rows = rng.randint(min(1, rows_most), rows_most)
        read = rows * rng.randint(50, 500)
        tokens = rng.choice(prompts) if not rows or rng.random() < 0.2 else 0
        spent_ms = (step + row * rows + context * read / 1024 + token * tokens) * (1 + abs(rng.gauss(0, noise)))
        cost.learn(tokens, int(1e6 * spent_ms), rows, read)
    true = 1000.0 / token
    assert 0.5 * true <= cost.tokens_per_s <= 3.0 * true


def test_nothing_is_known_before_a_prompt_was_read() -> None:
    cost = TokenCost()
    assert cost.tokens_per_s == 0.0
    for _ in range(100):
        cost.learn(0, 5_000_000, rows=4, read=1000)
    assert cost.tokens_per_s == 0.0
