"""Logits to tokens, for all rows of a step at once. The order of processing stands in protocol.Sampling; what precedes the
draw is processing.py's, the draw itself that of rungway.kernels: cpu/draw.py, or the Triton kernel on a GPU.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from rungway.engine.device_sampler import draw
from rungway.engine.processing import changes, processed
from rungway.engine.row import Row, Sampled, point, uniform
from rungway.kernels.cpu import draw as drawing

__all__ = ["Peaks", "Row", "Sampled", "sample", "uniform"]

LOGPROB_MIN = -9999.0
Tops = dict[int, list[tuple[int, float]]]


class Peaks(NamedTuple):
    """Of each row of logits: `best` [rows] the first of the largest, `log_sums` [rows] = log(sum(exp(logits)))."""

    best: torch.Tensor
    log_sums: torch.Tensor


class _Chosen(NamedTuple):
    """For each row; `lost`: rows in which no token may come."""

    tokens: list[int]
    logprobs: list[float]
    tops: Tops
    lost: frozenset[int]


def sample(logits: torch.Tensor, rows: list[Row], peaks: Peaks | None = None) -> list[Sampled]:
    """`logits`: [rows, vocabulary], any float type, not changed; `peaks` of them, None = found here. Never raises for what a
    request asks: a row without a finite distribution gives token None."""
    by_kernel = logits.device.type == "cuda"
    chosen = _by_kernel(logits, rows) if by_kernel else _by_torch(logits, rows, peaks)
    return [
        Sampled(
            token if np.isfinite(logprob) and at not in chosen.lost else None,
            max(logprob, LOGPROB_MIN),
            chosen.tops.get(at, []),
            at in chosen.lost,
        )
        for at, (token, logprob) in enumerate(zip(chosen.tokens, chosen.logprobs, strict=True))
    ]


def _by_torch(logits: torch.Tensor, rows: list[Row], peaks: Peaks | None = None) -> _Chosen:
    raw = logits.float()
    changed = processed(raw, rows)
    tokens = _argmax(changed) if peaks is None or changed is not raw else peaks.best.tolist()
    sums = torch.logsumexp(raw, -1) if peaks is None else peaks.log_sums
    for at, token in _drawn(changed, rows):
        tokens[at] = token
    places = torch.tensor(tokens, device=raw.device)[:, None]
    chosen = raw.gather(1, places)[:, 0] - sums
    return _Chosen(tokens, chosen.tolist(), _alternatives(raw, sums, rows), _lost(changed, raw, places))


def _by_kernel(logits: torch.Tensor, rows: list[Row]) -> _Chosen:
    """Logits that nothing changes are not even copied."""
    raw = logits.float() if any(changes(row) for row in rows) else logits
    changed = processed(raw, rows)
    points = [uniform(row.seed, row.sample, row.position) for row in rows]
    tokens, logprobs = draw(changed, raw, [row.sampling for row in rows], points)
    tops: Tops = {}
    if any(row.sampling.logprobs for row in rows):
        whole = raw.float()
        tops = _alternatives(whole, torch.logsumexp(whole, -1), rows)
    lost: frozenset[int] = frozenset()
    if changed is not raw:
        lost = _lost(changed, raw, torch.tensor(tokens, device=raw.device)[:, None])
    return _Chosen(tokens, logprobs, tops, lost)


def _lost(changed: torch.Tensor, raw: torch.Tensor, places: torch.Tensor) -> frozenset[int]:
    """Rows that have nothing better to choose than what may not come."""
    if changed is raw:
        return frozenset()
    heights = changed.gather(1, places)[:, 0].tolist()
    return frozenset(at for at, height in enumerate(heights) if height == -np.inf)


def _argmax(logits: torch.Tensor) -> list[int]:
    """The first of the largest; NumPy's is vectorised on CPU, ten times faster than torch's."""
    if logits.device.type == "cpu":
        return logits.numpy().argmax(-1).tolist()  # type: ignore[no-any-return]
    return logits.argmax(-1).tolist()


def _alternatives(raw: torch.Tensor, sums: torch.Tensor, rows: list[Row]) -> Tops:
    wanted = [at for at, row in enumerate(rows) if row.sampling.logprobs]
    if not wanted:
        return {}
    most = min(max(rows[at].sampling.logprobs or 0 for at in wanted), raw.shape[1])
    values, ids = torch.topk(raw[wanted], most, dim=-1)
    values = values - sums[wanted, None]
    pairs = zip(wanted, ids.tolist(), values.tolist(), strict=True)
    return {
        at: [(token, max(value, LOGPROB_MIN)) for token, value in zip(tokens, best, strict=True)][
            : rows[at].sampling.logprobs
        ]
        for at, tokens, best in pairs
    }


def _drawn(changed: torch.Tensor, rows: list[Row]) -> list[tuple[int, int]]:
    """(row, token) for every row with a temperature and a distribution."""
    asks = [_ask(at, row) for at, row in enumerate(rows) if row.hot]
    if not asks:
        return []
    tokens = drawing.draw(
        changed.cpu().contiguous(), np.array(asks, dtype=drawing.ASK), threads=torch.get_num_threads()
    )
    return [(ask[0], token) for ask, token in zip(asks, tokens, strict=True) if token >= 0]


def _ask(at: int, row: Row) -> drawing.Ask:
    ask = row.sampling
    return drawing.ask(
        at,
        point(row.seed, row.sample, row.position),
        temperature=ask.temperature,
        top_k=ask.top_k,
        top_p=ask.top_p,
        min_p=ask.min_p,
    )
