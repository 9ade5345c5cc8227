"""Logits to tokens, for all rows of a step at once. The order of processing stands in protocol.Sampling.

Randomness is a function of (seed, sequence index, position): one uniform number picks the token by inverse CDF. It does
not depend on the batch, on preemption or on the replica, so a seeded answer can be had again anywhere.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from rungway.engine.device_sampler import draw
from rungway.engine.protocol import Sampling

CANDIDATES = 256  # sorted head of the distribution that nearly always decides top-k, top-p and min-p
LOGPROB_MIN = -9999.0
_GREEDY_BELOW = 1e-5
Tops = dict[int, list[tuple[int, float]]]


class Row(NamedTuple):
    """One row to sample: `tokens[:prompt]` were asked, the rest is the answer so far. `position` counts the
    tokens of the answer including those of earlier attempts. `mask`: the tokens that may come, as guide.Guide gives it;
    what it has no bit for may not come."""

    sampling: Sampling
    tokens: list[int]
    prompt: int
    seed: int
    sample: int
    position: int
    mask: NDArray[np.uint32] | None = None

    @property
    def dead(self) -> bool:
        """No token at all may come."""
        return self.mask is not None and not self.mask.any()


class Sampled(NamedTuple):
    """`token` is None when the row's logits are not finite, or its mask allows nothing. `top`: (token, logprob), best first."""

    token: int | None
    logprob: float
    top: list[tuple[int, float]]


class Peaks(NamedTuple):
    """Of each row of logits: `best` [rows] the first of the largest, `log_sums` [rows] = log(sum(exp(logits)))."""

    best: torch.Tensor
    log_sums: torch.Tensor


def uniform(seed: int, index: int, position: int) -> float:
    """A number in [0, 1) that depends on nothing else."""
    key = b"%d/%d/%d" % (seed, index, position)
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") / 2.0**64


def sample(logits: torch.Tensor, rows: list[Row], peaks: Peaks | None = None) -> list[Sampled]:
    """`logits`: [rows, vocabulary], any float type, not changed; `peaks` of them, None = found here. Never raises for what a
    request asks: a row without a finite distribution gives token None."""
    by_kernel = logits.device.type == "cuda"
    tokens, logprobs, tops = _by_kernel(logits, rows) if by_kernel else _by_torch(logits, rows, peaks)
    return [
        Sampled(
            token if np.isfinite(logprob) and not rows[at].dead else None, max(logprob, LOGPROB_MIN), tops.get(at, [])
        )
        for at, (token, logprob) in enumerate(zip(tokens, logprobs, strict=True))
    ]


def _by_torch(logits: torch.Tensor, rows: list[Row], peaks: Peaks | None = None) -> tuple[list[int], list[float], Tops]:
    raw = logits.float()
    processed = _processed(raw, rows)
    tokens = _argmax(processed) if peaks is None or processed is not raw else peaks.best.tolist()
    sums = torch.logsumexp(raw, -1) if peaks is None else peaks.log_sums
    for at, token in _drawn(processed, rows):
        tokens[at] = token
    chosen = raw.gather(1, torch.tensor(tokens, device=raw.device)[:, None])[:, 0] - sums
    return tokens, chosen.tolist(), _alternatives(raw, sums, rows)


def _by_kernel(logits: torch.Tensor, rows: list[Row]) -> tuple[list[int], list[float], Tops]:
    """Logits that nothing changes are not even copied."""
    raw = logits.float() if any(_changes(row) for row in rows) else logits
    points = [uniform(row.seed, row.sample, row.position) for row in rows]
    tokens, logprobs = draw(_processed(raw, rows), raw, [row.sampling for row in rows], points)
    if not any(row.sampling.logprobs for row in rows):
        return tokens, logprobs, {}
    whole = raw.float()
    return tokens, logprobs, _alternatives(whole, torch.logsumexp(whole, -1), rows)


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


def _processed(raw: torch.Tensor, rows: list[Row]) -> torch.Tensor:
    """Raw logits with bias, penalties and masks; the input itself where no row asks for any."""
    processed = raw
    for at, row in enumerate(rows):
        if not _changes(row):
            continue
        ask = row.sampling
        if processed is raw:
            processed = raw.clone()
        if ask.logit_bias:
            ids = torch.tensor(list(ask.logit_bias), device=raw.device)
            processed[at, ids] += torch.tensor(list(ask.logit_bias.values()), device=raw.device)
        if _penalised(ask):
            _penalise(processed[at], row)
        if row.mask is not None:
            _forbid(processed[at], row.mask)
    return processed


def _forbid(logits: torch.Tensor, mask: NDArray[np.uint32]) -> None:
    """In place: minus infinity for tokens whose bit is not set, and for all beyond the mask (a model's vocabulary may be
    padded). On CPU with NumPy, whose masked copy takes a tenth of torch's time."""
    forbidden = np.unpackbits((~mask).view(np.uint8), bitorder="little").view(np.bool_)[: len(logits)]
    logits[len(forbidden) :] = float("-inf")
    if logits.device.type == "cpu":
        np.copyto(logits[: len(forbidden)].numpy(), -np.inf, where=forbidden)
    else:
        logits[: len(forbidden)].masked_fill_(torch.from_numpy(forbidden).to(logits.device), float("-inf"))


