"""A played replica: a batch behind the real messages. It counts, reports, and owes an end for every order it got."""

from __future__ import annotations

from dataclasses import dataclass

from rungway.clock import NS_PER_MS, NS_PER_S
from rungway.contracts import Version
from rungway.engine.protocol import EngineStats
from rungway.messages import AttemptAck, AttemptEnded, Cancel, Evict, ReplicaHello, ReplicaInfo, Report
from rungway.simulate.batch import Batch
from rungway.simulate.cost import CostModel
from rungway.simulate.job import Job
from rungway.simulate.link import Link
from rungway.simulate.loop import Loop
from rungway.simulate.prefix import CACHE_BLOCK_TOKENS
from rungway.types import AttemptEnd, Billing, Usage

RESEND_NS = NS_PER_S
NOTHING = Usage()


@dataclass(frozen=True, slots=True)
class Order:
    """What a gateway sends in place of the real Start: lengths instead of tokens."""

    job: Job
    billing: Billing


@dataclass(frozen=True, slots=True)
class News:
    """What a gateway gets in place of Deltas: the first token, and the end with all tokens of the attempt so far.
    What came between it asks the batch for, see `SimReplica.delivered`."""

    request_id: str
    attempt: int
    tokens: int
    finish: str | None = None
    error: str | None = None


@dataclass(slots=True)
class _Open:
    job: Job
    billing: Billing
    link: Link | None
    started_wall_ns: int
    reported: int = 0
    evicted: bool = False


