"""The formula of sampling in plain torch; see reference.py."""

from __future__ import annotations

import torch

GREEDY_BELOW = 1e-5


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    uniform: torch.Tensor,
    raw: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(token int64 [rows], log-probability float32 [rows] of that token under `raw`, None = under `logits`).

    `logits`, `raw` [rows, vocabulary] of any float type; `temperature`, `top_p`, `min_p` float32 [rows], `top_k` int32
    [rows], `uniform` float64 [rows] in 0 .. 1. Temperature below 1e-5: the first of the largest. Else p =
    softmax(logits / temperature); without a filter (top_k 0, top_p 1, min_p 0) the first token, by id, whose running sum
    of p passes uniform times the whole. With one, tokens are ordered by falling p (equal ones by id): those stay with
    p >= min_p * max p, of these the first top_k, of these the fewest whose sum is at least top_p of theirs; then the
    first, in that order, whose running sum passes uniform times the sum of the kept. A row that is not finite gives a
    log-probability that is not.
    Source: inverse transform sampling; Fan et al., arXiv 1805.04833 (top-k); Holtzman et al., arXiv 1904.09751 (top-p);
    Nguyen et al., arXiv 2407.01082 (min-p).
    """
    scores = torch.log_softmax((logits if raw is None else raw).float(), -1)
    tokens = logits.float().argmax(-1)
    for row in (temperature >= GREEDY_BELOW).nonzero()[:, 0].tolist():
        p = torch.softmax(logits[row].float() / temperature[row], -1).double()
        k, share, least = int(top_k[row]), float(top_p[row]), float(min_p[row])
        if k == 0 and share >= 1.0 and least == 0.0:
            tokens[row] = _drawn(p, float(uniform[row]))
            continue
        p, ids = torch.sort(p, descending=True, stable=True)
        kept = max(1, int((p >= least * p[0]).sum()))
        kept = min(kept, k) if k > 0 else kept
        if share < 1.0:
            running = p[:kept].cumsum(0)
            kept = min(kept, int(torch.searchsorted(running, share * running[-1])) + 1)
        tokens[row] = ids[_drawn(p[:kept], float(uniform[row]))]
    return tokens, scores.gather(1, tokens[:, None])[:, 0]


def _drawn(p: torch.Tensor, uniform: float) -> int:
    running = p.cumsum(0)
    return min(int(torch.searchsorted(running, uniform * running[-1], right=True)), len(p) - 1)
