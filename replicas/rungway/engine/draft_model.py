"""Drafts from a smaller model of the same vocabulary, which decodes ahead of the big one.

It has a KV cache of its own with room for a few sequences; whoever was drafted for least recently makes room. It chooses
tokens by the very rules and random numbers of the big model, so that a draft is right as often as both agree. The grade of
its first draft is 0.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence as Seq

import torch
import torch.nn.functional as F

from rungway.engine import verify
from rungway.engine.pace import Offer
from rungway.engine.runner import Runner
from rungway.engine.sampler import Row, sample
from rungway.engine.scheduler import Slice
from rungway.engine.sequence import Sequence

_BEHIND_MAX = 2  # tokens before the last that are computed together with it, at the first draft


class _Mirror:
    """A sequence as the draft model has it: `seq` holds its own blocks, and `seq.tokens` the known tokens and drafts."""

    __slots__ = ("seq", "synced")

    def __init__(self, original: Sequence, slot: int, blocks: list[int]) -> None:
        self.seq = Sequence(original.group, original.index, original.arrival, original.limit)
        self.seq.tokens = []
        self.seq.row = slot
        self.seq.blocks = blocks
        self.synced = 0  # tokens that are known to be the original's

    def sync(self, tokens: list[int]) -> None:
        """Takes the original's tokens; what was computed stays as far as they are the same. One is left to compute."""
        mine = self.seq.tokens
        same = self.synced
        while same < min(len(mine), len(tokens)) and mine[same] == tokens[same]:
            same += 1
        del mine[same:]
        mine += tokens[same:]
        self.seq.computed = min(self.seq.computed, same, len(tokens) - 1)
        self.synced = len(tokens)


class ModelDrafter:
    """`slots` sequences of up to `context` tokens; at most `chunk` tokens are computed for texts that are new here in one
    step, in which these have no drafts."""

    costs = True

    def __init__(
        self, runner: Runner, *, slots: int, context: int, block_tokens: int, chunk: int, vocab_size: int
    ) -> None:
        """`vocab_size` is the big model's. The runner has `slots` rows, and blocks 1.. for them, each slot's in a row."""
        self._runner = runner
        self._context = context
        self._chunk = chunk
        self._vocab_size = vocab_size
        self._per_slot = -(-context // block_tokens)
        self._free = list(range(slots - 1, -1, -1))
        self._mirrors: OrderedDict[Sequence, _Mirror] = OrderedDict()  # least recently used first

    def propose(self, asks: Seq[tuple[Sequence, Row]], counts: Seq[int]) -> list[Offer]:
        drafts: list[list[int]] = [[] for _ in asks]
        open_ = []
        for at, ((seq, _), count) in enumerate(zip(asks, counts, strict=True)):
            if len(seq.tokens) + count <= self._context:
                self._mirror(seq).sync(seq.tokens)
                open_.append(at)
        open_ = self._caught_up(open_, [seq for seq, _ in asks])
        while open_:
            mirrors = [self._mirrors[asks[at][0]].seq for at in open_]
            places = [verify.rows(asks[at][1], drafts[at])[-1] for at in open_]
            for at, mirror, token in zip(open_, mirrors, self._next(mirrors, places), strict=True):
                if token is not None:
                    drafts[at].append(token)
                    mirror.tokens.append(token)
            open_ = [
                at for at, mirror in zip(open_, mirrors, strict=True) if len(drafts[at]) < counts[at] and mirror.wanted
            ]
        return [Offer(tokens, 0) for tokens in drafts]

    def forget(self, seq: Sequence) -> None:
        mirror = self._mirrors.pop(seq, None)
        if mirror is not None:
            self._free.append(mirror.seq.row)

    def _mirror(self, seq: Sequence) -> _Mirror:
        mirror = self._mirrors.get(seq)
        if mirror is None:
            if not self._free:
                self.forget(next(iter(self._mirrors)))
            slot = self._free.pop()
            first = 1 + slot * self._per_slot
            mirror = self._mirrors[seq] = _Mirror(seq, slot, list(range(first, first + self._per_slot)))
        self._mirrors.move_to_end(seq)
        return mirror

    def _caught_up(self, places: list[int], seqs: list[Sequence]) -> list[int]:
        """Those whose text was all but computed; the others get on."""
        budget = self._chunk
        ready = []
        for at in places:
            mirror = self._mirrors[seqs[at]].seq
            behind = mirror.wanted - 1
            if behind <= _BEHIND_MAX:
                ready.append(at)
            elif budget:
                size = min(behind, budget)
                self._runner.run([Slice(mirror, size)])
                mirror.computed += size
                budget -= size
        return ready

    def _next(self, mirrors: list[Sequence], places: list[Row]) -> list[int | None]:
        """One token more for each."""
        rows = dict(zip(mirrors, places, strict=True))
        done = self._runner.run([Slice(mirror, mirror.wanted) for mirror in mirrors])
        for mirror in mirrors:
            mirror.computed = len(mirror.tokens)
        sampled = sample(_fitted(done.logits, self._vocab_size), [rows[mirror] for mirror in done.sequences])
        found = {mirror: got.token for mirror, got in zip(done.sequences, sampled, strict=True)}
        return [found[mirror] for mirror in mirrors]


def _fitted(logits: torch.Tensor, size: int) -> torch.Tensor:
    """Vocabularies may be padded differently; what one of them lacks cannot be drafted."""
    more = size - logits.shape[1]
    return logits[:, :size] if more <= 0 else F.pad(logits, (0, more), value=float("-inf"))
