"""How many output tokens to hold for a request before anyone knows its length.

Holding `max_tokens` would let one careless bound lock a tenant's whole quota; holding too little would let a burst
overshoot. So: what this tenant's answers on this tier were like (90th percentile), and until enough were seen, the
bound or the default. A wrong guess is topped up while streaming and refunded at settlement.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict, deque

SAMPLES_MIN = 20
SAMPLES_MAX = 128
KEYS_MAX = 4096


class _Sample:
    """The last outputs of one key, in order of arrival and sorted."""

    __slots__ = ("ordered", "recent")

    def __init__(self) -> None:
        self.recent: deque[int] = deque()
        self.ordered: list[int] = []

    def add(self, value: int, size_max: int) -> None:
        if len(self.recent) == size_max:
            del self.ordered[bisect_left(self.ordered, self.recent.popleft())]
        self.recent.append(value)
        insort(self.ordered, value)

    def p90(self) -> int:
        # Nearest rank: the smallest value that at least nine in ten do not exceed.
        return self.ordered[-(-9 * len(self.ordered) // 10) - 1]


class OutputPredictor:
    """Output tokens per sequence by (tenant, tier): the last `samples_max` answers of at most `keys_max` keys, of which
    the least recently used is dropped first."""

    __slots__ = ("_keys_max", "_samples", "_samples_max")

    def __init__(self, *, samples_max: int = SAMPLES_MAX, keys_max: int = KEYS_MAX) -> None:
        assert samples_max >= SAMPLES_MIN and keys_max >= 1
        self._samples_max = samples_max
        self._keys_max = keys_max
        self._samples: OrderedDict[tuple[str, str], _Sample] = OrderedDict()

    def __len__(self) -> int:
        return len(self._samples)

    def predict(self, tenant: str, tier: str, bound: int | None, default: int) -> int:
        """Tokens to hold for one sequence. `bound` is the client's max_tokens (after clamping to the context), or None;
        then the engine stops at `default`, so nothing above it is held either."""
        ceiling = default if bound is None else bound
        sample = self._samples.get((tenant, tier))
        if sample is None or len(sample.ordered) < SAMPLES_MIN:
            return ceiling
        return min(sample.p90(), ceiling)

    def observe(self, tenant: str, tier: str, output_tokens: int) -> None:
        """One sequence ended with `output_tokens`. Cancelled and failed answers are not observed: they were cut by
        something that has nothing to do with their length."""
        key = (tenant, tier)
        sample = self._samples.get(key)
        if sample is None:
            if len(self._samples) >= self._keys_max:
                self._samples.popitem(last=False)
            sample = self._samples[key] = _Sample()
        else:
            self._samples.move_to_end(key)
        sample.add(output_tokens, self._samples_max)
