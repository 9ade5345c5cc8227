"""Beam search over the sequences of one request. Pure: who computes the beams, and where they wait, is the scheduler's.

In each round every beam names its best next tokens. Of all these, the best `width` that do not end go on; those of the
best `width` that do end are finished, and of the finished ones the best `width` by total / length ** length_penalty are
kept. The search is over at the most tokens, or when no running beam could still beat a finished one at its present
length. This is transformers' search with `early_stopping=False`, the default there. Source: Graves, arXiv 1211.3711; Wu et
al., arXiv 1609.08144 (length penalty).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from rungway.engine.protocol import Sampling

Top = list[tuple[int, float]]


class Hypothesis(NamedTuple):
    """A finished answer: its tokens with the end, the sum of their log-probabilities, and what it is ranked by."""

    tokens: list[int]
    total: float
    score: float


class Turn(NamedTuple):
    """`forks`: for each beam of the next round the beam that it continues and its new token. `ended`: the results, best
    first, where there is no next round."""

    forks: list[tuple[int, int]]
    ended: list[Hypothesis]


class Beams:
    """The state of one search. It begins with beam 0 alone, which is the prompt."""

    def __init__(self, ask: Sampling, *, width: int, prompt: int, most: int, ends: frozenset[int]) -> None:
        """`prompt` tokens, then up to `most` new ones; `ends`: tokens that end a beam."""
        self.width = width
        self._prompt = prompt
        self._most = most
        self._ends = ends
        self._penalty = ask.length_penalty
        self._totals = [np.float32(0.0)]
        self._offers: dict[int, Top] = {}
        self._finished: list[Hypothesis] = []
        # as many as make sure that `width` of them do not end
        self._count = max(2, 1 + len(ends)) * width
        self.ask = Sampling(max_tokens=1, temperature=0.0, logprobs=self._count)

    def offer(self, beam: int, top: Top) -> bool:
        """The best next tokens of a running beam, as `ask` gives them. True when it was the last one of this round."""
        self._offers[beam] = top
        return len(self._offers) == len(self._totals)

    def turn(self, texts: list[list[int]]) -> Turn:
        """Ends a round; `texts`: of each beam the prompt and its tokens."""
        ranked = sorted(
            (
                (-np.float32(self._totals[beam] + np.float32(logprob)), beam, token)
                for beam, top in self._offers.items()
                for token, logprob in top
            ),
        )[: self._count]
        self._offers = {}
        length = len(texts[0]) - self._prompt + 1
        last = length >= self._most
        for loss, beam, token in ranked[: self.width]:
            if last or token in self._ends:
                score = float(-loss / np.float32(length**self._penalty))
                self._finished.append(Hypothesis([*texts[beam][self._prompt :], token], float(-loss), score))
        self._finished.sort(key=lambda one: -one.score)
        del self._finished[self.width :]
        running = [] if last else [one for one in ranked if one[2] not in self._ends][: self.width]
        if not running or self._decided(-running[0][0], length):
            return Turn([], self._finished)
        self._totals = [-loss for loss, _, _ in running]
        return Turn([(beam, token) for _, beam, token in running], [])

    def _decided(self, best: np.float32, length: int) -> bool:
        full = len(self._finished) == self.width
        return full and float(best / np.float32(length**self._penalty)) <= self._finished[-1].score
