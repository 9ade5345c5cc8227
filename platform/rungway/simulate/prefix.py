"""A replica's prefix cache by whole blocks of 512 tokens (the blocks of the Mooncake traces), least recently used out."""

from __future__ import annotations

from collections import OrderedDict

CACHE_BLOCK_TOKENS = 512


class PrefixCache:
    """At most `blocks_max` blocks, kept apart per tenant; 0 = no cache."""

    def __init__(self, blocks_max: int) -> None:
        self._blocks_max = blocks_max
        self._blocks: OrderedDict[tuple[str, int], None] = OrderedDict()

    def look(self, share: str, blocks: tuple[int, ...], prompt: int) -> int:
        """Prompt tokens that need not be computed: its leading blocks that are there, always less than all. Afterwards all
        of its blocks are there."""
        if not self._blocks_max or not blocks:
            return 0
        hits = 0
        while hits < len(blocks) and (share, blocks[hits]) in self._blocks:
            hits += 1
        for block in blocks:
            self._blocks[(share, block)] = None
            self._blocks.move_to_end((share, block))
        while len(self._blocks) > self._blocks_max:
            self._blocks.popitem(last=False)
        return min(hits * CACHE_BLOCK_TOKENS, max(0, prompt - 1))
