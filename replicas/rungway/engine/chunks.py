"""How much of a step one prefill may take while others share it. Pure; durations are given.

A step lasts as long as everything in it, so a long prompt's part decides how long those that decode wait for their next
token. Where nothing is configured, the part is what makes a step at most `SLOWDOWN` times as long as one of the same
decodes alone, as measured: what a decode step takes, and what a prompt token adds to it.
"""

from __future__ import annotations

import math

from rungway.engine.pace import Costs

SLOWDOWN = 2.0
CHUNK_FIRST = 16  # tokens; until it is known what they cost
CHUNK_MIN = 4  # tokens; a prompt gets on, whatever it costs
_FRESH = 0.2  # weight of a new measurement


class Chunks:
    """`configured` tokens, or measured up to `step_tokens` / 2."""

    def __init__(self, configured: int | None, step_tokens: int) -> None:
        self._configured = configured
        self._half = max(1, step_tokens // 2)
        self._decodes = Costs()  # of pure decode steps, ns
        self._token_ns: float | None = None  # what a prompt token adds to a step with decodes
        self._token_ns_max = math.inf  # the same with the step's fixed cost in it, from steps without decodes

    def cap(self, decoding: int) -> int:
        """Tokens of one prefill in a step with others, `decoding` of which decode."""
        if self._configured is not None:
            return self._configured
        if not decoding:
            return self._half
        token_ns = self._token_ns_max if self._token_ns is None else self._token_ns
        if token_ns == math.inf:
            return min(self._half, CHUNK_FIRST)
        room = (SLOWDOWN - 1.0) * self._decodes.of(decoding)
        return self._half if room >= self._half * token_ns else max(CHUNK_MIN, int(room / token_ns))

    def learn(self, decoding: int, prefilling: int, spent_ns: int) -> None:
        """A step of so many tokens of decoding and of prefilling sequences took `spent_ns`."""
        if not prefilling:
            self._decodes.learn(decoding, spent_ns)
            return
        if decoding:
            added = max(0.0, spent_ns - self._decodes.of(decoding)) / prefilling
            known = added if self._token_ns is None else self._token_ns
            self._token_ns = known + (added - known) * _FRESH
        else:
            self._token_ns_max = min(self._token_ns_max, spent_ns / prefilling)
