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
from rungway.engine.quotas import Quotas

NULL_BLOCK = 0


class BlockPool:
    """`total` usable blocks, numbered 1..total. Freed blocks are reused newest first (they are warm in the caches)."""

    def __init__(
        self,
        total: int,
        block_tokens: int,
        *,
        hasher: Hasher = chained,
        published: Published | None = None,
        soft_quota: float | None = None,
    ) -> None:
        """`soft_quota`: part of the blocks per unit of a share's weight, see quotas.py."""
        assert total > 0 and block_tokens > 0
        self.total = total
        self.block_tokens = block_tokens
        self.known = PrefixIndex(block_tokens, hasher, published)
        self._refs = [0] * (total + 1)
        self._free = list(range(total, 0, -1))
        self._idle: dict[int, None] = {}  # known and held by nobody, least recently used first
        self.quotas = None if soft_quota is None else Quotas(total, soft_quota)
        self._owners: list[str] = [""] * (total + 1)  # of blocks that are not free, with quotas
        self._idle_of: dict[str, dict[int, None]] = {}  # the idle ones by owner, with quotas

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

    def take(self, count: int, share: str = "", weight: float = 1.0) -> list[int] | None:
        """`count` blocks with one reference each, or None (and nothing changes) when fewer are free. `share`, of
        `weight`, owns them from now on. Cached blocks of shares over their quota make room first."""
        if count > self.free:
            return None
        while len(self._free) < count:
            self._evict()
        taken = [self._free.pop() for _ in range(count)]
        for block in taken:
            self._refs[block] = 1
        if self.quotas is not None and taken:
            self.quotas.grow(share, weight, count)
            for block in taken:
                self._owners[block] = share
        return taken

    def over_quota(self, share: str) -> bool:
        return self.quotas is not None and self.quotas.over(share)

    def share(self, blocks: Iterable[int]) -> None:
        """One more reference to blocks that are held or idle."""
        for block in blocks:
            assert self._refs[block] > 0 or block in self._idle, f"block {block} is shared but free"
            if self._refs[block] == 0:
                self._wake(block)
            self._refs[block] += 1

    def release(self, table: list[int]) -> None:
        """Gives back one reference to each block of a table; a block without references is free at once."""
        for block in reversed(table):
            assert self._refs[block] > 0, f"block {block} is released but free"
            self._refs[block] -= 1
            if self._refs[block] == 0 and block in self.known:
                self._idle[block] = None
                if self.quotas is not None:
                    self._idle_of.setdefault(self._owners[block], {})[block] = None
            elif self._refs[block] == 0:
                self._discard(block)

    def check(self, tables: Iterable[list[int]]) -> list[str]:
        """Recounts from scratch over all block tables that exist; returns every disagreement with the counters."""
        held = Counter(block for table in tables for block in table)
        counts = [0] * (self.total + 1)
        for block, holders in held.items():
            counts[block] = holders
        problems = [
            f"block {block}: {counts[block]} holders, count says {self._refs[block]}"
            for block in (range(1, self.total + 1) if counts != self._refs else ())
            if counts[block] != self._refs[block]
        ]
        free = set(self._free)
        if len(free) != len(self._free) or not free.isdisjoint(self._idle):
            problems.append("a block is twice in the free lists")
        refs = self._refs.__getitem__
        if len(self._free) + len(self._idle) + len(held) != self.total or any(map(refs, (*free, *self._idle))):
            problems.append("the free lists are not the set of blocks without references")
        if self.known.blocks - held.keys() != self._idle.keys():
            problems.append("the idle list is not the set of known blocks without references")
        if NULL_BLOCK in held or NULL_BLOCK in free:
            problems.append("the null block was given out")
        return problems + list(self.known.check(self._refs)) + self._check_quotas(free)

    def _check_quotas(self, free: set[int]) -> list[str]:
        if self.quotas is None:
            return []
        owned = Counter(self._owners[block] for block in range(1, self.total + 1) if block not in free)
        problems = self.quotas.problems(dict(owned))
        listed = {block: share for share, blocks in self._idle_of.items() for block in blocks}
        if listed != {block: self._owners[block] for block in self._idle} or not all(self._idle_of.values()):
            problems.append("idle blocks are listed under the wrong share")
        return problems

    def _evict(self) -> None:
        """Frees the idle block that was not used for longest, of the share furthest over its quota if there is one. A child
        falls idle before its parent does (see prefix.py): the first of a share has no children left."""
        share = None if self.quotas is None else self.quotas.furthest(self._idle_of)
        block = next(iter(self._idle if share is None else self._idle_of[share]))
        self._wake(block)
        self.known.forget(block)
        self._discard(block)

    def _wake(self, block: int) -> None:
        """An idle block is not idle any more."""
        del self._idle[block]
        if self.quotas is not None:
            mine = self._idle_of[self._owners[block]]
            del mine[block]
            if not mine:
                del self._idle_of[self._owners[block]]

    def _discard(self, block: int) -> None:
        self._free.append(block)
        if self.quotas is not None:
            self.quotas.shrink(self._owners[block])
