"""How much of a step one prefill may take while others share it. Pure; durations are given.

A step lasts as long as everything in it, so a long prompt's part decides how long those that decode wait for their next
token. Where nothing is configured, the part is what makes a step at most `SLOWDOWN` times as long as one of the same
decodes alone, as measured: what a decode step takes, and what a prompt token adds to it.
"""

from __future__ import annotations

from rungway.engine.pace import Costs

SLOWDOWN = 2.5
CHUNK_FIRST = 64  # tokens; until it is known what they cost
CHUNK_MIN = 16  # tokens; below that a step's fixed cost is all there is
_FRESH = 0.2  # weight of a new measurement


class Chunks:
    """`configured` tokens, or measured up to `step_tokens` / 2."""

    def __init__(self, configured: int | None, step_tokens: int) -> None:
        self._configured = configured
        self._half = max(1, step_tokens // 2)
        self._decodes = Costs()  # of pure decode steps, ns
        self._token_ns: float | None = None  # what a prompt token adds to a step

    def cap(self, decoding: int) -> int:
        """Tokens of one prefill in a step with others, `decoding` of which decode."""
        if self._configured is not None:
            return self._configured
        if not decoding:
            return self._half
        if self._token_ns is None:
            return min(self._half, CHUNK_FIRST)
        room = (SLOWDOWN - 1.0) * self._decodes.of(decoding)
        if room >= self._half * self._token_ns:
            return self._half
        return max(CHUNK_MIN, int(room / self._token_ns))

    def learn(self, decoding: int, prefilling: int, spent_ns: int) -> None:
        """A step of so many tokens of decoding and of prefilling sequences took `spent_ns`."""
        if not prefilling:
            self._decodes.learn(decoding, spent_ns)
            return
        # what a step without decodes would take is not known: its fixed cost would count as that of its tokens
        if not decoding:
            return
        added = max(0.0, spent_ns - self._decodes.of(decoding)) / prefilling
        known = added if self._token_ns is None else self._token_ns
        self._token_ns = known + (added - known) * _FRESH
