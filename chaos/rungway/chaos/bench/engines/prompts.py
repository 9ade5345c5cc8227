"""Texts to read and to go on with, made from a seed: words that a tokenizer knows, never the same text twice."""

from __future__ import annotations

import random
from typing import Protocol

_WORDS = (
    "river stone window garden letter captain winter market silver engine paper mountain doctor village morning bridge "
    "island story teacher forest harbour music copper evening kitchen planet signal valley number station question "
    "answer function returns value list after before under between small large early late open closed often never"
)
_SENTENCE = 12


class Encoder(Protocol):
    def encode(self, text: str) -> list[int]: ...


def text_ids(encoder: Encoder, tokens: int, seed: int) -> list[int]:
    """Exactly `tokens` tokens of sentences."""
    chance = random.Random(seed)
    known = _WORDS.split()
    ids: list[int] = []
    while len(ids) < tokens:
        words = [chance.choice(known) for _ in range(_SENTENCE)]
        ids += encoder.encode(f"{' '.join(words).capitalize()} {chance.randrange(1000)}. ")
    return ids[:tokens]
