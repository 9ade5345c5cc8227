"""Draws one token a row by inverse CDF, in one result whoever computes it.

A token weighs w = floor(2^44 * 2^-d), d = (largest logit - logit) * log2(e) / temperature, computed in float32 one rounded
operation after the other. From there on everything is whole numbers: sums do not depend on their order, so threads,
vectors, neighbours in the batch and the path through NumPy all give the same token. What is 44 halvings below the largest
logit is never drawn (probability below 6e-14).

Without a filter, tokens go by id. With one they go by falling logit, equal ones by id: those stay whose probability is at
least min-p times the largest, of these the first top-k, of these the fewest whose weight is at least top-p of theirs. The
first token is taken whose running weight passes point / 2^64 of the whole. Up to rounding this is
kernels.sampling_reference, which has the sources.

The compiled way sorts nothing but the few tokens of one bucket in 2,048; NumPy's sorts the head that surely suffices.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rungway.kernels.cpu.bindings import library
from rungway.kernels.cpu.build import BuildError

# one entry per token to draw; mirrors RwAsk in draw.cpp
ASK = np.dtype(
    [
        ("row", "i8"),  # of the logits
        ("point", "u8"),  # the random number, in units of 2^-64
        ("share", "u8"),  # top-p in units of 2^-53, at least 1; SHARE_ALL = off
        ("most", "i8"),  # top-k; 0 = off
        ("drop", "f8"),  # ln(min-p) * temperature; -inf = off
        ("heat", "f4"),  # log2(e) / temperature
        ("pad", "i4"),
    ],
    align=True,
)
Ask = tuple[int, int, int, int, float, float, int]
SHARE_ALL = 1 << 53
_FAR = np.float32(60.0)
_RANGE = np.float32(45.0)
_UNIT = 44
_TERMS = [1.54035304e-4, 1.33335581e-3, 9.61812911e-3, 5.55041087e-2, 2.40226507e-1, 6.93147181e-1, 1.0]
_HEADS = (2.0, 4.0, 8.0, 16.0)  # halvings of weight down to which heads are tried


def ask(row: int, point: int, *, temperature: float, top_k: int, top_p: float, min_p: float) -> Ask:
    """An entry of ASK. `point` in 0 .. 2^64 - 1, temperature above 0; top_k 0, top_p 1 and min_p 0 are off."""
    share = min(max(int(top_p * SHARE_ALL), 1), SHARE_ALL)
    drop = math.log(min_p) * temperature if min_p > 0.0 else -math.inf
    heat = min(math.log2(math.e) / temperature, 3e38)
    return row, point, share, min(top_k, 2**31), drop, heat, 0


def draw(logits: torch.Tensor, asks: NDArray[Any], *, threads: int = 1) -> list[int]:
    """A token for each of `asks` (ASK), -1 where its row has no distribution. `logits` [rows, vocabulary] float32 on CPU, rows
    side by side. Raises RuntimeError where there is no memory."""
    assert logits.dtype is torch.float32 and logits.is_contiguous() and asks.dtype == ASK
    compiled = _compiled()
    if compiled is None:
        return draw_plainly(logits, asks)
    tokens = np.empty(len(asks), dtype=np.int64)
    size = logits.shape[1]
    if compiled.rw_draw(logits.data_ptr(), size, asks.ctypes.data, len(asks), tokens.ctypes.data, threads):
        raise RuntimeError("no memory for sampling")
    return [int(token) for token in tokens]


@functools.cache
def _compiled() -> Any:
    """The kernels, None where they cannot be compiled; that is tried once."""
    try:
        return library()
    except BuildError:
        return None


def draw_plainly(logits: torch.Tensor, asks: NDArray[Any]) -> list[int]:
    """`draw` by NumPy."""
    values = logits.numpy()
    return [_drawn(values[one["row"]], one) for one in asks]


def weigh(x: NDArray[np.float32], top: np.float32, heat: np.float32) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """(halvings of weight below `top`, at most 60; weights in units of 2^-44) of logits."""
    with np.errstate(invalid="ignore", over="ignore"):
        down = np.fmin((top - x) * heat, _FAR)
    whole = np.rint(-down)
    part = -down - whole
    total = np.full_like(part, _TERMS[0])
    for term in _TERMS[1:]:
        total *= part
        total += np.float32(term)
    return down, np.ldexp(total, whole.astype(np.int32) + _UNIT).astype(np.int64)


def _drawn(x: NDArray[np.float32], one: Any) -> int:
    top = x.max(initial=-np.inf, where=~np.isnan(x))
    if not np.isfinite(top):
        return -1
    most, share, heat = int(one["most"]), int(one["share"]), one["heat"]
    with np.errstate(over="ignore"):
        bound = np.float32(float(top) + float(one["drop"]))
    down, weights = weigh(x, top, heat)
    if most == 0 and share == SHARE_ALL and not np.isfinite(one["drop"]):
        return _reach(np.cumsum(weights), int(one["point"]))
    weights[(x < bound) | np.isnan(x) | (down >= _RANGE)] = 0
    near = (x >= bound) & (down < _RANGE)
    kept = int(weights.sum())
    head = _head(down, weights, near, most, share * kept)
    ids = _ordered(x, np.flatnonzero(head))
    running = np.cumsum(weights[ids])
    if most:
        running = running[:most]
        kept = int(running[-1]) if len(running) == most else kept
    if share < SHARE_ALL:
        target = max(1, (share * kept + SHARE_ALL - 1) >> 53)
        running = running[: int(np.searchsorted(running, target)) + 1]
    return int(ids[_reach(running, int(one["point"]))])


def _head(
    down: NDArray[np.float32], weights: NDArray[np.int64], near: NDArray[np.bool_], most: int, wanted: int
) -> NDArray[np.bool_]:
    """Which tokens surely hold all that stay: the first `most` of `near`, or (0) those with weight `wanted` / 2^53."""
    if not (most or wanted < int(weights.sum()) << 53):
        return near
    for halvings in _HEADS:
        head = near & (down <= halvings)
        if most and int(np.count_nonzero(head)) >= most:
            return head
        if not most and int(weights[head].sum()) << 53 >= wanted:
            return head
    return near


def _ordered(x: NDArray[np.float32], ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """`ids` by falling logit, equal ones rising. Logit and id in one integer sort several times faster than by argsort."""
    bits = (x[ids] + np.float32(0.0)).view(np.int32)  # -0 equals 0
    falling = np.where(bits < 0, bits & 0x7FFFFFFF, -1 - bits).astype(np.int64)
    return np.sort((falling << 32) | ids) & 0xFFFFFFFF


def _reach(running: NDArray[np.int64], point: int) -> int:
    return int(np.searchsorted(running, (point * int(running[-1])) >> 64, side="right"))
