"""What the next step computes. Pure Python: no torch, no clock, no I/O.

One rule: every sequence has tokens known and tokens computed, and a step hands out `max_num_batched_tokens` among at
most `max_num_seqs` sequences so that the second catches up with the first. Prefill, chunked prefill, decode and
recomputation after preemption are all this rule (after vLLM's V1 scheduler).

    held -> waiting          the group's first member has computed the prompt (or has gone)
    waiting -> running       admitted: a row and all blocks for the tokens it knows
    running -> waiting       preempted: blocks given back, to be computed again
    any -> ended             finished, cancelled or failed: blocks free at once
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from rungway.engine.blocks import BlockPool
from rungway.engine.fairness import FairQueue
from rungway.engine.sequence import Group, Sequence, Status


class Slice(NamedTuple):
    """`size` tokens of `seq` from position `seq.computed` on are computed in this step."""

    seq: Sequence
    size: int


class Scheduler:
    """Owner of all sequences and of the block pool. Not thread-safe; the engine locks around it."""

    def __init__(self, pool: BlockPool, *, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        assert 0 < max_num_seqs <= max_num_batched_tokens, "each running sequence needs one token of the budget"
        self.pool = pool
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.running: list[Sequence] = []
        self.waiting = FairQueue()
        self.groups: dict[str, Group] = {}
        self.preemptions = 0
        self._rows = list(range(max_num_seqs - 1, -1, -1))
        self._arrivals = 0

    def add(self, group: Group, limit: int) -> None:
        """Takes a request whose `limit` fits into the pool. Its first member waits at once, the others are held until
        the prompt is computed, to share its blocks."""
        work = group.work
        assert work.request_id not in self.groups and self.pool.needed(limit) <= self.pool.total
        self.groups[work.request_id] = group
        for index in range(work.sequences):
            group.members.append(Sequence(group, index, self._arrivals, limit))
            self._arrivals += 1
        self.waiting.arrive(work.share)
        self._enqueue(group.members[0])

    def schedule(self) -> list[Slice]:
        """The next step, most urgent first: decodes, then prefills under way, then admissions while budget, rows and
        blocks last. Never empty while anything is waiting or running."""
        budget = self.max_num_batched_tokens
        preempted = self.preemptions
        step: list[Slice] = []
        for seq in sorted(self.running, key=_running_order):
            if seq.status is Status.RUNNING and self._grow(seq):
                step.append(Slice(seq, 1 if seq.wanted == 1 else 0))
        step = [item for item in step if item.seq.status is Status.RUNNING]
        budget -= sum(item.size for item in step)
        contended = len(self.waiting) + sum(1 for item in step if item.size == 0) > 1
        chunk_max = max(1, self.max_num_batched_tokens // 2) if contended else self.max_num_batched_tokens
        for at, item in enumerate(step):
            if item.size == 0:
                count = min(item.seq.wanted, chunk_max, budget)
                step[at] = Slice(item.seq, count)
                budget -= count
        if self.preemptions == preempted:  # else the newcomer would only take the victim's place
            while budget > 0 and (admitted := self._admit(idle=not self.running)) is not None:
                count = min(admitted.wanted, chunk_max, budget)
                step.append(Slice(admitted, count))
                budget -= count
        return _fill(step, budget)

    def commit(self, step: list[Slice]) -> None:
        """The step's keys and values are in the cache. Charges shares and lets held siblings start."""
        for seq, count in step:
            seq.computed += count
            fresh = seq.computed - seq.charged
            if fresh > 0:
                inputs = min(fresh, max(0, seq.context - seq.charged))
                self.waiting.charge(seq, inputs=inputs, outputs=fresh - inputs)
                seq.charged = seq.computed
            if seq.index == 0 and seq.group.live > 1:
                self._release_held(seq)
        self.waiting.settle({group.work.share for group in self.groups.values()})

    def end(self, seq: Sequence) -> None:
        """The one way out: finished, cancelled, failed. Blocks are free when it returns; a second call does nothing."""
        if seq.status is Status.ENDED:
            return
        if seq.status is Status.RUNNING:
            self._leave_row(seq)
        elif seq.status is Status.WAITING:
            self.waiting.remove(seq)
        self._free(seq)
        seq.status = Status.ENDED
        seq.group.live -= 1
        if seq.group.live == 0:
            del self.groups[seq.group.work.request_id]
        elif seq.index == 0:
            self._release_held(None, seq.group)

    def check(self) -> list[str]:
        """Recounts blocks, rows and queues from the sequences themselves; returns what disagrees."""
        problems = self.pool.check(seq.blocks for seq in self._all())
        rows = sorted([*self._rows, *(seq.row for seq in self.running)])
        if rows != list(range(self.max_num_seqs)):
            problems.append(f"rows are lost or doubled: {rows}")
        for status, members in ((Status.RUNNING, list(self.running)), (Status.WAITING, list(self.waiting))):
            if {id(seq) for seq in members} != {id(seq) for seq in self._all() if seq.status is status}:
                problems.append(f"the {status} list is not the set of {status} sequences")
        for seq in self._all():
            if seq.computed > len(seq.blocks) * self.pool.block_tokens or seq.computed >= len(seq.tokens) + 1:
                problems.append(f"{seq.group.work.request_id}/{seq.index}: {seq.computed} computed is too much")
        return problems

    def _all(self) -> Iterator[Sequence]:
        for group in self.groups.values():
            yield from (seq for seq in group.members if seq.status is not Status.ENDED)

    def _enqueue(self, seq: Sequence, *, front: bool = False) -> None:
        seq.status = Status.WAITING
        self.waiting.push(seq, front=front)

    def _admit(self, *, idle: bool) -> Sequence | None:
        """Moves the head of the queue to running with blocks for all tokens that it knows, or returns None."""
        seq = self.waiting.head()
        if seq is None or not self._rows:
            return None
        missing = self.pool.needed(len(seq.tokens)) - len(seq.blocks)
        if idle and missing > self.pool.free:
            self._drop_waiting_blocks(keep=seq)
            missing = self.pool.needed(len(seq.tokens)) - len(seq.blocks)
        # while others run, one spare block each keeps the newcomer from being preempted at once
        spare = 0 if idle else len(self.running)
        if missing + spare > self.pool.free:
            return None
        seq.blocks += self.pool.take(missing) or []
        self.waiting.remove(seq)
        seq.status = Status.RUNNING
        seq.row = self._rows.pop()
        self.running.append(seq)
        return seq

    def _grow(self, seq: Sequence) -> bool:
        """Gives a running sequence the block for its next token, at the cost of the least urgent one. False when
        that was the sequence itself."""
        while self.pool.needed(len(seq.tokens)) > len(seq.blocks):
            block = self.pool.take(1)
            if block is not None:
                seq.blocks += block
                continue
            if self._drop_waiting_blocks(keep=None):
                continue
            victim = max(self.running, key=lambda other: other.rank)
            self._preempt(victim)
            if victim is seq:
                return False
        return True

    def _preempt(self, seq: Sequence) -> None:
        self._leave_row(seq)
        self._free(seq)
        seq.preemptions += 1
        self.preemptions += 1
        self._enqueue(seq, front=True)

    def _drop_waiting_blocks(self, keep: Sequence | None) -> bool:
        """Waiting siblings hold shared prompt blocks; they can be computed again. True when a block became free."""
        before = self.pool.free
        for seq in self.waiting:
            if seq is not keep:
                self._free(seq)
        return self.pool.free > before

    def _release_held(self, leader: Sequence | None, group: Group | None = None) -> None:
        """Held siblings start to wait once `leader` has the prompt's whole blocks, which they share. Without a leader
        they start from nothing."""
        shared: list[int] = []
        if leader is not None:
            group = leader.group
            # the last prompt token is always computed anew: a sequence must have something to compute
            whole = (len(group.work.prompt_ids) - 1) // self.pool.block_tokens
            if leader.computed < whole * self.pool.block_tokens:
                return
            shared = leader.blocks[:whole]
        assert group is not None
        for seq in group.members:
            if seq.status is Status.HELD:
                self.pool.share(shared)
                seq.blocks = list(shared)
                seq.computed = seq.charged = len(shared) * self.pool.block_tokens
                self._enqueue(seq)

    def _leave_row(self, seq: Sequence) -> None:
        self.running.remove(seq)
        self._rows.append(seq.row)
        seq.row = -1

    def _free(self, seq: Sequence) -> None:
        self.pool.release(seq.blocks)
        seq.blocks = []
        seq.computed = 0


def _fill(step: list[Slice], budget: int) -> list[Slice]:
    """Gives what is left of the budget to prefills that were cut short for the sake of others."""
    filled = []
    for seq, count in step:
        more = min(seq.wanted - count, budget)
        budget -= more
        if count + more > 0:
            filled.append(Slice(seq, count + more))
    return filled


def _running_order(seq: Sequence) -> tuple[bool, int, int]:
    """Decodes before prefills, then by priority and age."""
    return (seq.wanted > 1, seq.group.work.priority, seq.arrival)