class SimReplica:
    """`owed`: ends that nobody has acknowledged, those of dead predecessors on its node among them."""

    def __init__(
        self,
        loop: Loop,
        name: str,
        node: str,
        version: Version,
        cost: CostModel,
        *,
        report_ms: float = 100.0,
        owed: list[AttemptEnd] | None = None,
    ) -> None:
        self.loop, self.name, self.node, self.version, self.alive = loop, name, node, version, True
        blocks, block_tokens = (version.fake.kv_blocks, version.fake.block_tokens) if version.fake else (4096, 16)
        kv_tokens = (version.kv_blocks or blocks) * block_tokens
        self.batch = Batch(
            loop,
            cost,
            slots=version.max_num_seqs,
            kv_tokens=kv_tokens,
            step_tokens=cost.max_num_batched_tokens or version.max_num_batched_tokens,
            on_first=self._first,
            on_end=self._ended,
            cache_blocks=kv_tokens // CACHE_BLOCK_TOKENS,
        )
        self.info = ReplicaInfo(name, name, version.tier, version.name, version.max_num_seqs, kv_tokens)
        self.link: Link | None = None
        self._all_prefixes = True  # this controller has heard of none
        self.owed: dict[tuple[str, int], tuple[AttemptEnd, int]] = {}
        for end in owed or []:
            self.owed[(end.request_id, end.attempt)] = (end, -RESEND_NS)
        self.truth: list[AttemptEnd] = []  # every end that was ever made here
        self._open: dict[tuple[str, int], _Open] = {}
        self._seen: dict[str, int] = {}
        self._forbidden: dict[str, str] = {}
        self._report_ns = int(report_ms * NS_PER_MS)
        loop.after(int(self._report_ns * (hash_unit(name) + 0.5)), self._report)

    # -- messages ---------------------------------------------------------------------------------------------

    def up(self, link: Link) -> None:
        """To the controller: hello, and everything that is owed."""
        self.link, self._all_prefixes = link, True
        running = [(open_.job.request_id, open_.job.attempt) for open_ in self._open.values()]
        link.send(self, ReplicaHello(self.info, running))
        for end, _ in self.owed.values():
            link.send(self, AttemptEnded(end))

    def lost(self, link: Link) -> None:
        """The controller is away: go on. A gateway is away: stop its work."""
        if link.client is self:
            return
        for open_ in list(self._open.values()):
            if open_.link is link:
                open_.link = None
                self.batch.cancel(open_.job.request_id)

    def receive(self, link: Link, message: object) -> None:
        if isinstance(message, Order):
            self._start(link, message)
        elif isinstance(message, Cancel):
            self._interrupt(message.request_id)
        elif isinstance(message, Evict):
            self._interrupt(message.request_id, message.attempt, "evicted")
        elif isinstance(message, AttemptAck):
            for key in message.attempts:
                self.owed.pop(key, None)

    def _start(self, link: Link, order: Order) -> None:
        job = order.job
        if job.attempt <= self._seen.get(job.request_id, 0):
            return
        self._seen[job.request_id] = job.attempt
        forbidden = self._forbidden.pop(job.request_id, None)
        if forbidden is not None:
            finish, error = ("error", "evicted") if forbidden == "evicted" else ("cancelled", None)
            link.send(self, News(job.request_id, job.attempt, 0, finish, error))
            self._settle(job, order.billing, NOTHING, finish, self.loop.wall_ns())
            return
        for open_ in list(self._open.values()):
            if open_.job.request_id == job.request_id:
                self.batch.cancel(job.request_id)
        self._open[(job.request_id, job.attempt)] = _Open(job, order.billing, link, self.loop.wall_ns())
        self.batch.submit(job)

    def _interrupt(self, request_id: str, number: int = 0, why: str = "cancelled") -> None:
        mine = [open_ for open_ in self._open.values() if open_.job.request_id == request_id]
        mine = [open_ for open_ in mine if number in (0, open_.job.attempt)]
        for open_ in mine:
            open_.evicted = open_.evicted or why == "evicted"
        if mine:
            self.batch.cancel(request_id)
        elif request_id not in self._seen or number > self._seen[request_id]:
            self._forbidden[request_id] = why

    # -- the engine -------------------------------------------------------------------------------------------

    def _first(self, job: Job) -> None:
        open_ = self._open[(job.request_id, job.attempt)]
        if open_.link is not None:
            open_.link.send(self, News(job.request_id, job.attempt, 1))

    def _ended(self, job: Job, finish: str) -> None:
        open_ = self._open.pop((job.request_id, job.attempt))
        error = None
        if open_.evicted and finish == "cancelled":
            finish, error = "error", "evicted"
        if open_.link is not None:
            open_.link.send(self, News(job.request_id, job.attempt, job.finished, finish, error))
        self._settle(job, open_.billing, _usage(job), finish, open_.started_wall_ns)

    def _settle(self, job: Job, billing: Billing, usage: Usage, finish: str, started_wall_ns: int) -> None:
        end = AttemptEnd(
            request_id=job.request_id,
            attempt=job.attempt,
            replica_id=self.name,
            usage=usage,
            finish=finish,
            billing=billing,
            started_wall_ns=started_wall_ns,
            ended_wall_ns=self.loop.wall_ns(),
        )
        self.truth.append(end)
        self.owed[(end.request_id, end.attempt)] = (end, self.loop.now_ns)
        if self.alive and self.link is not None:
            self.link.send(self, AttemptEnded(end))

    def delivered(self, request_id: str, attempt: int, at_ns: int) -> int | None:
        """Tokens of a running attempt that had left by then; None for one that does not run (its end says it)."""
        open_ = self._open.get((request_id, attempt))
        return None if open_ is None else self.batch.emitted(open_.job, at_ns)

    # -- time -------------------------------------------------------------------------------------------------

    def _report(self) -> None:
        if not self.alive:
            return
        self.loop.after(self._report_ns, self._report)
        if self.link is None or not self.link.client_up:
            return
        progress = []
        steps = self.batch.steps_at(self.loop.now_ns)
        for open_ in self._open.values():
            job = open_.job
            emitted = min(steps - job.joined, job.target) if job.state == "decode" else job.finished
            if emitted > open_.reported:
                open_.reported = emitted
                progress.append((job.request_id, job.attempt, emitted))
        prefixes = self.batch.prefixes.news(full=self._all_prefixes)
        self._all_prefixes = False
        self.link.send(self, Report(self.name, self.stats(), progress, prefixes=prefixes))
        for key, (end, sent_ns) in list(self.owed.items()) if self.owed else ():
            if self.loop.now_ns - sent_ns >= RESEND_NS:
                self.owed[key] = (end, self.loop.now_ns)
                self.link.send(self, AttemptEnded(end))

    def reported(self) -> list[tuple[str, int]]:
        """Running attempts of which the controller was told that they moved."""
        return [key for key, open_ in self._open.items() if open_.reported and self.alive]

    def stats(self) -> EngineStats:
        return self.batch.stats()

    def kill(self) -> list[AttemptEnd]:
        """SIGKILL. Its token log says what it owes; a successor on the node will report that."""
        self.alive = False
        for job in self.batch.kill():
            open_ = self._open[(job.request_id, job.attempt)]
            self._settle(job, open_.billing, _usage(job), "lost", open_.started_wall_ns)
        return [end for end, _ in self.owed.values()]


def _usage(job: Job) -> Usage:
    seen = job.first or job.finished > 0
    return Usage(
        prompt_tokens=job.prompt if seen else 0, cached_tokens=job.cached if seen else 0, output_tokens=job.finished
    )


def hash_unit(text: str) -> float:
    """0 to 1, the same in every run: spreads what would else happen in step."""
    value = 2166136261
    for char in text:
        value = (value ^ ord(char)) * 16777619 & 0xFFFFFFFF
    return value / 2**32
