"""One sample in the making (Sequence) and the request that it belongs to (Group)."""

from __future__ import annotations

from enum import StrEnum

from rungway.engine.beams import Beams
from rungway.engine.protocol import Work
from rungway.engine.scores import Scores


class Status(StrEnum):
    """held: waits for its group's first member to compute the shared prompt. Transitions are in scheduler.py."""

    HELD = "held"
    WAITING = "waiting"
    RUNNING = "running"
    ENDED = "ended"


class Sequence:
    """Tokens known and tokens computed: a step computes some of the difference and samples when it reaches zero.

    `tokens` = prompt + resumed + sampled. The KV cache holds positions 0..computed-1, in `blocks`. `row` is the
    runner's slot while blocks are held on a running sequence, else -1.
    """

    __slots__ = (
        "arrival",
        "blocks",
        "charged",
        "computed",
        "context",
        "drafts",
        "group",
        "held_since",
        "index",
        "keys",
        "known",
        "limit",
        "mark",
        "owed",
        "preemptions",
        "rounds",
        "row",
        "share",
        "skips",
        "status",
        "tokens",
        "weight",
    )

    def __init__(self, group: Group, index: int, arrival: int, limit: int) -> None:
        """`limit` = length at which the sequence ends (prompt + max_tokens, capped by the context)."""
        resume = group.work.resume[index] if index < len(group.work.resume) else []
        self.group = group
        self.index = index
        self.share = group.work.share
        self.weight = group.work.weight
        self.arrival = arrival
        self.limit = limit
        self.tokens: list[int] = [*group.work.prompt_ids, *resume]
        self.context = len(self.tokens)  # prompt + resumed: what this attempt did not sample
        self.drafts: list[int] = []  # guesses of what comes after `tokens`; there only within a step (drafts.py)
        self.computed = 0
        self.charged = 0  # tokens that the share has paid for, kept up only while it prefills; recomputation is free
        self.blocks: list[int] = []
        self.keys: list[bytes] = []  # of the whole blocks of `tokens`, as far as they were needed (prefix.py)
        self.known = 0  # leading blocks that were offered to the prefix index
        self.mark = 0  # position at which a decoding sequence has filled a block; 0 while it prefills (running.py)
        self.owed = 0.0  # what its share will be charged for tokens that are admitted and not computed (fairness.py)
        self.row = -1
        self.status = Status.HELD
        self.preemptions = 0
        self.rounds = 0  # how often it took over the text of a beam
        self.skips = 0  # how often a younger one of its line went before it (lpm.py)
        self.held_since = -1  # step from which it waits for another to compute its beginning (lpm.py)

    @property
    def wanted(self) -> int:
        """Tokens whose keys and values are not computed yet; 1 while decoding."""
        return len(self.tokens) - self.computed

    @property
    def scores(self) -> Scores | None:
        """The prompt's log-probabilities, as long as computing this sequence has to give some of them."""
        scores = self.group.scores
        return None if scores is None or self.index or scores.whole else scores

    def findable(self, block_tokens: int) -> int:
        """Leading blocks that may come from the prefix cache. The last token is always computed anew, for a sequence must have
        something to compute; so is every token whose logits have to be read."""
        scores = self.scores
        last = len(self.tokens) - 1
        return (last if scores is None else min(last, scores.read)) // block_tokens

    @property
    def priority(self) -> int:
        return self.group.work.priority

    @property
    def name(self) -> str:
        return f"{self.group.work.request_id}/{self.index}"


class Group:
    """All sequences of one Work. `sampled` counts this attempt's tokens over all of them; `cached` are the prompt tokens
    that the first admission found in the prefix cache, None before it."""

    __slots__ = ("beams", "cached", "live", "members", "sampled", "scores", "work")

    def __init__(self, work: Work) -> None:
        self.work = work
        self.members: list[Sequence] = []
        self.live = work.sequences
        self.sampled = 0
        self.cached: int | None = None
        self.beams: Beams | None = None  # where its members are beams of one search
        self.scores: Scores | None = (
            None  # where the prompt's log-probabilities are wanted; the first member finds them
        )
        if work.sampling.prompt_logprobs is not None:
            self.scores = Scores(work.prompt_ids)
