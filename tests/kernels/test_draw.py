"""Drawing a token: the compiled way and NumPy's give the same one, and it is the one that a full sort in float64 gives."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rungway.kernels import cases_sampling, sampling_reference
from rungway.kernels.cpu import bindings, draw
from rungway.kernels.cpu.build import BuildError

try:
    bindings.library()
    MISSING = ""
except BuildError as error:
    MISSING = str(error)
needs_kernels = pytest.mark.skipif(bool(MISSING), reason=MISSING or "compiled")
ROUNDING = 2e-5  # of the whole weight: float32 weights of the fast ways


class Wish(NamedTuple):
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


wishes = st.builds(
    Wish,
    st.sampled_from([0.05, 0.7, 1.0, 3.0, 50.0]),
    st.sampled_from([0, 0, 1, 2, 7, 300, 5000]),
    st.sampled_from([1.0, 1.0, 0.999, 0.9, 0.5, 1e-6]),
    st.sampled_from([0.0, 0.0, 0.001, 0.1, 1.0]),
)


@st.composite
def logits(draw_: Any) -> torch.Tensor:
    size = draw_(st.sampled_from([1, 3, 16, 17, 130, 1025, 5000]))
    x = np.random.default_rng(draw_(st.integers(0, 2**32 - 1))).standard_normal(size)
    x *= draw_(st.sampled_from([0.001, 1.0, 4.0, 30.0]))
    kind = draw_(st.sampled_from(["plain", "ties", "masked", "one far above", "all equal"]))
    if kind == "ties":
        x = np.round(x)
    elif kind == "masked":
        x[1::3] = -np.inf
    elif kind == "one far above":
        x[size // 2] += 50.0
    elif kind == "all equal":
        x[:] = -2.5
    return torch.from_numpy(x.astype(np.float32))[None]


def asked(wish: Wish, point: int, row: int = 0) -> tuple[Any, ...]:
    return draw.ask(row, point, **wish._asdict())


def one(x: torch.Tensor, wish: Wish, point: int, way: Any) -> int:
    (token,) = way(x, np.array([asked(wish, point)], dtype=draw.ASK))
    return int(token)


def slowly(x: np.ndarray, wish: Wish) -> tuple[np.ndarray, np.ndarray]:
    """(ids in the order of draw, their share of the whole after filtering), rule by rule over a full sort."""
    heights = (x - x.max()) / wish.temperature
    filtered = wish.top_k > 0 or wish.top_p < 1.0 or wish.min_p > 0.0
    order = np.lexsort((np.arange(len(x)), -x)) if filtered else np.arange(len(x))
    p = np.exp(heights)[order]
    if wish.min_p:
        p[p < wish.min_p * (1 - 1e-6)] = 0.0
    if wish.top_k:
        p[wish.top_k :] = 0.0
    if wish.top_p < 1.0:
        before = np.cumsum(p) - p
        p[before >= wish.top_p * p.sum() * (1 + 1e-6)] = 0.0
    return order, p / p.sum()


@given(logits(), wishes, st.integers(0, 2**64 - 1))
@settings(max_examples=400, deadline=None)
def test_every_way_draws_what_a_full_sort_draws(x: torch.Tensor, wish: Wish, point: int) -> None:
    token = one(x, wish, point, draw.draw_plainly)
    assert one(x, wish, point, draw.draw) == token
    order, share = slowly(x[0].double().numpy(), wish)
    at = int(np.flatnonzero(order == token)[0])
    after = np.cumsum(share)
    # a token that rounding keeps or drops at the end of top-p moves all bounds by its own share
    last = share[share > 0][-1]
    slack = ROUNDING + (last if wish.top_p < 1.0 or wish.min_p > 0.0 else 0.0)
    assert after[at] - share[at] - slack <= point / 2**64 <= after[at] + slack
    assert share[at] > 0.0 or share[at - 1] == last, "a token behind those that stay"


@needs_kernels
@given(logits(), st.lists(st.tuples(wishes, st.integers(0, 2**64 - 1)), min_size=1, max_size=9))
@settings(max_examples=60, deadline=None)
def test_neighbours_and_threads_change_nothing(x: torch.Tensor, asks: list[tuple[Wish, int]]) -> None:
    """Batch sizes of vLLM#5898 and #23138."""
    rows = torch.cat([x, x.flip(1), torch.full_like(x, float("nan")), torch.full_like(x, -float("inf"))])
    many = np.array([asked(wish, point, at % 2) for at, (wish, point) in enumerate(asks)], dtype=draw.ASK)
    alone = [draw.draw(rows, many[at : at + 1])[0] for at in range(len(many))]
    assert draw.draw(rows, many) == draw.draw(rows, many, threads=3) == draw.draw_plainly(rows, many) == alone
    many["row"] += 2
    assert draw.draw(rows, many) == draw.draw_plainly(rows, many) == [-1] * len(many)


@pytest.mark.parametrize(
    "case", [case for case in cases_sampling.SMALL["sample"] if not case.name.startswith("0x")], ids=str
)
def test_the_reference_of_the_gpu_kernel_draws_the_same(case: Any) -> None:
    x, heat, top_k, top_p, min_p, points, _ = case.make(torch.float32)
    hot = [at for at in range(len(x)) if heat[at] > 0]
    asks = [
        asked(Wish(*map(float, (heat[at], 0, top_p[at], min_p[at])))._replace(top_k=int(top_k[at])), int(float(points[at]) * 2**64), at)
        for at in hot
    ]  # fmt: skip
    if not hot:
        return
    tokens, _ = sampling_reference.sample(x, heat, top_k, top_p, min_p, points)
    array = np.array(asks, dtype=draw.ASK)
    assert draw.draw(x, array) == draw.draw_plainly(x, array) == tokens[hot].tolist()


def test_the_ends_of_the_random_numbers() -> None:
    x = torch.tensor([[1.0, float("-inf"), 2.0, 0.0]])
    for way in (draw.draw, draw.draw_plainly):
        assert [one(x, Wish(), point, way) for point in (0, 2**64 - 1)] == [0, 3]
        assert [one(x, Wish(top_p=0.99), point, way) for point in (0, 2**64 - 1)] == [2, 3]
        assert [one(x, Wish(top_k=2), point, way) for point in (0, 2**64 - 1)] == [2, 0]
        assert [one(x, Wish(min_p=1.0), point, way) for point in (0, 2**64 - 1)] == [2, 2]


def test_extremes_of_every_parameter_are_harmless() -> None:
    x = torch.cat([torch.linspace(-3e38, 3e38, 70)[None], torch.zeros(1, 70)])
    wishes = [Wish(heat, k, p, m) for heat in (1e-5, 1e30, 1e300) for k in (0, 2**62) for p in (1e-300, 1.0) for m in (0.0, 5e-324)]  # fmt: skip
    asks = np.array([asked(wish, 2**63, row) for wish in wishes for row in (0, 1)], dtype=draw.ASK)
    assert draw.draw(x, asks) == draw.draw_plainly(x, asks)
