"""What decodes and prefills cost in a step, as measured. Pure; durations are given, ns.

    decodes   fixed + row * sequences + read * (their contexts together)
    prefills  token * n + pair * ((n + READ_TOKENS) * context + n * n / 2)      for each, n tokens behind its context
    a token   fixed + row * sequences + read * (their contexts together) + token * n      of prompts together

The context's parts are attention: it reads all keys and values before, however few the tokens are, and works on each pair of
a token and one before it; over a long prompt that grows with the square. Were it not known apart from the rest, a share
behind a deep context would look dear for each token, shrink, and look dearer still; and what streams' own texts cost once
they are long would be taken for the prompt's doing.

The costs are moved towards what was measured, each by its part in it (normalised least mean squares): a step like this one
is then expected to cost nearer to what it did, and what this step says nothing about stays as it was.
"""

from __future__ import annotations

from collections.abc import Iterable

READ_TOKENS = 2  # reading the keys and values costs what attending with so many tokens does

# What is counted in these, so that costs weigh alike in what is learnt.
_ROWS, _READ, _CONTEXT, _TOKENS = 16, 1024, 1024, 64
_FRESH = 0.2  # weight of a new measurement, once there are several
_OUTLIER = 1.5  # a duration counts at most this many times what was expected: others use the machine, too


class DecodeCost:
    """Learnt from steps without prefills."""

    def __init__(self) -> None:
        self._costs = [0.0, 0.0, 0.0]
        self._times = 0

    @property
    def known(self) -> bool:
        return self._times > 0

    def of(self, rows: int, read: int) -> float:
        """Of `rows` sequences that have computed `read` tokens together."""
        return _expected(self._costs, (1.0, rows / _ROWS, read / _READ))

    def learn(self, rows: int, read: int, spent_ns: int, *, faster: float) -> float:
        """`faster`: its weight where it took less than expected, once there are several. One that took more may have waited
        for others on the machine, and costs that are thought too high are what streams would wait for: it counts as ever.
        Returns what was measured, outliers cut, over what had been expected."""
        parts = (1.0, rows / _ROWS, read / _READ)
        expected = self.of(rows, read) if self._times else float(spent_ns)
        spent = min(float(spent_ns), _OUTLIER * expected)
        self._times += 1
        weight = faster if spent < expected else _FRESH
        _move(self._costs, parts, spent, max(1.0 / self._times, weight))
        return spent / max(1.0, expected)


class PrefillCost:
    """Learnt from steps that they share with decodes."""

    def __init__(self) -> None:
        self._costs = [0.0, 0.0]
        self._known = False
        self._alone_ns: float | None = None  # of a token, with a step's fixed cost in it, from steps without decodes

    @property
    def known(self) -> bool:
        return self._known or self._alone_ns is not None

    def alone(self, tokens: int, spent_ns: int) -> None:
        """A step of prefills only: an upper bound, for as long as there is nothing better."""
        each = spent_ns / tokens
        self._alone_ns = each if self._alone_ns is None else min(self._alone_ns, each)

    def learn(self, prefills: Iterable[tuple[int, int]], spent_ns: float, beside_ns: float) -> None:
        """Prefills (context, tokens) in a step of `spent_ns`, of which the decodes are expected to be `beside_ns`."""
        tokens, pairs = 0, 0.0
        for context, size in prefills:
            tokens += size
            pairs += _pairs(context, size)
        if not self._known:
            self._costs, self._known = [max(0.0, spent_ns - beside_ns) / tokens, 0.0], True
            return
        parts = (float(tokens), pairs)
        most = _OUTLIER * (beside_ns + _expected(self._costs, parts))
        _move(self._costs, parts, max(0.0, min(spent_ns, most) - beside_ns), _FRESH)

    def fits(self, room_ns: float, context: int) -> float:
        """Tokens behind `context` that cost `room_ns`; 0 where reading the context takes more than that."""
        token_ns, pair_ns = self._costs if self._known else (self._alone_ns or 0.0, 0.0)
        room_ns -= pair_ns * _pairs(context, 0)
        if room_ns <= 0.0:
            return 0.0
        each_ns = token_ns + pair_ns * context / _CONTEXT
        # n * each + n * n * pair / 2 = room; in this form no difference of like numbers is taken
        under = each_ns + (each_ns * each_ns + 2.0 * room_ns * pair_ns / _CONTEXT) ** 0.5
        return 2.0 * room_ns / under if under > 0.0 else float("inf")


class TokenCost:
    """What a further token of a prompt, or of a text to embed, costs. Learnt from all steps. A step of a few short prompts is
    mostly its fixed cost and the decodes beside them: tokens over duration would call the engine slow, and long prompts with
    a deadline would be refused for it."""

    def __init__(self) -> None:
        self._costs = [0.0, 0.0, 0.0, 0.0]
        self._times = 0

    def learn(self, tokens: int, spent_ns: int, rows: int = 0, read: int = 0) -> None:
        """A step with so many of them, beside `rows` decoding sequences that had computed `read` tokens together."""
        parts = (1.0, rows / _ROWS, read / _READ, tokens / _TOKENS)
        most = _OUTLIER * _expected(self._costs, parts) if self._times else float(spent_ns)
        self._times += 1
        _move(self._costs, parts, min(float(spent_ns), most), max(1.0 / self._times, _FRESH))

    @property
    def tokens_per_s(self) -> float:
        """As a rate; 0 = not known."""
        return _TOKENS * 1e9 / self._costs[3] if self._costs[3] > 0.0 else 0.0


def _pairs(context: int, size: int) -> float:
    return ((size + READ_TOKENS) * context + size * size / 2) / _CONTEXT


def _expected(costs: Iterable[float], parts: Iterable[float]) -> float:
    return sum(cost * part for cost, part in zip(costs, parts, strict=True))


def _move(costs: list[float], parts: tuple[float, ...], spent: float, weight: float) -> None:
    by = weight * (spent - _expected(costs, parts)) / sum(part * part for part in parts)
    for at, part in enumerate(parts):
        costs[at] = max(0.0, costs[at] + by * part)
