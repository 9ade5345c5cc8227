"""A replica's prefix cache by whole blocks of 512 tokens (the blocks of the Mooncake traces), least recently used out,
and the names under which its blocks are told to the controller."""

from __future__ import annotations

from collections import OrderedDict

from rungway.engine.chain import DEPTH_MAX, chained, root, short
from rungway.engine.protocol import PrefixNews

CACHE_BLOCK_TOKENS = 512


def block_key(share: str, block: int) -> int:
    """A trace's block hashes are chained already; the share keeps tenants apart."""
    return short(chained(root(share), [block]))


def prefix_keys(share: str, blocks: tuple[int, ...]) -> tuple[int, ...]:
    """What a gateway would name to the controller."""
    return tuple(block_key(share, block) for block in blocks[:DEPTH_MAX])


class PrefixCache:
    """At most `blocks_max` blocks, kept apart per tenant; 0 = no cache."""

    def __init__(self, blocks_max: int) -> None:
        self._blocks_max = blocks_max
        self._blocks: OrderedDict[tuple[str, int], None] = OrderedDict()
        self._changed: dict[tuple[str, int], bool] = {}  # since the last news: whether it was there before

    def look(self, share: str, blocks: tuple[int, ...], prompt: int) -> int:
        """Prompt tokens that need not be computed: its leading blocks that are there, always less than all. Afterwards all
        of its blocks are there."""
        if not self._blocks_max or not blocks:
            return 0
        hits = 0
        while hits < len(blocks) and (share, blocks[hits]) in self._blocks:
            hits += 1
        for block in blocks:
            if (share, block) not in self._blocks:
                self._changed.setdefault((share, block), False)
            self._blocks[(share, block)] = None
            self._blocks.move_to_end((share, block))
        while len(self._blocks) > self._blocks_max:
            gone, _ = self._blocks.popitem(last=False)
            self._changed.setdefault(gone, True)
        return min(hits * CACHE_BLOCK_TOKENS, max(0, prompt - 1))

    def news(self, *, full: bool) -> PrefixNews | None:
        """What came and went since the last call, or all that is there; None where there is nothing to say."""
        if not (full or self._changed):
            return None
        changed, self._changed = self._changed, {}
        if full:
            return PrefixNews(True, [block_key(*block) for block in self._blocks], [])
        added = [block_key(*block) for block, was in changed.items() if not was and block in self._blocks]
        removed = [block_key(*block) for block, was in changed.items() if was and block not in self._blocks]
        return PrefixNews(False, added, removed) if added or removed else None