def _changes(row: Row) -> bool:
    return bool(row.sampling.logit_bias) or _penalised(row.sampling) or row.mask is not None


def _penalised(ask: Sampling) -> bool:
    return ask.repetition_penalty != 1.0 or ask.frequency_penalty != 0.0 or ask.presence_penalty != 0.0


def _penalise(logits: torch.Tensor, row: Row) -> None:
    """In place. Repetition (Keskar et al. 2019) looks at prompt and answer; frequency and presence at the answer."""
    ask = row.sampling
    if ask.repetition_penalty != 1.0:
        seen = torch.tensor(sorted(set(row.tokens)), device=logits.device)
        values = logits[seen]
        logits[seen] = torch.where(values > 0, values / ask.repetition_penalty, values * ask.repetition_penalty)
    counts = Counter(row.tokens[row.prompt :])
    if counts:
        ids = torch.tensor(list(counts), device=logits.device)
        amounts = torch.tensor(list(counts.values()), dtype=logits.dtype, device=logits.device)
        logits[ids] -= ask.frequency_penalty * amounts + ask.presence_penalty


def _drawn(processed: torch.Tensor, rows: list[Row]) -> list[tuple[int, int]]:
    """(row, token) for every row with a temperature."""
    hot = [at for at, row in enumerate(rows) if row.sampling.temperature >= _GREEDY_BELOW]
    if not hot:
        return []
    heat = torch.tensor([[rows[at].sampling.temperature] for at in hot], device=processed.device)
    probs = torch.softmax((processed if len(hot) == len(rows) else processed[hot]) / heat, dim=-1)
    cut = [at for at, row in enumerate(hot) if _filtered(rows[row].sampling)]
    whole = [at for at in range(len(hot)) if at not in set(cut)]
    result = _draw_whole(probs, [(at, rows[hot[at]]) for at in whole])
    result += _draw_filtered(probs, [(at, rows[hot[at]]) for at in cut])
    return [(hot[at], token) for at, token in result]


def _filtered(ask: Sampling) -> bool:
    return ask.top_k > 0 or ask.top_p < 1.0 or ask.min_p > 0.0


def _draw_whole(probs: torch.Tensor, rows: list[tuple[int, Row]]) -> list[tuple[int, int]]:
    """Inverse CDF over the whole vocabulary, in id order."""
    if not rows:
        return []
    cdf = probs[[at for at, _ in rows]].cumsum(-1, dtype=torch.float64)
    points = torch.tensor([[uniform(row.seed, row.sample, row.position)] for _, row in rows], dtype=torch.float64)
    found = torch.searchsorted(cdf, points.to(cdf.device) * cdf[:, -1:], right=True)
    tokens = found[:, 0].clamp_(max=probs.shape[1] - 1).tolist()
    return [(at, token) for (at, _), token in zip(rows, tokens, strict=True)]


def _draw_filtered(probs: torch.Tensor, rows: list[tuple[int, Row]]) -> list[tuple[int, int]]:
    """The kept tokens are a head of the sorted distribution; sort only as far as needed to know it."""
    if not rows:
        return []
    size = min(CANDIDATES, probs.shape[1])
    values, ids = (part.cpu() for part in torch.topk(probs[[at for at, _ in rows]], size, dim=-1))
    result = []
    for at, (source, row) in enumerate(rows):
        head, head_ids = values[at].double().numpy(), ids[at].numpy()
        kept = _kept(head, row.sampling, complete=size == probs.shape[1])
        if kept is None:
            full, full_ids = torch.sort(probs[source], descending=True, stable=True)
            head, head_ids = full.cpu().double().numpy(), full_ids.cpu().numpy()
            kept = _kept(head, row.sampling, complete=True) or 1
        cdf = np.cumsum(head[:kept])
        point = uniform(row.seed, row.sample, row.position) * cdf[-1]
        result.append((source, int(head_ids[min(int(np.searchsorted(cdf, point, side="right")), kept - 1)])))
    return result


def _kept(head: np.ndarray, ask: Sampling, *, complete: bool) -> int | None:
    """How many of the sorted probabilities stay: min-p, then top-k, then top-p of what is left. None when `head`, the
    largest ones only, is too short to tell."""
    size = len(head)
    kept = size
    if ask.min_p > 0.0:
        kept = max(1, int(np.count_nonzero(head >= ask.min_p * head[0])))
    if ask.top_k > 0:
        kept = min(kept, ask.top_k)
    bounded = complete or kept < size or ask.top_k == size
    if ask.top_p >= 1.0:
        return kept if bounded else None
    cdf = np.cumsum(head[:kept])
    total = cdf[-1] if bounded else 1.0
    if not bounded and (ask.top_k > 0 or ask.min_p > 0.0):
        return None
    reached = int(np.searchsorted(cdf, ask.top_p * total, side="left")) + 1
    if reached > kept:
        return kept if bounded else None
    return reached
