"""What the embedding engine needs of a model. `bert.py` is one, `fake.py` another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol


class Piece(NamedTuple):
    """One input. `ids` is empty for encoders that go by `text`; `tokens` is its length either way."""

    ids: list[int]
    text: str
    tokens: int


class Failed(NamedTuple):
    """An input that gets no vector, and why."""

    why: str


class Encoder(Protocol):
    """`context`: most tokens of one input. `vocab_size`: bound of the ids. `goes_by_text`: it needs no ids. `path`: what computes
    it, for the stats."""

    dimensions: int
    context: int
    vocab_size: int
    goes_by_text: bool
    path: str

    def encode(self, batch: Sequence[Piece]) -> list[bytes | Failed | None]:
        """For each piece, in order, its vector: `dimensions` little-endian float32 of length 1. What a piece gets does
        not depend on the others, on a GPU up to rounding. None: it never gets any (only the fake's). Raises RuntimeError where the
        device fails."""
        ...
