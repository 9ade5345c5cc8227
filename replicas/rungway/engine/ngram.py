"""Drafts from the text itself: what followed the last time that the same words stood here (prompt lookup; Saxena 2023).

Costs next to nothing, and is right where an answer repeats its prompt or itself: code edits, quotes, lists, JSON. The
grade of an offer is the length of the match, which grows with each draft that was right.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from rungway.engine.pace import Offer
from rungway.engine.sampler import Row
from rungway.engine.sequence import Sequence

MATCH_MAX = 8  # tokens; a longer match says little more
LOOKS_MAX = 16  # places that are compared for the longest match, latest first


class NgramDrafter:
    """One index for each running sequence, caught up when drafts are asked for; O(tokens) of memory each."""

    costs = False

    def __init__(self) -> None:
        self._indexes: dict[Sequence, Index] = {}

    def propose(self, asks: Seq[tuple[Sequence, Row]], counts: Seq[int]) -> list[Offer]:
        return [self._index(seq).continued(seq.tokens, count) for (seq, _), count in zip(asks, counts, strict=True)]

    def forget(self, seq: Sequence) -> None:
        self._indexes.pop(seq, None)

    def _index(self, seq: Sequence) -> Index:
        index = self._indexes.get(seq)
        if index is None:
            index = self._indexes[seq] = Index()
        return index


class Index:
    """Where pairs of tokens stand in one growing text: the latest place of each, and from each place the one before."""

    __slots__ = ("_before", "_pairs", "_singles")

    def __init__(self) -> None:
        self._pairs: dict[tuple[int, int], int] = {}
        self._singles: dict[int, int] = {}
        self._before: list[int] = [-1]  # place -> earlier place of the same pair; a place is where the pair has ended

    def continued(self, tokens: list[int], count: int) -> Offer:
        """Up to `count` tokens that followed the longest earlier match of the text's end; of equal ones the latest. A
        continuation that runs into the end of the text goes on with itself, as a period does."""
        self._catch_up(tokens)
        place, length = self._longest(tokens)
        if not length:
            return Offer([], 0)
        drafts = tokens[place : place + count]
        period = len(tokens) - place
        while len(drafts) < count:
            drafts.append(drafts[len(drafts) - period])
        return Offer(drafts, length)

    def _catch_up(self, tokens: list[int]) -> None:
        """Notes every place that something follows; the end of the text itself only once it has grown."""
        for place in range(len(self._before), len(tokens)):
            pair = (tokens[place - 2], tokens[place - 1]) if place > 1 else None
            self._singles[tokens[place - 1]] = place
            self._before.append(self._pairs.get(pair, -1) if pair else -1)
            if pair:
                self._pairs[pair] = place

    def _longest(self, tokens: list[int]) -> tuple[int, int]:
        end = len(tokens)
        best, length = self._singles.get(tokens[-1], -1), 1
        if best < 0:
            return best, 0
        place = self._pairs.get((tokens[-2], tokens[-1]), -1) if end > 1 else -1
        for _ in range(LOOKS_MAX):
            if place < 0 or length == MATCH_MAX:
                break
            same = 2
            while same < MATCH_MAX and same < place and tokens[place - 1 - same] == tokens[end - 1 - same]:
                same += 1
            if same > length:
                best, length = place, same
            place = self._before[place]
        return best, length
