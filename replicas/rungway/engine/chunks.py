"""How much of a step one prefill may take while others share it. Pure; durations are given.

A step lasts as long as everything in it, so a long prompt's part decides how long those that decode wait for their next
token. Where nothing is configured, the part is what makes a step at most `SLOWDOWN` times as long as one of the same
decodes alone, as measured: what a decode step takes, and what a prefill adds to it,

    token_ns * n + pair_ns * (n + READ_TOKENS) * context

for n tokens: products with the weights, and attention, which reads the whole context however few the tokens are. Without
that last part a small share would look dear for each token, shrink, and look dearer still.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from rungway.engine.pace import Costs

SLOWDOWN = 2.5
CHUNK_FIRST = 16  # tokens; until it is known what they cost
CHUNK_MIN = 4  # tokens; a prompt gets on, whatever it costs
READ_TOKENS = 2  # reading the keys and values costs what attending with so many tokens does
_CONTEXT = 1024  # tokens that a context is counted in, so that both costs weigh alike in what is learnt
_FRESH = 0.2  # weight of a new measurement


class Chunks:
    """`configured` tokens, or measured up to `step_tokens` / 2."""

    def __init__(self, configured: int | None, step_tokens: int) -> None:
        self._configured = configured
        self._half = max(1, step_tokens // 2)
        self._decodes = Costs()  # of pure decode steps, ns
        self._token_ns: float | None = None  # what a prompt token adds to a step with decodes, whatever its context
        self._pair_ns = 0.0  # what it adds for each 1024 tokens of context
        self._token_ns_max = math.inf  # the first with a step's fixed cost in it, from steps without decodes

    def cap(self, decoding: int, context: int) -> int:
        """Tokens of a prefill that has computed `context`, in a step with others, `decoding` of which decode."""
        if self._configured is not None:
            return self._configured
        if not decoding:
            return self._half
        token_ns = self._token_ns_max if self._token_ns is None else self._token_ns
        if token_ns == math.inf:
            return min(self._half, CHUNK_FIRST)
        far_ns = self._pair_ns * context / _CONTEXT
        room = (SLOWDOWN - 1.0) * self._decodes.of(decoding) - READ_TOKENS * far_ns
        return (
            self._half if room >= self._half * (token_ns + far_ns) else max(CHUNK_MIN, int(room / (token_ns + far_ns)))
        )

    def learn(self, decoding: int, prefills: Iterable[tuple[int, int]], spent_ns: int) -> None:
        """A step of `decoding` tokens of decoding sequences and of prefills (context, tokens) took `spent_ns`."""
        tokens, reach = 0, 0.0
        for context, size in prefills:
            tokens += size
            reach += (size + READ_TOKENS) * context / _CONTEXT
        if not tokens:
            self._decodes.learn(decoding, spent_ns)
        elif not decoding:
            self._token_ns_max = min(self._token_ns_max, spent_ns / tokens)
        else:
            self._adapt(tokens, reach, max(0.0, spent_ns - self._decodes.of(decoding)))

    def _adapt(self, tokens: int, reach: float, added_ns: float) -> None:
        """Moves both costs towards what was measured, each by its part in it (normalised least mean squares): the cost of
        a step like this one moves by `_FRESH` of its error."""
        if self._token_ns is None:
            self._token_ns = added_ns / tokens
            return
        missed = added_ns - self._token_ns * tokens - self._pair_ns * reach
        by = _FRESH * missed / (tokens * tokens + reach * reach)
        self._token_ns = max(0.0, self._token_ns + by * tokens)
        self._pair_ns = max(0.0, self._pair_ns + by * reach)
