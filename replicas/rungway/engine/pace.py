"""How many drafts to verify: the number that gives most tokens for the time, by what was measured, often none. Pure.

Measured are the duration of pure decode steps by their rows (a draft is a row), what a draft costs to make, and how often
drafts of a grade were right. A number that pays too little more than none counts as none. A switch that is off looks
again now and then, for a few steps, and ever more rarely; one that is on takes a step without drafts now and then, so
that what it compares with stays fresh. Rows that were never measured count as free: they are tried, and then known.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

GAIN_MIN = 1.03  # tokens for the time, drafts / none; less is within the noise
GRADES = 12
PROBE_STEPS = 8
PROBE_AFTER, PROBE_AFTER_MAX = 64, 2048  # steps without drafts between two looks
PLAIN_AFTER = 48  # steps with drafts between two without
ROWS_EXACT = 64  # costs are kept for each number of rows up to here, then for each 16

_SPREAD = 128  # steps with drafts over which the time for reading new texts is spread
_FRESH = 0.15  # weight of a new duration once there are several
_OUTLIER = 2.0  # a duration counts at most this many times what was expected: others use the machine, too
_FORGET = 0.98  # weight of what was known about a grade, at each draft judged
_PRIOR = 2.0  # drafts that a grade without history is taken to have been judged on, two of three right


class Offer(NamedTuple):
    """Drafts for one sequence. `grade`: how well founded the first one is; each further one is a grade better, because it
    only counts where those before it were right. See the drafters for what a grade means."""

    tokens: list[int]
    grade: int


class Costs:
    """Moving average of a duration, ns, by size."""

    def __init__(self) -> None:
        self._sizes: list[int] = []
        self._known: dict[int, tuple[float, int]] = {}  # size -> (average, times)

    def learn(self, size: int, spent_ns: int) -> None:
        size = _cell(size)
        average, times = self._known.get(size, (float(spent_ns), 0))
        if not times:
            self._sizes.insert(bisect_left(self._sizes, size), size)
        spent = min(float(spent_ns), average * _OUTLIER)
        weight = max(1.0 / (times + 1), _FRESH)
        self._known[size] = (average + weight * (spent - average), times + 1)

    def of(self, size: int) -> float:
        """At least 1. Between two known sizes in proportion; outside of them as the nearest."""
        size = _cell(size)
        if not self._sizes:
            return 1.0
        at = bisect_left(self._sizes, size)
        above = self._sizes[min(at, len(self._sizes) - 1)]
        below = above if above <= size or at == 0 else self._sizes[at - 1]
        low, high = self._known[below][0], self._known[above][0]
        part = (size - below) / (above - below) if above > below else 0.0
        return max(1.0, low + part * (high - low))


class Pace:
    """`tokens_max`: drafts of one sequence in a step. `batch_max`: more decoding sequences than this get none."""

    def __init__(self, tokens_max: int, batch_max: int) -> None:
        assert tokens_max >= 1 and batch_max >= 1
        self.tokens_max = tokens_max
        self.batch_max = batch_max
        self.steps = Costs()
        self.drafts = Costs()  # of one draft for each of so many sequences
        self._prepared_ns = 0.0  # for each step with drafts, beside the drafts themselves
        self._right = [_PRIOR * 2 / 3] * GRADES
        self._judged = [_PRIOR] * GRADES
        self._off = 0  # steps without drafts since the last look
        self._probe_after = PROBE_AFTER
        self._probing = 0
        self._on = 0  # steps with drafts since the last one without

    def choose(self, batch: int, offers: Sequence[tuple[int, int]], *, made: bool) -> int:
        """How many drafts to verify for each of the sequences that have them, given (grade, count) of each offer, in a step
        of `batch` decoding sequences. `made`: the drafts are there and cost nothing more."""
        most = min(self.tokens_max, max((count for _, count in offers), default=0))
        if not most or batch > self.batch_max:
            return 0
        values = [self._value(batch, offers, count, made) for count in range(most + 1)]
        best = max(range(1, most + 1), key=values.__getitem__)
        return self._switched(best, pays=values[best] >= GAIN_MIN * values[0])

    def prepared(self, spent_ns: int) -> None:
        """A step with drafts, and what it took to get ready for later ones: a draft model reads texts that are new to it."""
        self._prepared_ns += (spent_ns - self._prepared_ns) / _SPREAD

    def judge(self, grade: int, count: int, right: int) -> None:
        """Of `count` drafts the first `right` were right. What came after the first wrong one says nothing."""
        for at in range(min(count, right + 1)):
            cell = min(grade + at, GRADES - 1)
            self._right[cell] = _FORGET * self._right[cell] + (at < right)
            self._judged[cell] = _FORGET * self._judged[cell] + 1.0

    def rate(self, grade: int) -> float:
        """The share of drafts of a grade that were right."""
        cell = min(grade, GRADES - 1)
        return self._right[cell] / self._judged[cell]

    def _value(self, batch: int, offers: Sequence[tuple[int, int]], most: int, made: bool) -> float:
        """Tokens for the time of a step with up to `most` drafts for each sequence."""
        tokens, rows = float(batch), batch
        for grade, count in offers:
            chance = 1.0
            for at in range(min(count, most)):
                chance *= self.rate(grade + at)
                tokens += chance
                rows += 1
        spent = max(self.steps.of(rows), self.steps.of(batch))
        if not made:
            spent += most * self.drafts.of(len(offers)) + (self._prepared_ns if most else 0.0)
        return tokens / spent

    def _switched(self, best: int, *, pays: bool) -> int:
        if pays:
            if self._probing:
                self._off, self._probe_after, self._probing = 0, PROBE_AFTER, 0
            self._on = (self._on + 1) % PLAIN_AFTER
            return best if self._on else 0
        if self._probing:
            self._probing -= 1
            return best
        self._off += 1
        if self._off < self._probe_after:
            return 0
        self._off = 0
        self._probe_after = min(2 * self._probe_after, PROBE_AFTER_MAX)
        self._probing = PROBE_STEPS - 1
        return best


def _cell(size: int) -> int:
    return size if size <= ROWS_EXACT else -(-size // 16) * 16
