"""What replicas say that their prefix caches hold, as short block keys (`engine/chain.py`). An estimate: a key may have
left the cache since, and two texts may share 64 bits. The engine itself compares tokens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice

HELD_MAX = 65_536  # keys believed of one replica, whatever it sends

# (leading keys, replicas that hold at least so many), the most keys first. Replicas are bits of a whole number, so that a
# prompt is looked up in all replicas at once.
Holders = tuple[tuple[int, int], ...]


class HeldPrefixes:
    """One replica's keys, kept up to date from its reports. `where` is shared by the replicas of a pool and says for each
    key which of them hold it; `bit` is this one's place in it."""

    __slots__ = ("_keys", "_where", "bit")

    def __init__(self, where: dict[int, int] | None = None, bit: int = 1) -> None:
        self._keys: set[int] = set()
        self._where = {} if where is None else where
        self.bit = bit

    def __len__(self) -> int:
        return len(self._keys)

    def apply(self, full: bool, added: Iterable[int], removed: Iterable[int]) -> None:
        """A report: `full` replaces all that was known."""
        if full:
            self.clear()
        for key in removed:
            if key in self._keys:
                self._keys.remove(key)
                self._unmark(key)
        for key in islice(added, HELD_MAX - len(self._keys)):
            self._keys.add(key)
            self._where[key] = self._where.get(key, 0) | self.bit

    def clear(self) -> None:
        """Nothing is known of this replica any more."""
        for key in self._keys:
            self._unmark(key)
        self._keys.clear()

    def leading(self, keys: Sequence[int]) -> int:
        """How many leading blocks of a prompt with these keys the replica holds."""
        count = 0
        for key in keys:
            if key not in self._keys:
                break
            count += 1
        return count

    def _unmark(self, key: int) -> None:
        left = self._where[key] & ~self.bit
        if left:
            self._where[key] = left
        else:
            del self._where[key]


def free_bit(taken: Iterable[HeldPrefixes]) -> int:
    """The lowest place in a pool's map that no replica has."""
    mask = 0
    for held in taken:
        mask |= held.bit
    return ~mask & (mask + 1)


def holders(where: Mapping[int, int], keys: Sequence[int]) -> Holders:
    """Who holds how much of the beginning of a prompt with these keys. Costs one look per key that somebody holds, however
    many replicas there are."""
    steps: list[tuple[int, int]] = []
    mask = -1
    for count, key in enumerate(keys):
        left = mask & where.get(key, 0)
        if left != mask and count:
            steps.append((count, mask))
        mask = left
        if not mask:
            break
    else:
        if keys:
            steps.append((len(keys), mask))
    return tuple(reversed(steps))


def leading(found: Holders, mask: int) -> int:
    """The most leading keys that any replica of `mask` holds."""
    for count, who in found:
        if who & mask:
            return count
    return 0
