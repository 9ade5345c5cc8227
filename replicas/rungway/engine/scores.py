"""The log-probabilities of a prompt's own tokens: which logits they need, and how far they have come. Pure Python.

The logits behind position p say how probable the token at p + 1 was, so all positions but the last are read, once each. A
position that the prefix cache gives has no logits: as long as it is not read, it is computed (sequence.findable). What was
read stays through a preemption.
"""

from __future__ import annotations

from rungway.engine.protocol import PromptToken


class Scores:
    """Of one request. `read`: leading positions whose logits have been read."""

    __slots__ = ("_given", "_ids", "_tokens", "read")

    def __init__(self, ids: list[int]) -> None:
        """`ids` of the prompt, at least one."""
        self.read = 0
        self._ids = ids
        self._tokens: list[PromptToken] = []
        self._given = False

    @property
    def whole(self) -> bool:
        return self.read == len(self._ids) - 1

    def due(self, computed: int, size: int) -> range:
        """Of the positions computed .. computed + size - 1, those to be read."""
        return range(max(self.read, computed), max(self.read, min(computed + size, len(self._ids) - 1)))

    def fitting(self, computed: int, size: int, rows: int) -> int:
        """The largest part of `size` for which at most `rows` positions are read."""
        return size if len(self.due(computed, size)) <= rows else max(self.read, computed) + rows - computed

    def take(self, tokens: list[PromptToken]) -> None:
        """The next ones, those behind positions `read` on."""
        self._tokens += tokens
        self.read += len(tokens)

    def give(self, first: bytes) -> list[PromptToken] | None:
        """All of them, once they are whole, the first time that this is asked; else None. `first`: bytes of the first one."""
        if self._given or not self.whole:
            return None
        self._given = True
        return [PromptToken(self._ids[0], first, None, 0, []), *self._tokens]
