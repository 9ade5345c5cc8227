"""A long run at 80 % of what the platform can do: memory stays flat, and afterwards nothing is held, queued or lost.

The load is half unary, half 32-token streams, each in open loop at 40 % of its own measured rate. It comes in segments,
so that the client's own memory stays bounded; resident memory of every process of ours is sampled all along.
"""

from __future__ import annotations

import asyncio
import re
import statistics
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rungway.chaos.bench.gateway import run_loop, stream_shots, unary_shots
from rungway.chaos.bench.http_load import Load, closed_loop, open_loop
from rungway.chaos.bench.ours import Ours, rss_bytes, start_ours
from rungway.chaos.bench.report import Report, Say, surroundings
from rungway.chaos.bench.shots import Shot

SHARE_EACH = 0.4
SEGMENT_S = 20.0
SAMPLE_S = 2.0
REST_S = 30.0
GROWTH_MAX = 0.05
CONNECTIONS = 64
CONNECTIONS_MAX = 256
_GAUGES = ("rungway_in_flight_tokens", "rungway_queue_depth")


class Memory:
    """Resident bytes of each process over time."""

    def __init__(self, processes: dict[str, int]) -> None:
        self.processes = processes
        self.samples: dict[str, list[int]] = {name: [] for name in processes}

    def sample(self) -> None:
        for name, pid in self.processes.items():
            self.samples[name].append(rss_bytes(pid))

    def growth(self, name: str) -> float:
        """Mean of the last third over that of the first, less 1; nan where the process ended or was seen too rarely."""
        seen = self.samples[name]
        third = len(seen) // 3
        if third == 0 or not all(seen):
            return float("nan")
        return statistics.fmean(seen[-third:]) / statistics.fmean(seen[:third]) - 1


def bench_soak(*, seconds: float, say: Say) -> Report:
    """Raises BenchError when the platform does not start."""
    report = Report("soak", notes=[surroundings()])
    with tempfile.TemporaryDirectory(prefix="rungway-bench-") as made, ExitStack() as stack:
        ours = start_ours(stack, Path(made))
        target = ours.target
        unary, streams = unary_shots(target), run_loop(stream_shots(target))
        rates = [
            run_loop(closed_loop(target, shots, connections=CONNECTIONS, seconds=5.0, warm_s=2.0)).per_second
            for shots in (unary, streams)
        ]
        say(f"measured at {CONNECTIONS} connections: {rates[0]:.0f} unary/s, {rates[1]:.0f} streams/s")
        report.notes.append(
            f"{seconds:.0f} s at {SHARE_EACH:.0%} of {rates[0]:.0f} unary/s and {SHARE_EACH:.0%} of {rates[1]:.0f} streams/s together"
        )
        memory = Memory(ours.processes())
        errors, answers, wrong = _load(ours, unary, streams, rates, seconds, memory, say)
        for name in memory.samples:
            growth = memory.growth(name)
            report.at_most(f"RSS growth of {name}, last third / first third", growth, GROWTH_MAX, "")
            report.control.append(
                {"what": f"RSS of {name}, MB", "samples": [one >> 20 for one in memory.samples[name]]}
            )
        report.at_most("failed requests", sum(errors.values()), 0, "")
        report.at_most("frames lost or out of order", wrong, 0, "")
        report.control.append({"what": "answers", "count": answers, "errors": dict(errors)})
        _at_rest(report, ours)
    return report


def _load(
    ours: Ours, unary: list[Shot], streams: list[Shot], rates: list[float], seconds: float, memory: Memory, say: Say
) -> tuple[Counter[str], int, int]:
    """Segment after segment until the time is over: (errors, answers, words lost or misplaced)."""
    errors: Counter[str] = Counter()
    answers = wrong = 0
    left_s = seconds
    while left_s > 0.5:
        length_s = min(SEGMENT_S, left_s)
        left_s -= length_s
        loads = run_loop(_segment(ours, unary, streams, rates, length_s, memory))
        for load in loads:
            errors += load.errors
            answers += load.answers
            wrong += load.lost + load.misplaced
        late = max(float(load.summary()["p99_ms"]) for load in loads)  # type: ignore[arg-type]
        say(f"{left_s:6.0f} s left, {answers} answers, worst p99 of this segment {late:.0f} ms, errors {dict(errors)}")
    return errors, answers, wrong


async def _segment(
    ours: Ours, unary: list[Shot], streams: list[Shot], rates: list[float], length_s: float, memory: Memory
) -> list[Load]:
    async def sampling() -> None:
        while True:
            memory.sample()
            await asyncio.sleep(SAMPLE_S)

    sampler = asyncio.ensure_future(sampling())
    try:
        return list(
            await asyncio.gather(
                *(
                    open_loop(
                        ours.target,
                        shots,
                        per_second=max(0.5, SHARE_EACH * rate),
                        seconds=length_s,
                        connections_max=CONNECTIONS_MAX,
                        warm_s=0.0,
                    )
                    for shots, rate in ((unary, rates[0]), (streams, rates[1]))
                )
            )
        )
    finally:
        sampler.cancel()


def _at_rest(report: Report, ours: Ours) -> None:
    """What is still held once the load has ended; settlement may take a moment, but not longer than REST_S."""
    until = time.monotonic() + REST_S
    left = _held(ours)
    while any(left.values()) and time.monotonic() < until:
        time.sleep(0.5)
        left = _held(ours)
    for what, amount in left.items():
        report.at_most(f"{what} at rest", amount, 0, "")


def _held(ours: Ours) -> dict[str, float]:
    tenants: dict[str, Any] = ours.get("/admin/tenants")
    each = list(tenants.values())
    text = str(ours.get("/metrics"))
    found: dict[str, float] = {
        "requests running": float(sum(one["running"] for one in each)),
        "requests waiting": float(sum(one["waiting"] for one in each)),
        "tokens held": float(sum(one["held_tokens"] for one in each)),
    }
    for gauge in _GAUGES:
        values = re.findall(rf"^{gauge}(?:\{{[^}}]*\}})? (\S+)$", text, re.MULTILINE)
        found[f"gauge {gauge}"] = sum(map(float, values))
    return found
