"""Which prefixes an engine tells others that it holds: bounded, and as changes. Pure Python.

Told are at most `DEPTH_MAX` keys of a text, of every `every`-th block, parents before children, so that whoever hears of a block has
heard of all before it. No share takes more than a part of the list, or one busy tenant would hide all others.
"""

from __future__ import annotations

from collections import Counter
from itertools import islice

from rungway.engine.chain import DEPTH_MAX, short
from rungway.engine.protocol import PrefixNews

SHARE_PART = 4  # a share may fill one in so many places
_PROMOTED_MAX = 1024  # blocks that were left out and are looked at again for one report


class Published:
    """At most `limit` keys, 0 = none. Told by the prefix index what it learns and forgets."""

    def __init__(self, limit: int, every: int = 1) -> None:
        self.limit = limit
        self.every = every
        self._part = -(-limit // SHARE_PART)
        self._keys: dict[int, str] = {}  # short key -> share
        self._shares: Counter[str] = Counter()
        self._left_out: dict[bytes, tuple[bytes | None, str]] = {}  # key -> (parent, share)
        self._added: dict[int, None] = {}
        self._removed: dict[int, None] = {}

    def learned(self, keys: list[bytes], share: str, depth: int) -> None:
        """The block at `depth` (0 = a text's first) is known now; `keys` are those of its text up to it at least."""
        if not self.limit or (depth + 1) % self.every or depth >= DEPTH_MAX * self.every:
            return
        parent = keys[depth - self.every] if depth >= self.every else None
        if not self._tell(keys[depth], parent, share):
            self._left_out[keys[depth]] = (parent, share)

    def forgotten(self, key: bytes) -> None:
        """A block without children is no longer known."""
        if self._left_out.pop(key, None) is not None:
            return
        name = short(key)
        share = self._keys.pop(name, None)
        if share is None:
            return
        self._shares[share] -= 1
        if not self._shares[share]:
            del self._shares[share]
        if name in self._added:
            del self._added[name]
        else:
            self._removed[name] = None

    def news(self, *, full: bool) -> PrefixNews:
        """What changed since the last call, or everything."""
        if self._left_out and len(self._keys) < self.limit:
            for key, (parent, share) in list(islice(self._left_out.items(), _PROMOTED_MAX)):
                del self._left_out[key]
                if not self._tell(key, parent, share):
                    self._left_out[key] = (parent, share)  # at the end: the others have their turn next
        added, removed = list(self._keys if full else self._added), [] if full else list(self._removed)
        self._added.clear()
        self._removed.clear()
        return PrefixNews(full, added, removed)

    def _tell(self, key: bytes, parent: bytes | None, share: str) -> bool:
        name = short(key)
        full = len(self._keys) >= self.limit or self._shares[share] >= self._part
        if full or name in self._keys or (parent is not None and short(parent) not in self._keys):
            return False
        self._keys[name] = share
        self._shares[share] += 1
        if name in self._removed:
            del self._removed[name]
        else:
            self._added[name] = None
        return True
