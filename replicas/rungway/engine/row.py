"""One place to sample: what was asked, what is known there, and its random number.

Randomness is a function of (seed, sequence index, position): one uniform number picks the token by inverse CDF. It does
not depend on the batch, on preemption or on the replica, so a seeded answer can be had again anywhere.
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rungway.engine.protocol import Sampling

GREEDY_BELOW = 1e-5


class Row(NamedTuple):
    """One row to sample: `tokens[:prompt]` were asked, the rest is the answer so far. `position` counts the
    tokens of the answer including those of earlier attempts. `mask`: the tokens that may come, as guide.Guide gives it;
    what it has no bit for may not come. `eos`: the model's own ends, which `min_tokens` holds off."""

    sampling: Sampling
    tokens: list[int]
    prompt: int
    seed: int
    sample: int
    position: int
    mask: NDArray[np.uint32] | None = None
    eos: frozenset[int] = frozenset()

    @property
    def early(self) -> bool:
        """The answer is not yet as long as it has to be."""
        return self.position < self.sampling.min_tokens

    @property
    def hot(self) -> bool:
        return self.sampling.temperature >= GREEDY_BELOW


class Sampled(NamedTuple):
    """`token` is None when the row's logits are not finite, or, `stuck`, when the request's own demands leave no token.
    `top`: (token, logprob), best first."""

    token: int | None
    logprob: float
    top: list[tuple[int, float]]
    stuck: bool = False


def point(seed: int, index: int, position: int) -> int:
    """A number in 0 .. 2^64 - 1 that depends on nothing else."""
    key = b"%d/%d/%d" % (seed, index, position)
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little")


def uniform(seed: int, index: int, position: int) -> float:
    """`point` as a number in [0, 1)."""
    return min(point(seed, index, position) / 2.0**64, 1.0 - 2.0**-53)
