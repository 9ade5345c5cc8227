"""What the next step computes. Pure Python: no torch, no clock, no I/O.

One rule: every sequence has tokens known and tokens computed, and a step hands out `max_num_batched_tokens` among at
most `max_num_seqs` sequences so that the second catches up with the first. Prefill, chunked prefill, decode and
recomputation after preemption are all this rule (after vLLM's V1 scheduler); a prefix hit only moves where it begins.
Drafts are the exception: guesses that a decoding sequence may compute beyond its known tokens, with what is left over.

    held -> waiting          the group's first member has computed the prompt (or has gone)
    waiting -> running       admitted: a row and all blocks for the tokens it knows (admission.py)
    running -> waiting       preempted: blocks given back, to be found in the prefix cache or computed again
    any -> ended             finished, cancelled or failed: blocks free at once
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from rungway.engine.admission import Admission
from rungway.engine.blocks import BlockPool
from rungway.engine.chunks import Chunks
from rungway.engine.fairness import FairQueue
from rungway.engine.lpm import PrefixOrder
from rungway.engine.rules import DEFAULT_RULES, Rules, Schedule
from rungway.engine.running import Running, Slice
from rungway.engine.sequence import Group, Sequence, Status
from rungway.engine.tables import Tables

__all__ = ["Scheduler", "Slice"]

SCORE_ROWS_MAX = 128


class Scheduler:
    """Owner of all sequences and of the block pool. Not thread-safe; the engine locks around it."""

    def __init__(
        self,
        pool: BlockPool,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        prefix_cache: bool = True,
        rules: Rules = DEFAULT_RULES,
        score_rows_max: int = SCORE_ROWS_MAX,
    ) -> None:
        """`score_rows_max`: positions of prompts in a step whose logits are read for the prompts' log-probabilities, which
        bounds their memory."""
        assert score_rows_max > 0
        assert 0 < max_num_seqs <= max_num_batched_tokens, "each running sequence needs one token of the budget"
        self.pool = pool
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.score_rows_max = score_rows_max
        self.running = Running(max_num_seqs)
        lpm = prefix_cache and rules.schedule is Schedule.LPM
        self._order = PrefixOrder(pool, self.running) if lpm else None
        self.waiting = FairQueue(self._order)
        self.groups: dict[str, Group] = {}
        self._tables = Tables(pool, prefix_cache=prefix_cache)
        self._admission = Admission(self._tables, self.running, self.waiting, self._order, watermark=rules.kv_watermark)
        self.chunks = Chunks(rules.long_prefill_tokens, max_num_batched_tokens, rules.long_prefill_tokens_min)
        self._active: Counter[str] = Counter()  # live requests by share
        self._arrivals = 0

    @property
    def preemptions(self) -> int:
        """How often anything gave way so far."""
        return self._admission.preemptions

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
        self._admission.enqueue(group.members[0])

    def schedule(self) -> list[Slice]:
        """The next step, most urgent first: decodes, then prefills under way, then admissions while budget, rows and
        blocks last. Never empty while anything is waiting or running."""
        given_way = self._admission.feed()
        if self._order is not None:
            self._order.new_step()
        self._admission.admit_urgent()
        step = list(self.running.decoding.values())
        read = self.running.read
        if self.chunks.looks(len(step), read):
            return step
        budget = self.max_num_batched_tokens - len(step)
        alone = len(self.waiting) + len(self.running) == 1
        long = sum(len(seq.tokens) > self.max_num_batched_tokens for seq in self.running.prefilling())
        chunks: list[Slice] = []
        rows = self.score_rows_max

        def part(seq: Sequence) -> int:
            """Adds its part to the step and tells its size: 0 where others take all logits that a step may read."""
            nonlocal rows
            most = self.max_num_batched_tokens if alone else self.chunks.cap(len(step), read, seq.computed, long)
            size = min(seq.wanted, most, budget)
            if (scores := seq.scores) is not None:
                size = scores.fitting(seq.computed, size, rows)
                rows -= len(scores.due(seq.computed, size))
            if size:
                chunks.append(Slice(seq, size))
            return size

        for seq in self.running.prefilling():
            if budget <= 0:
                break
            budget -= part(seq)
        while budget > 0 and (admitted := self._admission.admit(above=given_way)) is not None:
            budget -= part(admitted)
        # those that decode would wait for what prefills get on top of their parts
        return step + (chunks if step else _fill(chunks, budget))

    def extend(self, step: list[Slice]) -> list[Slice]:
        """The step with the drafts of its decoding sequences. They get what budget and pool have left, nobody gives way for
        them, and they are cut to that."""
        budget = self.max_num_batched_tokens - sum(item.size for item in step)
        for at, (seq, size) in enumerate(step):
            if seq.drafts:
                del seq.drafts[self._tables.stretch(seq, min(budget, len(seq.drafts))) :]
                budget -= len(seq.drafts)
                step[at] = Slice(seq, size + len(seq.drafts))
        return step

    def commit(self, step: list[Slice]) -> None:
        """The step's keys and values are in the cache. Charges shares and lets held siblings start. Of a sequence with drafts,
        only the verified part of its slice is named, and `tokens` hold that part; the drafts are gone after this."""
        # all that decode are in every step, one token each; what else there is to know of a token, its mark says
        for (share, weight), count in self.running.decoders.items():
            self.waiting.charge(share, outputs=count / weight)
        self.running.read += len(self.running.decoding)
        for seq, count in step:
            computed = seq.computed = seq.computed + count
            if computed >= seq.mark or seq.drafts:
                self._moved(seq, count)
        self.waiting.settle(self._active.keys())

    def _moved(self, seq: Sequence, count: int) -> None:
        """A prefill got on, or a decoding sequence has filled a block or verified its drafts."""
        if seq.drafts:
            self._tables.trim(seq)
            seq.drafts = []
        if seq in self.running.decoding:
            if count > 1:
                self.running.read += count - 1
                self.waiting.charge(seq.share, outputs=(count - 1) / seq.weight)
        elif (fresh := seq.computed - seq.charged) > 0:
            inputs = min(fresh, max(0, seq.context - seq.charged))
            self.waiting.paid(seq, fresh)
            self.waiting.charge(seq.share, inputs=inputs / seq.weight, outputs=(fresh - inputs) / seq.weight)
            seq.charged = seq.computed
        self._tables.learn(seq)
        self.running.moved(seq, self._tables.room(seq), self.pool.block_tokens)
        if seq.index == 0 and seq.group.live > 1:
            self._release_held(seq.group, seq)

    def end(self, seq: Sequence) -> None:
        """The one way out: finished, cancelled, failed. Blocks are free when it returns; a second call does nothing."""
        if seq.status is Status.ENDED:
            return
        if seq.status is Status.RUNNING:
            self.running.leave(seq)
            self.waiting.forgive(seq)
        elif seq.status is Status.WAITING:
            self.waiting.remove(seq)
        self._tables.free(seq)
        seq.status = Status.ENDED
        seq.group.live -= 1
        if seq.group.live == 0:
            del self.groups[seq.group.work.request_id]
            self._active[seq.share] -= 1
            if not self._active[seq.share]:
                del self._active[seq.share]
        elif seq.index == 0:
            self._release_held(seq.group, None)

    def preempt(self, seq: Sequence) -> None:
        """Sends a running sequence back into the queue."""
        self._admission.preempt(seq)

    def hold(self, seq: Sequence) -> None:
        """A running beam that is computed lets go of row and blocks, which the prefix cache knows, until `fork`."""
        self.running.leave(seq)
        self.waiting.forgive(seq)
        self._tables.free(seq)
        seq.status = Status.HELD

    def fork(self, group: Group, forks: list[tuple[int, int]]) -> None:
        """The next round of a search whose beams are all held: each takes the text of one of them, and one token more."""
        texts = [(seq.tokens, seq.keys) for seq in group.members]
        for seq, (parent, token) in zip(group.members, forks, strict=False):
            tokens, keys = texts[parent]
            seq.tokens, seq.keys = [*tokens, token], list(keys)
            seq.rounds += 1
            self._admission.enqueue(seq)

    def check(self) -> list[str]:
        """Recounts blocks, rows and queues from the sequences themselves; returns what disagrees."""
        problems = self.pool.check(seq.blocks for seq in self._all())
        problems += [*self.running.problems(), *self._tables.problems()]
        if self._active != Counter(group.work.share for group in self.groups.values()):
            problems.append("the count of active shares is wrong")
        for status, members in ((Status.RUNNING, list(self.running)), (Status.WAITING, list(self.waiting))):
            if {id(seq) for seq in members} != {id(seq) for seq in self._all() if seq.status is status}:
                problems.append(f"the {status} list is not the set of {status} sequences")
        for seq in self._all():
            if seq.computed > self._tables.room(seq) or seq.computed >= len(seq.tokens) + 1:
                problems.append(f"{seq.name}: {seq.computed} computed is too much")
            if seq.blocks and seq.status is not Status.RUNNING and not self._tables.holds_while_waiting(seq):
                problems.append(f"{seq.name} is {seq.status} and holds blocks that nobody could take")
        return problems + self.waiting.problems(list(self.running))

    def _all(self) -> Iterator[Sequence]:
        for group in self.groups.values():
            yield from (seq for seq in group.members if seq.status is not Status.ENDED)

    def _release_held(self, group: Group, leader: Sequence | None) -> None:
        if group.beams is not None:
            return
        for seq in self._tables.release_held(group, leader):
            self._admission.enqueue(seq)


def _fill(chunks: list[Slice], budget: int) -> list[Slice]:
    """Gives what is left of the budget to prefills that were cut short for the sake of others. Those whose logits are read
    keep the parts that fit their bound."""
    filled = []
    for seq, count in chunks:
        more = 0 if seq.scores is not None else min(seq.wanted - count, budget)
        budget -= more
        filled.append(Slice(seq, count + more))
    return filled
