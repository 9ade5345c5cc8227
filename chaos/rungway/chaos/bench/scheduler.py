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
from rungway.engine.scheduler import Scheduler, Slice
from rungway.engine.sequence import Group, Sequence

RUNNING, WAITING, TENANTS = 1000, 10_000, 50
BATCHED_TOKENS = 4096
BLOCK_TOKENS = 16
SYSTEM_TOKENS = 128  # every tenant's prompts begin alike
STEPS, WARM_STEPS = 600, 60
BAR_MS = 2.0


class Load:
    """A scheduler under a steady load: what ends is replaced."""

    def __init__(self, *, seed: int = 1) -> None:
        self.scheduler = Scheduler(
            BlockPool(RUNNING * 48, BLOCK_TOKENS), max_num_seqs=RUNNING, max_num_batched_tokens=BATCHED_TOKENS
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
    """Milliseconds of processor time per step, once the batch is full."""
    load = Load()
    for _ in range(WAITING):
        load.add(load.work())
    while len(load.scheduler.running) < RUNNING:
        load.step()
    for _ in range(WARM_STEPS):
        load.step()
    spent_ms: list[float] = []
    tokens = 0
    for _ in range(STEPS // 4 if quick else STEPS):
        size, took_ms = load.step()
        tokens += size
        spent_ms.append(took_ms)
    mean = sum(spent_ms) / len(spent_ms)
    problems = load.scheduler.check()
    row: dict[str, Any] = {
        "steps": len(spent_ms),
        "mean_ms": round(mean, 3),
        "p50_ms": round(percentile(spent_ms, 0.5), 3),
        "p99_ms": round(percentile(spent_ms, 0.99), 3),
        "tokens_per_step": round(tokens / len(spent_ms)),
        "running": len(load.scheduler.running),
        "waiting": len(load.scheduler.waiting),
    }
    say(", ".join(f"{name} {value}" for name, value in row.items()))
    report = Report(
        "scheduler", notes=[surroundings(), f"{RUNNING} running, {WAITING} waiting, {TENANTS} tenants, one core"]
    )
    report.at_most("processor time of a step, mean", mean, BAR_MS, "ms")
    report.at_most("books that do not balance afterwards", len(problems), 0, "")
    report.control.append(row)
    return report
