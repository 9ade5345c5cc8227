"""Who starts to run and who gives way. Pure Python.

The head of the queue starts when a row and blocks for all tokens that it knows are free. Two things make others give
way: a running sequence that lacks the block for its next token, and a head of a more urgent band (see victims.py).
"""

from __future__ import annotations

import math

from rungway.engine.fairness import FairQueue
from rungway.engine.lpm import PrefixOrder
from rungway.engine.running import Running
from rungway.engine.sequence import Sequence, Status
from rungway.engine.tables import Tables
from rungway.engine.victims import enough_for, least_worth_keeping


class Admission:
    """Moves sequences between the queue and the rows."""

    def __init__(
        self,
        tables: Tables,
        running: Running,
        waiting: FairQueue,
        order: PrefixOrder | None = None,
        *,
        watermark: float,
    ) -> None:
        """`watermark`: part of the blocks that stays free at an admission while others run."""
        self.preemptions = 0
        self._kept_free = math.ceil(watermark * tables.pool.total)
        self._tables = tables
        self._pool = tables.pool
        self._running = running
        self._waiting = waiting
        self._order = order

    def enqueue(self, seq: Sequence) -> None:
        seq.status = Status.WAITING
        self._waiting.push(seq)

    def preempt(self, seq: Sequence) -> None:
        """Back into the queue; its blocks are given back, to be found in the prefix cache or computed again."""
        self._running.leave(seq)
        self._waiting.forgive(seq)
        self._tables.free(seq)
        seq.preemptions += 1
        self.preemptions += 1
        self.enqueue(seq)

    def feed(self) -> int | None:
        """Gives every running sequence the block for its next token, at the cost of the one least worth keeping. Returns
        the most urgent band that gave way, None where nobody had to."""
        given_way: int | None = None
        hungry = self._running.hungry
        for seq in sorted(hungry, key=_by_urgency) if hungry else ():
            while seq.status is Status.RUNNING and self._tables.missing(seq) > 0:
                if not self._tables.take(seq, 1) and not self._tables.drop_waiting(keep=None):
                    victim = least_worth_keeping(self._running, self._pool.over_quota)
                    self.preempt(victim)
                    given_way = victim.priority if given_way is None else min(given_way, victim.priority)
        hungry.clear()
        return given_way

    def admit_urgent(self) -> None:
        """Heads of the queue that are more urgent than running ones start now, at the cost of just enough of these."""
        while (head := self._urgent()) is not None:
            self._tables.find(head)
            missing = self._tables.missing(head)
            victims = enough_for(
                head,
                self._running,
                rows_free=self._running.rows_free,
                blocks_short=lambda gone: missing + self._spare(gone) - self._pool.free,  # noqa: B023
                frees=lambda seq: self._pool.exclusive(seq.blocks),
                got=self._waiting.got,
                over=self._pool.over_quota,
            )
            for victim in victims or ():
                self.preempt(victim)
            if victims is None or self.admit(above=None) is None:
                return

    def admit(self, *, above: int | None) -> Sequence | None:
        """Moves the head of the queue to running with blocks for all tokens that it knows, or returns None. It has to be
        more urgent than the band `above`, which gave way in this step: it would only take the victim's place."""
        if not self._running.rows_free:
            return None
        seq = self._waiting.head()
        if seq is None or (above is not None and seq.priority >= above):
            return None
        idle = not len(self._running)
        self._tables.find(seq)
        missing = self._tables.missing(seq)
        if idle and missing > self._pool.free:
            self._tables.drop_waiting(keep=seq)
        if missing + self._spare() > self._pool.free or not self._tables.take(seq, missing):
            return None
        self._tables.runs(seq)
        self._waiting.admitted(seq)
        seq.status = Status.RUNNING
        self._running.enter(seq)
        seq.charged = max(seq.charged, seq.computed)  # what was found costs nothing
        if self._order is not None:
            self._order.started(seq)
        if seq.group.cached is None:
            seq.group.cached = min(seq.computed, len(seq.group.work.prompt_ids))
        return seq

    def _spare(self, gone: int = 0) -> int:
        """Blocks to leave free once `gone` more have stopped running: one for each that runs, or the newcomer would be
        preempted at once, and no less than the watermark."""
        left = len(self._running) - gone
        return max(left, self._kept_free) if left > 0 else 0

    def _urgent(self) -> Sequence | None:
        """The head of the queue where it is of a more urgent band than something that runs."""
        band, last = self._waiting.band, self._running.least_urgent
        if band is None or last is None or last <= band:
            return None
        return self._waiting.head()


def _by_urgency(seq: Sequence) -> tuple[bool, int, int]:
    """Decodes before prefills, then by priority and age."""
    return (seq.wanted > 1, seq.priority, seq.arrival)
