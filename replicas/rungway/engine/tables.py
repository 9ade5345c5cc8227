"""Block tables of sequences: what they find in the prefix cache, take, offer and give back. Pure Python."""

from __future__ import annotations

from rungway.engine.blocks import BlockPool
from rungway.engine.sequence import Group, Sequence, Status


class Tables:
    """The only user of the pool. A waiting sequence may hold blocks: a sibling those of the shared prompt, the head of
    the queue what it has found; they are dropped when running ones need them."""

    def __init__(self, pool: BlockPool, *, prefix_cache: bool) -> None:
        self.pool = pool
        self._prefix_cache = prefix_cache
        self._waiting: dict[Sequence, None] = {}  # holders that do not run

    def missing(self, seq: Sequence) -> int:
        """Blocks that a sequence lacks for the tokens it knows."""
        return self.pool.needed(len(seq.tokens)) - len(seq.blocks)

    def room(self, seq: Sequence) -> int:
        """Positions that a sequence's blocks hold."""
        return len(seq.blocks) * self.pool.block_tokens

    def find(self, seq: Sequence) -> None:
        """Takes what the prefix cache has of a waiting sequence's tokens, as far as they need not be computed anew."""
        if not self._prefix_cache or seq.blocks:
            return
        whole = seq.findable(self.pool.block_tokens)
        found = self.pool.known.match(seq.share, seq.tokens, seq.keys, whole)
        self._start_from(seq, found)

    def take(self, seq: Sequence, count: int) -> bool:
        """`count` more blocks, or False and nothing."""
        taken = self.pool.take(count, seq.share, seq.weight)
        if taken is None:
            return False
        seq.blocks += taken
        return True

    def stretch(self, seq: Sequence, count: int) -> int:
        """Room for up to `count` positions beyond the known tokens, from blocks that are free; how many there are."""
        short = self.pool.needed(len(seq.tokens) + count) - len(seq.blocks)
        if short > 0:
            self.take(seq, min(short, self.pool.free))
        return min(count, self.room(seq) - len(seq.tokens))

    def trim(self, seq: Sequence) -> None:
        """Gives back blocks beyond the known tokens."""
        needed = self.pool.needed(len(seq.tokens))
        spare = seq.blocks[needed:]
        if spare:
            del seq.blocks[needed:]
            self.pool.release(spare)

    def learn(self, seq: Sequence) -> None:
        """Offers the blocks that a sequence has filled to the prefix index."""
        if not self._prefix_cache:
            return
        while (seq.known + 1) * self.pool.block_tokens <= seq.computed:
            self.pool.known.learn(seq.share, seq.tokens, seq.keys, seq.blocks, seq.known)
            seq.known += 1

    def runs(self, seq: Sequence) -> None:
        """Its blocks are no longer those of a waiting one."""
        self._waiting.pop(seq, None)

    def free(self, seq: Sequence) -> None:
        """Gives all blocks back."""
        self.pool.release(seq.blocks)
        seq.blocks = []
        seq.computed = seq.known = 0
        self._waiting.pop(seq, None)

    def drop_waiting(self, keep: Sequence | None) -> bool:
        """Takes the blocks of waiting sequences; they can be computed again. True when a block became free."""
        before = self.pool.free
        for seq in list(self._waiting):
            if seq is not keep:
                self.free(seq)
        return self.pool.free > before

    def release_held(self, group: Group, leader: Sequence | None) -> list[Sequence]:
        """Held siblings that may wait now: `leader` has the prompt's whole blocks, which they share, or there is none and
        they start from nothing."""
        shared: list[int] = []
        if leader is not None:
            # the last prompt token is always computed anew: a sequence must have something to compute
            whole = (len(group.work.prompt_ids) - 1) // self.pool.block_tokens
            if leader.computed < whole * self.pool.block_tokens:
                return []
            shared = leader.blocks[:whole]
        released = [seq for seq in group.members if seq.status is Status.HELD]
        for seq in released:
            self._start_from(seq, shared)
            seq.charged = seq.computed
        return released

    def problems(self) -> list[str]:
        """What is wrong with the notes on who waits with blocks."""
        wrong = [seq for seq in self._waiting if seq.status is not Status.WAITING or not seq.blocks]
        return [f"{seq.name} is noted as waiting with blocks" for seq in wrong]

    def holds_while_waiting(self, seq: Sequence) -> bool:
        return seq in self._waiting

    def _start_from(self, seq: Sequence, blocks: list[int]) -> None:
        self.pool.share(blocks)
        seq.blocks = list(blocks)
        seq.known = len(blocks)
        seq.computed = len(blocks) * self.pool.block_tokens
        if blocks:
            self._waiting[seq] = None
