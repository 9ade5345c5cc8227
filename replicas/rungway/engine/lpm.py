"""Longest cached prefix first, inside one share's line and within bounds. Pure Python.

Among the oldest `LOOK_MAX` requests of a line the one with most blocks in the prefix cache goes next, the older one where
two have as many. The oldest is passed over at most `SKIPS_MAX` times. A request whose beginning a running one of its share
is about to compute is held until it is computed, at most `HOLD_STEPS_MAX` steps: else both would compute it.

Order between shares is not touched (fairness.py), hence neither is what a share can be ahead of another.
"""

from __future__ import annotations

from collections import deque
from itertools import islice

from rungway.engine.blocks import BlockPool
from rungway.engine.running import Running
from rungway.engine.sequence import Sequence, Status

LOOK_MAX = 32
SKIPS_MAX = 16
HOLD_STEPS_MAX = 64
HOLD_TOKENS_MIN = 32  # less than this is computed twice rather than waited for


class PrefixOrder:
    """`new_step` first in every step, `started` for each sequence that begins to prefill in it."""

    def __init__(self, pool: BlockPool, running: Running) -> None:
        self._pool = pool
        self._running = running
        self._blocks_min = -(-HOLD_TOKENS_MIN // pool.block_tokens)
        self._step = 0
        self._found: dict[Sequence, int] = {}  # cached blocks, as of this step
        self._prefilling: dict[str, list[Sequence]] = {}

    def new_step(self) -> None:
        self._step += 1
        self._found.clear()
        self._prefilling.clear()
        for seq in self._running.prefilling():
            self._prefilling.setdefault(seq.share, []).append(seq)

    def started(self, seq: Sequence) -> None:
        """A waiting sequence was admitted."""
        self._prefilling.setdefault(seq.share, []).append(seq)

    def pick(self, line: deque[Sequence]) -> Sequence | None:
        """Who of a share's line goes next; None where all that may are held."""
        look = 1 if line[0].skips >= SKIPS_MAX else LOOK_MAX
        best, most = None, -1
        for seq in islice(line, look):
            found = self._cached(seq)
            if found > most and not self._held(seq, found):
                best, most = seq, found
        return best

    def _findable(self, seq: Sequence) -> int:
        return seq.findable(self._pool.block_tokens)

    def _whole(self, seq: Sequence) -> int:
        """Blocks of it that others could find."""
        return (len(seq.tokens) - 1) // self._pool.block_tokens

    def _cached(self, seq: Sequence) -> int:
        if seq.blocks:
            return len(seq.blocks)
        found = self._found.get(seq)
        if found is None:
            found = self._found[seq] = self._pool.known.count(seq.share, seq.tokens, seq.keys, self._findable(seq))
        return found

    def _held(self, seq: Sequence, found: int) -> bool:
        # who has waited already waits for the rest, however little it is
        last = found + (self._blocks_min if seq.held_since < 0 else 1) - 1
        others = self._prefilling.get(seq.share)
        if not others or last >= self._findable(seq):
            return False
        key = self._pool.known.key
        mine = key(seq.share, seq.tokens, seq.keys, last)
        for other in others:
            if other.status is not Status.RUNNING or not other.known <= last < self._whole(other):
                continue
            if key(other.share, other.tokens, other.keys, last) == mine:
                if seq.held_since < 0:
                    seq.held_since = self._step
                return self._step - seq.held_since < HOLD_STEPS_MAX
        return False
