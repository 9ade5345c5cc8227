"""Beam search over the sequences of one request. Pure: who computes the beams, and where they wait, is the scheduler's.

In each round every beam names its best next tokens. Of all these, the best `width` that do not end go on; those of the
best `width` that do end are finished, and of the finished ones the best `width` by total / length ** length_penalty are
kept. The search is over at the most tokens, or when no running beam could still beat a finished one at its present
length. This is transformers' search with `early_stopping=False`, the default there. Source: Graves, arXiv 1211.3711; Wu et
al., arXiv 1609.08144 (length penalty).

A beam ends with a token that ends it, or with one that completes a stop string. Where so many complete one that fewer than
`width` are left, fewer go on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from rungway.engine.protocol import Sampling
from rungway.engine.row import Sampled

Top = list[tuple[int, float]]


class Hypothesis(NamedTuple):
    """A finished answer: its tokens with the end, each with its log-probability and the alternatives at its place, the sum of
    the log-probabilities, and what it is ranked by."""

    tokens: list[int]
    said: list[Sampled]
    total: float
    score: float


class Turn(NamedTuple):
    """`forks`: for each beam of the next round the beam that it continues and its new token. `ended`: the results, best
    first, where there is no next round."""

    forks: list[tuple[int, int]]
    ended: list[Hypothesis]


class Stops:
    """Stop strings, looked for in bytes: UTF-8 has no character inside another one's bytes."""

    def __init__(self, strings: tuple[str, ...], bytes_of: Callable[[int], bytes]) -> None:
        self._strings = [string.encode("utf-8", "surrogatepass") for string in strings]
        self._most = max(map(len, self._strings), default=0)
        self._bytes_of = bytes_of

    def met(self, tokens: list[int], last: int) -> bool:
        """Whether `last`, behind `tokens`, completes one."""
        if not self._strings:
            return False
        ending = self._bytes_of(last)
        before = b""
        for token in reversed(tokens):
            if len(before) >= self._most - 1:
                break
            before = self._bytes_of(token) + before
        before = before[
            max(0, len(before) - self._most + 1) :
        ]  # as much as a string that ends in `last` can have of it
        return any(string in before + ending for string in self._strings)


class Beams:
    """The state of one search. It begins with beam 0 alone, which is the prompt."""

    def __init__(
        self, ask: Sampling, *, width: int, prompt: int, most: int, ends: frozenset[int], stops: Stops
    ) -> None:
        """`prompt` tokens, then up to `most` new ones; `ends`: tokens that end a beam."""
        self.width = width
        self._prompt = prompt
        self._most = most
        self._ends = ends
        self._stops = stops
        self._shown = ask.logprobs
        self._penalty = ask.length_penalty
        self._totals = [np.float32(0.0)]
        self._said: list[list[Sampled]] = [[]]  # of each running beam
        self._offers: dict[int, Top] = {}
        self._finished: list[Hypothesis] = []
        # as many as make sure that `width` of them do not end
        self._count = max(2, 1 + len(ends)) * width
        self.ask = Sampling(max_tokens=1, temperature=0.0, logprobs=max(self._count, ask.logprobs or 0))

    def offer(self, beam: int, top: Top) -> bool:
        """The best next tokens of a running beam, as `ask` gives them. True when it was the last one of this round."""
        self._offers[beam] = top
        return len(self._offers) == len(self._totals)

    def turn(self, texts: list[list[int]]) -> Turn:
        """Ends a round; `texts`: of each beam the prompt and its tokens."""
        ranked = sorted(
            (
                (-np.float32(self._totals[beam] + np.float32(logprob)), beam, token, logprob)
                for beam, top in self._offers.items()
                for token, logprob in top
            ),
        )[: self._count]
        length = len(texts[0]) - self._prompt + 1
        last = length >= self._most
        over = [self._over(texts[beam], token) for _, beam, token, _ in ranked]
        for (loss, beam, token, logprob), ended in zip(ranked[: self.width], over, strict=False):
            if last or ended:
                score = float(-loss / np.float32(length**self._penalty))
                tokens = [*texts[beam][self._prompt :], token]
                self._finished.append(Hypothesis(tokens, self._with(beam, token, logprob), float(-loss), score))
        self._finished.sort(key=lambda one: -one.score)
        del self._finished[self.width :]
        running = [one for one, ended in zip(ranked, over, strict=True) if not (last or ended)][: self.width]
        if not running or self._decided(-running[0][0], length):
            return Turn([], self._finished)
        self._totals = [-loss for loss, _, _, _ in running]
        self._said = [self._with(beam, token, logprob) for _, beam, token, logprob in running]
        self._offers = {}
        return Turn([(beam, token) for _, beam, token, _ in running], [])

    def _over(self, text: list[int], token: int) -> bool:
        return token in self._ends or self._stops.met(text[self._prompt :], token)

    def _with(self, beam: int, token: int, logprob: float) -> list[Sampled]:
        """What a beam has said with one token more; nothing where nobody wants to know."""
        if self._shown is None:
            return []
        return [*self._said[beam], Sampled(token, logprob, self._offers[beam][: self._shown])]

    def _decided(self, best: np.float32, length: int) -> bool:
        full = len(self._finished) == self.width
        return full and float(best / np.float32(length**self._penalty)) <= self._finished[-1].score
