"""Drafters for tests, and engines that draft in every step whatever it costs."""

from __future__ import annotations

import random
from collections.abc import Callable
from collections.abc import Sequence as Seq

from rungway.engine.drafts import Drafter, Speculation
from rungway.engine.pace import Offer, Pace
from rungway.engine.sampler import Row
from rungway.engine.sequence import Sequence

Guess = Callable[[Sequence, int], list[int]]


class ScriptedDrafter:
    """Guesses by a function of the sequence; remembers who was forgotten."""

    costs = False

    def __init__(self, guess: Guess) -> None:
        self.guess = guess
        self.forgotten: list[Sequence] = []

    def propose(self, asks: Seq[tuple[Sequence, Row]], counts: Seq[int]) -> list[Offer]:
        return [Offer(self.guess(seq, count)[:count], 4) for (seq, _), count in zip(asks, counts, strict=True)]

    def forget(self, seq: Sequence) -> None:
        self.forgotten.append(seq)


class EagerPace(Pace):
    """Always as many drafts as there are."""

    def choose(self, batch: int, offers: Seq[tuple[int, int]], *, made: bool) -> int:
        return min(self.tokens_max, max((count for _, count in offers), default=0))


def eager(drafter: Drafter, tokens_max: int = 4) -> Speculation:
    return Speculation(drafter, EagerPace(tokens_max, 1000), lambda: 0)


def foretold(answers: dict[str, list[int]], wrong: float, seed: int = 5) -> Guess:
    """Knows the answers by request (and, with several samples, by `request/index`), and errs with a probability."""
    rng = random.Random(seed)

    def guess(seq: Sequence, count: int) -> list[int]:
        answer = answers.get(seq.name) or answers[seq.group.work.request_id]
        at = len(seq.tokens) - len(seq.group.work.prompt_ids)
        return [(token + 1) % 250 if rng.random() < wrong else token for token in answer[at : at + count]]

    return guess
