"""Logits to the log-probabilities of the tokens that a prompt has, whose state is scores.py's."""

from __future__ import annotations

from collections.abc import Callable

import torch

from rungway.engine.protocol import PromptToken
from rungway.engine.sampler import LOGPROB_MIN

LOGITS_BYTES_MAX = 64 << 20
"""Of a step's logits that are read for prompts, in float32."""


def rows_max(vocab_size: int) -> int:
    """Positions whose logits fit into the bound."""
    return max(1, LOGITS_BYTES_MAX // (4 * vocab_size))


def score(
    logits: torch.Tensor,
    log_sums: torch.Tensor | None,
    targets: list[int],
    *,
    tops: int,
    name: Callable[[int], bytes],
) -> list[PromptToken]:
    """Of each row of `logits` [rows, vocabulary], what it says about its token of `targets`. `log_sums` [rows], None = found
    here; `name`: the bytes of a token. Values that are not finite become LOGPROB_MIN."""
    raw = logits.float()
    sums = torch.logsumexp(raw, -1) if log_sums is None else log_sums
    heights = raw.gather(1, torch.tensor(targets, device=raw.device)[:, None])
    ranks = (raw > heights).sum(-1) + 1
    best, ids = torch.topk(raw, min(tops, raw.shape[1]), dim=-1)
    rows = zip(
        targets,
        (heights[:, 0] - sums).tolist(),
        ranks.tolist(),
        ids.tolist(),
        (best - sums[:, None]).tolist(),
        strict=True,
    )
    return [
        PromptToken(
            target,
            name(target),
            _finite(logprob),
            rank,
            [(token, name(token), _finite(value)) for token, value in zip(tokens, values, strict=True)],
        )
        for target, logprob, rank, tokens, values in rows
    ]


def _finite(logprob: float) -> float:
    """Also of what is not a number."""
    return logprob if logprob > LOGPROB_MIN else LOGPROB_MIN
