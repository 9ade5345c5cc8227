"""Continuous batching on virtual time, without one event per token.

Between two changes of the batch every running sequence gains one token per step and all steps take equally long, so
whole runs of steps are one event; a change (a new prompt, a cancel) cuts the run at the end of the step that is under
way. Prefill is chunked: a step's token budget goes to decoding sequences first, the rest to prompts: by band, then to the
tenant that has had the least of it for its weight (as in the native engine), then in order of arrival.
A sequence enters the batch when there is a slot and KV room for its final length, so nothing is ever preempted.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush

from rungway.clock import NS_PER_MS
from rungway.engine.protocol import EngineStats
from rungway.simulate.cost import CostModel
from rungway.simulate.job import Job
from rungway.simulate.loop import Loop
from rungway.simulate.prefix import PrefixCache

RUN_STEPS_MAX = 64
_LEARN = 0.2


OnFirst = Callable[[Job], None]
OnEnd = Callable[[Job, str], None]


class Batch:
    """`on_first` when a job's first token is out, `on_end(job, finish)` when it is over (length | cancelled).

    `slow` stretches every following step. `emitted_total` counts output over all jobs that ever ran here.
    """

    def __init__(
        self,
        loop: Loop,
        cost: CostModel,
        *,
        slots: int,
        kv_tokens: int,
        step_tokens: int,
        on_first: OnFirst,
        on_end: OnEnd,
        cache_blocks: int = 0,
    ) -> None:
        self.loop, self.cost = loop, cost
        self.slots, self.kv_tokens, self.step_tokens = slots, kv_tokens, step_tokens
        self.slow = 1.0
        self.dead = False
        self.emitted_total = 0
        self.busy_ns = 0
        self.steps = 0
        self._on_first, self._on_end = on_first, on_end
        self._waiting: list[tuple[int, int, Job]] = []
        self._prefill: list[Job] = []
        self._decode: list[tuple[int, int, Job]] = []
        self.running: dict[tuple[str, int], Job] = {}
        self._serial = 0
        self._reserved = 0
        self._context = 0  # sum over decoding jobs of (context - joined): context now = this + jobs x steps
        self._decoding = 0
        self._epoch = 0
        self._run: tuple[int, int, int] | None = None  # start, step, count
        self._chunks: list[tuple[Job, int]] = []
        self._prefill_rate = 0.0
        self._step_ns = 0
        self._stopping = False
        self._spent: dict[str, float] = {}  # prompt tokens computed / weight, per tenant
        self.prefixes = PrefixCache(cache_blocks)

    # -- orders -----------------------------------------------------------------------------------------------

    def submit(self, job: Job) -> None:
        self.running[(job.request_id, job.attempt)] = job
        delay_ns = int(self.cost.first_ms * NS_PER_MS)
        if delay_ns:
            self.loop.after(delay_ns, self._arrive, job)
        else:
            self._arrive(job)

    def cancel(self, request_id: str) -> None:
        """Stop every attempt of a request at the end of the present step."""
        for key in [key for key in self.running if key[0] == request_id]:
            self.running[key].stop = True
            self._stopping = True
        if self._run is None:
            self._end_stopped()
            self._plan()
        else:
            self._cut_run()

    def kill(self) -> list[Job]:
        """Stop at once; what ran, with `finished` = tokens emitted by now."""
        gone = list(self.running.values())
        for job in gone:
            self._close(job, self.emitted(job, self.loop.now_ns))
        self.dead = True
        self._epoch += 1
        return gone

    # -- readings ---------------------------------------------------------------------------------------------

    def emitted(self, job: Job, at_ns: int) -> int:
        """Tokens of a job that were out at `at_ns` (not earlier than the run under way)."""
        if job.state != "decode":
            return job.finished
        return min(self.steps_at(at_ns) - job.joined, job.target)

    def steps_at(self, at_ns: int) -> int:
        """Steps that were over at `at_ns`: of one look at many jobs, the part that is the same for all."""
        if self._run is None:
            return self.steps
        start_ns, step_ns, count = self._run
        return self.steps + min(count, max(0, at_ns - start_ns) // step_ns)

    def stats(self) -> EngineStats:
        context = self._context + self._decoding * self.steps
        total = self.kv_tokens // 16
        used = min(total, (context + sum(job.prompt for job in self._prefill)) // 16)
        in_batch = self._decoding + len(self._prefill)
        rate = 1e9 * self._decoding / self._step_ns if self._step_ns and self._decoding else 0.0
        waiting = len(self._waiting)
        return EngineStats(
            in_batch, waiting, context, total, total - used, 0, self._step_ns / 1e6, self._prefill_rate, rate
        )

    # -- the batch --------------------------------------------------------------------------------------------

    def _arrive(self, job: Job) -> None:
        if self.dead or job.state == "done":
            return
        if job.stop or job.target <= 0:
            self._finish(job, "cancelled" if job.stop else "length")
            return
        self._serial += 1
        job.arrived = self._serial
        active = [self._spent[other.share] for other in self._prefill]
        if active:  # no credit for idle time
            self._spent[job.share] = max(self._spent.get(job.share, 0.0), min(active))
        self._spent.setdefault(job.share, 0.0)
        heappush(self._waiting, (job.priority, self._serial, job))
        if self._run is None:
            self._plan()
        else:
            self._cut_run()

    def _plan(self) -> None:
        """Begin the next step, or run of equal steps."""
        self._admit()
        n = self._decoding
        if not n and not self._prefill:
            self._run = None
            return
        self._chunks, budget, chunk_tokens, count = [], max(1, self.step_tokens - n), 0, 1
        if len(self._prefill) > 1:
            self._prefill.sort(key=lambda job: (job.priority, self._spent[job.share], job.arrived))
        for job in self._prefill:
            if budget <= 0:
                break
            chunk = min(job.left, budget)
            self._chunks.append((job, chunk))
            budget -= chunk
            chunk_tokens += chunk
        if not self._prefill:
            while self._decode[0][2].state == "done":
                heappop(self._decode)
            count = min(RUN_STEPS_MAX, self._decode[0][0] - self.steps)
        if self._stopping or self._waiting_fits():
            count = 1
        context = self._context + n * self.steps
        step_ms = self.cost.step_ms(n + chunk_tokens, context + chunk_tokens) * self.slow
        step_ns = max(1, int(step_ms * NS_PER_MS))
        if chunk_tokens:
            rate = 1e9 * chunk_tokens / step_ns
            self._prefill_rate += (rate - self._prefill_rate) * (_LEARN if self._prefill_rate else 1.0)
        self._step_ns = step_ns
        self._run = (self.loop.now_ns, step_ns, count)
        self._epoch += 1
        self.loop.after(step_ns * count, self._ran, self._epoch)

    def _waiting_fits(self) -> bool:
        return bool(self._waiting) and len(self._prefill) + self._decoding < self.slots and not self._prefill

    def _cut_run(self) -> None:
        assert self._run is not None
        start_ns, step_ns, count = self._run
        shorter = (self.loop.now_ns - start_ns) // step_ns + 1
        if shorter < count:
            self._run = (start_ns, step_ns, shorter)
            self._epoch += 1
            self.loop.at(start_ns + step_ns * shorter, self._ran, self._epoch)

    def _ran(self, epoch: int) -> None:
        """The planned steps are over."""
        if epoch != self._epoch or self._run is None:
            return
        _, step_ns, count = self._run
        self.busy_ns += step_ns * count
        self.steps += count
        self._run = None
        if self._stopping:
            self._end_stopped()
        for job, chunk in self._chunks:
            job.left -= chunk
            self._spent[job.share] += chunk / job.weight
            if job.left == 0 and job.state == "prefill":
                self._join(job)
        self._chunks = []
        decode = self._decode
        while decode and (decode[0][0] <= self.steps or decode[0][2].state == "done"):
            job = heappop(decode)[2]
            if job.state != "done":
                self._finish(job, "length")
        self._plan()

    def _admit(self) -> None:
        waiting = self._waiting
        while waiting and self._decoding + len(self._prefill) < self.slots:
            job = waiting[0][2]
            if job.state == "done":
                heappop(waiting)
                continue
            size = job.prompt + job.target
            if self._reserved + size > self.kv_tokens and (self._decoding or self._prefill):
                return
            heappop(waiting)
            self._reserved += size
            job.cached = self.prefixes.look(job.share, job.blocks, job.prompt)
            job.state, job.left = "prefill", max(1, job.prompt + job.resumed - job.cached)
            self._prefill.append(job)

    def _join(self, job: Job) -> None:
        """The prompt is computed, and with its last chunk the first token."""
        self._prefill.remove(job)
        job.state, job.joined = "decode", self.steps - 1
        job.finish_step = job.joined + job.target
        self._decoding += 1
        self._context += job.prompt + job.resumed - job.joined
        self._serial += 1
        heappush(self._decode, (job.finish_step, self._serial, job))
        job.first = True
        self._on_first(job)

    def _end_stopped(self) -> None:
        self._stopping = False
        for job in [job for job in self.running.values() if job.stop]:
            self._finish(job, "cancelled")

    def _finish(self, job: Job, finish: str) -> None:
        emitted = max(0, job.target) if finish == "length" else self.emitted(job, self.loop.now_ns)
        self._close(job, emitted)
        self._on_end(job, finish)

    def _close(self, job: Job, emitted: int) -> None:
        if job.state == "prefill":
            self._prefill.remove(job)
        elif job.state == "decode":
            self._decoding -= 1
            self._context -= job.prompt + job.resumed - job.joined
        if job.state in ("prefill", "decode"):
            self._reserved -= job.prompt + job.target
        job.state, job.finished = "done", emitted
        self.emitted_total += emitted
        del self.running[(job.request_id, job.attempt)]
