"""What the next step computes. Pure Python: no torch, no clock, no I/O.

One rule: every sequence has tokens known and tokens computed, and a step hands out `max_num_batched_tokens` among at
most `max_num_seqs` sequences so that the second catches up with the first. Prefill, chunked prefill, decode and
recomputation after preemption are all this rule (after vLLM's V1 scheduler); a prefix hit only moves where it begins.

    held -> waiting          the group's first member has computed the prompt (or has gone)
    waiting -> running       admitted: a row and all blocks for the tokens it knows
    running -> waiting       preempted: blocks given back, to be found in the prefix cache or computed again
    any -> ended             finished, cancelled or failed: blocks free at once
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from rungway.engine.blocks import BlockPool
from rungway.engine.fairness import FairQueue
from rungway.engine.sequence import Group, Sequence, Status
from rungway.engine.victims import enough_for, least_worth_keeping


class Slice(NamedTuple):
    """`size` tokens of `seq` from position `seq.computed` on are computed in this step."""

    seq: Sequence
    size: int


class Scheduler:
    """Owner of all sequences and of the block pool. Not thread-safe; the engine locks around it."""

    def __init__(
        self, pool: BlockPool, *, max_num_seqs: int, max_num_batched_tokens: int, prefix_cache: bool = True
    ) -> None:
        assert 0 < max_num_seqs <= max_num_batched_tokens, "each running sequence needs one token of the budget"
        self.pool = pool
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.running: list[Sequence] = []
        self.waiting = FairQueue()
        self.groups: dict[str, Group] = {}
        self.preemptions = 0
        self._prefix_cache = prefix_cache
        self._active: Counter[str] = Counter()  # live requests by share
        self._rows = list(range(max_num_seqs - 1, -1, -1))
        self._arrivals = 0

    def add(self, group: Group, limit: int) -> None:
        """Takes a request whose `limit` fits into the pool. Its first member waits at once, the others are held until
        the prompt is computed, to share its blocks."""
        work = group.work
        assert work.request_id not in self.groups and self.pool.needed(limit) <= self.pool.total
        self.groups[work.request_id] = group
        self._active[work.share] += 1
        for index in range(work.sequences):
            group.members.append(Sequence(group, index, self._arrivals, limit))
            self._arrivals += 1
        self.waiting.arrive(work.share)
        self._enqueue(group.members[0])

    def schedule(self) -> list[Slice]:
        """The next step, most urgent first: decodes, then prefills under way, then admissions while budget, rows and
        blocks last. Never empty while anything is waiting or running."""
        given_way = self._grow_all()
        # what running ones owe matters to nobody while no one can be admitted
        self.waiting.owe(self.running if self.waiting and (self._rows or self._urgent()) else (), anew=True)
        self._admit_urgent()
        step = [Slice(seq, 1) for seq in self.running if seq.wanted == 1]
        prefills = [seq for seq in self.running if seq.wanted > 1]
        step += [Slice(seq, 0) for seq in sorted(prefills, key=_running_order)]
        budget = self.max_num_batched_tokens - sum(item.size for item in step)
        contended = len(self.waiting) + sum(1 for item in step if item.size == 0) > 1
        chunk_max = max(1, self.max_num_batched_tokens // 2) if contended else self.max_num_batched_tokens
        for at, item in enumerate(step):
            if item.size == 0:
                count = min(item.seq.wanted, chunk_max, budget)
                step[at] = Slice(item.seq, count)
                budget -= count
        while budget > 0 and (admitted := self._admit(above=given_way)) is not None:
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
            self._learn(seq)
            if seq.index == 0 and seq.group.live > 1:
                self._release_held(seq)
        self.waiting.settle(self._active.keys())

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
            work = seq.group.work
            del self.groups[work.request_id]
            self._active[work.share] -= 1
            if not self._active[work.share]:
                del self._active[work.share]
        elif seq.index == 0:
            self._release_held(None, seq.group)

    def check(self) -> list[str]:
        """Recounts blocks, rows and queues from the sequences themselves; returns what disagrees."""
        problems = self.pool.check(seq.blocks for seq in self._all())
        if self._active != Counter(group.work.share for group in self.groups.values()):
            problems.append("the count of active shares is wrong")
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

    def _enqueue(self, seq: Sequence) -> None:
        seq.status = Status.WAITING
        self.waiting.push(seq)

    def _admit_urgent(self) -> None:
        """Heads of the queue that are more urgent than running ones start now, at the cost of just enough of these."""
        while (head := self._urgent()) is not None:
            self._find(head)
            missing = self.pool.needed(len(head.tokens)) - len(head.blocks)
            victims = enough_for(
                head,
                self.running,
                rows_free=len(self._rows),
                blocks_short=lambda gone: missing + len(self.running) - gone - self.pool.free,  # noqa: B023
                frees=lambda seq: self.pool.exclusive(seq.blocks),
                got=self.waiting.got,
            )
            for victim in victims or ():
                self._preempt(victim)
            if victims is None or self._admit(above=None) is None:
                return

    def _urgent(self) -> Sequence | None:
        """The head of the queue where it is of a more urgent band than something that runs."""
        band = self.waiting.band
        if band is None or all(seq.group.work.priority <= band for seq in self.running):
            return None
        return self.waiting.head()

    def _admit(self, *, above: int | None) -> Sequence | None:
        """Moves the head of the queue to running with blocks for all tokens that it knows, or returns None. It has to be
        more urgent than the band `above`, which gave way in this step: it would only take the victim's place."""
        seq = self.waiting.head()
        if seq is None or not self._rows or (above is not None and seq.priority >= above):
            return None
        idle = not self.running
        self._find(seq)
        missing = self.pool.needed(len(seq.tokens)) - len(seq.blocks)
        if idle and missing > self.pool.free:
            self._drop_waiting_blocks(keep=seq)
        # while others run, one spare block each keeps the newcomer from being preempted at once
        spare = 0 if idle else len(self.running)
        taken = self.pool.take(missing) if missing + spare <= self.pool.free else None
        if taken is None:
            return None
        seq.blocks += taken
        self.waiting.remove(seq)
        self.waiting.owe([seq])
        seq.status = Status.RUNNING
        seq.row = self._rows.pop()
        self.running.append(seq)
        seq.charged = max(seq.charged, seq.computed)  # what was found costs nothing
        if seq.group.cached is None:
            seq.group.cached = min(seq.computed, len(seq.group.work.prompt_ids))
        return seq

    def _find(self, seq: Sequence) -> None:
        """Takes what the prefix cache has of a waiting sequence's tokens; the last token is always computed anew, for a
        sequence must have something to compute."""
        if not self._prefix_cache or seq.blocks:
            return
        whole = (len(seq.tokens) - 1) // self.pool.block_tokens
        found = self.pool.known.match(seq.group.work.share, seq.tokens, seq.keys, whole)
        self.pool.share(found)
        seq.blocks = found
        seq.known = len(found)
        seq.computed = len(found) * self.pool.block_tokens

    def _learn(self, seq: Sequence) -> None:
        """Offers the blocks that a sequence has filled to the prefix index."""
        if not self._prefix_cache:
            return
        share = seq.group.work.share
        while (seq.known + 1) * self.pool.block_tokens <= seq.computed:
            self.pool.known.learn(share, seq.tokens, seq.keys, seq.blocks, seq.known)
            seq.known += 1

    def _grow_all(self) -> int | None:
        """Gives every running sequence the block for its next token, at the cost of the one least worth keeping. Returns
        the most urgent band that gave way, None where nobody had to."""
        given_way: int | None = None
        needed = self.pool.needed
        hungry = [seq for seq in self.running if needed(len(seq.tokens)) > len(seq.blocks)]
        for seq in sorted(hungry, key=_running_order):
            while seq.status is Status.RUNNING and self.pool.needed(len(seq.tokens)) > len(seq.blocks):
                block = self.pool.take(1)
                if block is not None:
                    seq.blocks += block
                elif not self._drop_waiting_blocks(keep=None):
                    victim = least_worth_keeping(self.running)
                    self._preempt(victim)
                    given_way = victim.priority if given_way is None else min(given_way, victim.priority)
        return given_way

    def _preempt(self, seq: Sequence) -> None:
        self._leave_row(seq)
        self._free(seq)
        seq.preemptions += 1
        self.preemptions += 1
        self._enqueue(seq)

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
                seq.known = len(shared)
                seq.computed = seq.charged = len(shared) * self.pool.block_tokens
                self._enqueue(seq)

    def _leave_row(self, seq: Sequence) -> None:
        self.running.remove(seq)
        self._rows.append(seq.row)
        seq.row = -1

    def _free(self, seq: Sequence) -> None:
        self.pool.release(seq.blocks)
        seq.blocks = []
        seq.computed = seq.known = 0


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
