"""The pool of KV cache blocks: who holds which block, counted. Pure Python; the tensors live in runner.py.

A block holds the keys and values of `block_tokens` consecutive positions of one sequence, in all layers. Sequences of
one request may share the blocks of their prompt, hence the counts. Block 0 is never given out: padded entries of a
block table point at it, so that a batched gather always reads memory that exists.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

NULL_BLOCK = 0


class BlockPool:
    """`total` usable blocks, numbered 1..total. Freed blocks are reused newest first (they are warm in the caches)."""

    def __init__(self, total: int, block_tokens: int) -> None:
        assert total > 0 and block_tokens > 0
        self.total = total
        self.block_tokens = block_tokens
        self._refs = [0] * (total + 1)
        self._free = list(range(total, 0, -1))

    @property
    def free(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free)

    def needed(self, tokens: int) -> int:
        """Blocks that hold `tokens` positions."""
        return -(-tokens // self.block_tokens)

    def take(self, count: int) -> list[int] | None:
        """`count` blocks with one reference each, or None (and nothing changes) when fewer are free."""
        if count > len(self._free):
            return None
        taken = [self._free.pop() for _ in range(count)]
        for block in taken:
            self._refs[block] = 1
        return taken

    def share(self, blocks: Iterable[int]) -> None:
        """One more reference to blocks that are held already."""
        for block in blocks:
            assert self._refs[block] > 0, f"block {block} is shared but free"
            self._refs[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Gives back one reference to each; a block without references is free at once."""
        for block in blocks:
            assert self._refs[block] > 0, f"block {block} is released but free"
            self._refs[block] -= 1
            if self._refs[block] == 0:
                self._free.append(block)

    def check(self, tables: Iterable[list[int]]) -> list[str]:
        """Recounts from scratch over all block tables that exist; returns every disagreement with the counters."""
        held = Counter(block for table in tables for block in table)
        problems = [
            f"block {block}: {held[block]} holders, count says {self._refs[block]}"
            for block in range(1, self.total + 1)
            if held[block] != self._refs[block]
        ]
        free = set(self._free)
        if len(free) != len(self._free):
            problems.append("a block is twice in the free list")
        if free != {block for block in range(1, self.total + 1) if self._refs[block] == 0}:
            problems.append("the free list is not the set of blocks without references")
        if NULL_BLOCK in held or NULL_BLOCK in free:
            problems.append("the null block was given out")
        return problems
