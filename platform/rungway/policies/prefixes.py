"""What a replica says that its prefix cache holds, as short block keys (`engine/chain.py`). An estimate: a key may have
left the cache since, and two texts may share 64 bits. The engine itself compares tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice

HELD_MAX = 65_536  # keys believed of one replica, whatever it sends


class HeldPrefixes:
    """One replica's keys, kept up to date from its reports."""

    __slots__ = ("_keys",)

    def __init__(self) -> None:
        self._keys: set[int] = set()

    def __len__(self) -> int:
        return len(self._keys)

    def apply(self, full: bool, added: Iterable[int], removed: Iterable[int]) -> None:
        """A report: `full` replaces all that was known."""
        if full:
            self._keys.clear()
        self._keys.difference_update(removed)
        self._keys.update(islice(added, HELD_MAX - len(self._keys)))

    def leading(self, keys: Sequence[int]) -> int:
        """How many leading blocks of a prompt with these keys the replica holds."""
        count = 0
        for key in keys:
            if key not in self._keys:
                break
            count += 1
        return count
