"""The pool of KV cache blocks: who holds which block, counted. Pure Python; the tensors live in runner.py.

A block holds the keys and values of `block_tokens` consecutive positions of one sequence, in all layers. Sequences may
share blocks of a common beginning, hence the counts. A block whose content is known to the prefix index falls idle when
its last holder goes: it can be found again until its place is needed, least recently used first. Block 0 is never given
out: padded entries of a block table point at it, so that a batched gather always reads memory that exists.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from rungway.engine.chain import chained
from rungway.engine.prefix import Hasher, PrefixIndex
from rungway.engine.published import Published

NULL_BLOCK = 0


class BlockPool:
    """`total` usable blocks, numbered 1..total. Freed blocks are reused newest first (they are warm in the caches)."""

    def __init__(
        self, total: int, block_tokens: int, *, hasher: Hasher = chained, published: Published | None = None
    ) -> None:
        assert total > 0 and block_tokens > 0
        self.total = total
        self.block_tokens = block_tokens
        self.known = PrefixIndex(block_tokens, hasher, published)
        self._refs = [0] * (total + 1)
        self._free = list(range(total, 0, -1))
        self._idle: dict[int, None] = {}  # known and held by nobody, least recently used first

    @property
    def free(self) -> int:
        """Blocks that nobody holds, idle ones included."""
        return len(self._free) + len(self._idle)

    @property
    def idle(self) -> int:
        """Blocks that nobody holds and whose content can still be found."""
        return len(self._idle)

    def needed(self, tokens: int) -> int:
        """Blocks that hold `tokens` positions."""
        return -(-tokens // self.block_tokens)

    def exclusive(self, table: Iterable[int]) -> int:
        """How many blocks would be free if this table's holder went."""
        return sum(1 for block in table if self._refs[block] == 1)

    def take(self, count: int) -> list[int] | None:
        """`count` blocks with one reference each, or None (and nothing changes) when fewer are free."""
        if count > self.free:
            return None
        while len(self._free) < count:
            # a child falls idle before its parent does (see prefix.py): the first has no children left
            block = next(iter(self._idle))
            del self._idle[block]
            self.known.forget(block)
            self._free.append(block)
        taken = [self._free.pop() for _ in range(count)]
        for block in taken:
            self._refs[block] = 1
        return taken

    def share(self, blocks: Iterable[int]) -> None:
        """One more reference to blocks that are held or idle."""
        for block in blocks:
            assert self._refs[block] > 0 or block in self._idle, f"block {block} is shared but free"
            self._idle.pop(block, None)
            self._refs[block] += 1

    def release(self, table: list[int]) -> None:
        """Gives back one reference to each block of a table; a block without references is free at once."""
        for block in reversed(table):
            assert self._refs[block] > 0, f"block {block} is released but free"
            self._refs[block] -= 1
            if self._refs[block] == 0 and block in self.known:
                self._idle[block] = None
            elif self._refs[block] == 0:
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
        if len(free) != len(self._free) or free & self._idle.keys():
            problems.append("a block is twice in the free lists")
        unheld = {block for block in range(1, self.total + 1) if self._refs[block] == 0}
        if free | self._idle.keys() != unheld:
            problems.append("the free lists are not the set of blocks without references")
        if self._idle.keys() != {block for block in unheld if block in self.known}:
            problems.append("the idle list is not the set of known blocks without references")
        if NULL_BLOCK in held or NULL_BLOCK in free:
            problems.append("the null block was given out")
        return problems + list(self.known.check(self._refs))
