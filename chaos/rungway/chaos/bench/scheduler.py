"""What one step of the engine's scheduler costs: 1,000 sequences running, 10,000 waiting, 50 tenants, no model.

A step is `schedule`, `commit`, the ends of what is finished and the arrival of as many new requests. Sampling a token is
the engine's work and not counted. Processor time of one core.
"""

from __future__ import annotations

import random
import time
from typing import Any

from rungway.chaos.bench.http_load import percentile
from rungway.chaos.bench.report import Report, Say, surroundings
from rungway.clock import NS_PER_MS
from rungway.engine.blocks import BlockPool
from rungway.engine.protocol import Sampling, Work
from rungway.engine.rules import Rules, Schedule
from rungway.engine.scheduler import Scheduler, Slice
from rungway.engine.sequence import Group, Sequence

RUNNING, WAITING, TENANTS = 1000, 10_000, 50
BATCHED_TOKENS = 4096
BLOCK_TOKENS = 16
LONG_PREFILL_TOKENS = 512
SYSTEM_TOKENS = 128  # every tenant's prompts begin alike
STEPS, WARM_STEPS = 600, 60
BAR_MS = 2.0


class Load:
    """A scheduler under a steady load: what ends is replaced."""

    def __init__(self, schedule: Schedule = Schedule.FCFS, soft_quota: float | None = None, *, seed: int = 1) -> None:
        self.scheduler = Scheduler(
            BlockPool(RUNNING * 48, BLOCK_TOKENS, soft_quota=soft_quota),
            max_num_seqs=RUNNING,
            max_num_batched_tokens=BATCHED_TOKENS,
            rules=Rules(schedule=schedule, kv_soft_quota=soft_quota, long_prefill_tokens=LONG_PREFILL_TOKENS),
        )
        self.chance = random.Random(seed)
        self.serial = 0

    def work(self) -> Work:
        chance, tenant = self.chance, self.chance.randrange(TENANTS)
        self.serial += 1
        system = [tenant * 1000 + at for at in range(SYSTEM_TOKENS)]
        prompt = [*system, *(chance.randrange(50_000) for _ in range(chance.randint(16, 256)))]
        return Work(
            request_id=f"r{self.serial}",
            attempt=1,
            prompt_ids=prompt,
            prompt_text="",
            sampling=Sampling(max_tokens=chance.randint(50, 350)),
            share=f"t{tenant}",
            weight=1.0 + tenant % 4,
            priority=1,
        )

    def add(self, work: Work) -> None:
        self.scheduler.add(Group(work), len(work.prompt_ids) + work.sampling.max_tokens)

    def step(self) -> tuple[int, float]:
        """One step; (tokens in it, processor milliseconds of the scheduler)."""
        scheduler = self.scheduler
        began_ns = time.process_time_ns()
        step = scheduler.schedule()
        spent_ns = time.process_time_ns() - began_ns
        ready = [seq for seq, size in step if seq.wanted == size]
        began_ns = time.process_time_ns()
        scheduler.commit(step)
        spent_ns += time.process_time_ns() - began_ns
        over = [seq for seq in ready if self._sample(seq)]
        arriving = [self.work() for _ in range(WAITING - len(scheduler.waiting) + len(over))]
        began_ns = time.process_time_ns()
        for seq in over:
            scheduler.end(seq)
        for work in arriving:
            self.add(work)
        spent_ns += time.process_time_ns() - began_ns
        return _tokens(step), spent_ns / NS_PER_MS

    @staticmethod
    def _sample(seq: Sequence) -> bool:
        seq.tokens.append(7)
        return len(seq.tokens) >= seq.limit


def _tokens(step: list[Slice]) -> int:
    return sum(size for _, size in step)


def bench_scheduler(*, quick: bool, say: Say) -> Report:
    """Milliseconds of processor time per step, once the batch is full; plain, and with everything switched on."""
    report = Report(
        "scheduler", notes=[surroundings(), f"{RUNNING} running, {WAITING} waiting, {TENANTS} tenants, one core"]
    )
    for name, load in (("plain", Load()), ("lpm and soft quotas", Load(Schedule.LPM, 0.01))):
        row, problems = _measure(load, STEPS // 4 if quick else STEPS)
        say(f"{name}: " + ", ".join(f"{key} {value}" for key, value in row.items()))
        if name == "plain":  # the order by prefixes costs more, and is a choice
            report.at_most("processor time of a step, mean", row["mean_ms"], BAR_MS, "ms")
        report.at_most(f"books that do not balance afterwards, {name}", len(problems), 0, "")
        report.control.append({"rules": name, **row})
    return report


def _measure(load: Load, steps: int) -> tuple[dict[str, Any], list[str]]:
    for _ in range(WAITING):
        load.add(load.work())
    while len(load.scheduler.running) < RUNNING:
        load.step()
    for _ in range(WARM_STEPS):
        load.step()
    taken = [load.step() for _ in range(steps)]
    spent_ms = [took_ms for _, took_ms in taken]
    row = {
        "steps": steps,
        "mean_ms": round(sum(spent_ms) / steps, 3),
        "p50_ms": round(percentile(spent_ms, 0.5), 3),
        "p99_ms": round(percentile(spent_ms, 0.99), 3),
        "tokens_per_step": round(sum(tokens for tokens, _ in taken) / steps),
        "running": len(load.scheduler.running),
        "waiting": len(load.scheduler.waiting),
    }
    return row, load.scheduler.check()
