"""Rungway beside LiteLLM's proxy, vllm-router and the upstream alone, under one load client.

Each round starts one side after the other, so that only one runs at a time, and measures the same rows on each; ratios
are taken inside a round and their median over the rounds is held against the bar. All load is closed loop but for the
last row: an open loop at 60 % of the side's own unary rate of that round.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
from collections.abc import Awaitable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import uvloop

from rungway.chaos.bench.http_load import Load, closed_loop, learn, open_loop
from rungway.chaos.bench.ours import Ours, cpu_seconds, start_ours
from rungway.chaos.bench.report import Report, Say, surroundings
from rungway.chaos.bench.shots import Shot, Target
from rungway.chaos.bench.sides import SIDES

T = TypeVar("T")
Rows = dict[str, dict[str, Any]]

UNARY = (1, 16, 64)
STREAMS = (16, 64, 200)
STREAM_TOKENS = 32
PROMPTS = 16
OPEN_SHARE = 0.6
OPEN_CONNECTIONS_MAX = 256


@dataclass(frozen=True)
class Plan:
    """Durations in seconds; `warm_s` is not measured."""

    seconds: float
    warm_s: float
    rounds: int


FULL = Plan(8.0, 2.0, 3)
QUICK = Plan(3.0, 1.0, 1)


def run_loop(work: Awaitable[T]) -> T:
    """One load on a fresh uvloop."""

    async def main() -> T:
        return await work

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main())


def unary_shots(target: Target) -> list[Shot]:
    return [
        target.shot(f"Say one word, number {number}.", max_tokens=1, stream=False, key=number)
        for number in range(PROMPTS)
    ]


async def stream_shots(target: Target) -> list[Shot]:
    """Shots whose answers are known: each prompt's text was learned without load."""
    prompts = [f"Tell me about number {number}." for number in range(PROMPTS)]
    texts = await learn(target, prompts, max_tokens=STREAM_TOKENS)
    return [
        target.shot(prompt, max_tokens=STREAM_TOKENS, stream=True, key=number, text=texts[prompt])
        for number, prompt in enumerate(prompts)
    ]


def measure(target: Target, plan: Plan, side: str, say: Say, ours: Ours | None = None) -> Rows:
    """All rows of one side. With `ours`, each row also has the CPU time per request of every process of ours."""
    rows: Rows = {}

    def row(name: str, work: Awaitable[Load]) -> Load:
        processes = ours.processes() if ours is not None else {}
        before = {process: cpu_seconds(pid) for process, pid in processes.items()}
        load = run_loop(work)
        rows[name] = load.summary()
        if ours is not None:
            rows[name]["cpu_us_per_request"] = {
                process: round(1e6 * (cpu_seconds(pid) - before[process]) / max(1, load.answers))
                for process, pid in processes.items()
            }
        say(f"{side:<12} {name:<14} {_line(rows[name])}")
        return load

    shots = unary_shots(target)
    for many in UNARY:
        row(f"unary {many}", closed_loop(target, shots, connections=many, seconds=plan.seconds, warm_s=plan.warm_s))
    streams = run_loop(stream_shots(target))
    for many in STREAMS:
        row(f"streams {many}", closed_loop(target, streams, connections=many, seconds=plan.seconds, warm_s=plan.warm_s))
    rate = OPEN_SHARE * rows[f"unary {UNARY[-1]}"]["per_s"]
    if rate > 0:
        work = open_loop(
            target,
            shots,
            per_second=rate,
            seconds=plan.seconds,
            connections_max=OPEN_CONNECTIONS_MAX,
            warm_s=plan.warm_s,
        )
        row("open 60 %", work)
    return rows


def _line(row: dict[str, Any]) -> str:
    text = f"{row['per_s']:>8.1f}/s  p50 {row['p50_ms']:.2f}  p90 {row['p90_ms']:.2f}  p99 {row['p99_ms']:.2f} ms"
    if "frames" in row:
        text += f"  ttft p50 {row['ttft_ms_p50']:.1f} p99 {row['ttft_ms_p99']:.1f}  gap p99 {row['gap_ms_p99']:.1f}"
        text += f"  lost {row['lost']} misplaced {row['misplaced']}"
    if row["errors"]:
        text += f"  errors {row['errors']}"
    return text


def measure_side(name: str, plan: Plan, work: Path, say: Say) -> Rows:
    """Start one side, measure it, end it."""
    with ExitStack() as stack:
        if name == "ours":
            ours = start_ours(stack, work)
            return measure(ours.target, plan, name, say, ours)
        return measure(SIDES[name].start(stack, work), plan, name, say)


def bench_gateway(*, quick: bool, only: Sequence[str], say: Say, work: Path | None = None) -> Report:
    """Every side, or those of `only`; verdicts need ours and the sides they compare with. Raises BenchError."""
    plan = QUICK if quick else FULL
    names = list(only) or list(SIDES)
    report = Report("gateway", notes=[surroundings(), f"{plan.rounds} rounds of {plan.seconds:g} s a row"])
    report.notes += [f"{name}: {SIDES[name].about}" for name in names]
    rounds: list[dict[str, Rows]] = []
    with tempfile.TemporaryDirectory(prefix="rungway-bench-") as made:
        for number in range(plan.rounds):
            say(f"round {number + 1} of {plan.rounds}")
            rounds.append({name: measure_side(name, plan, work or Path(made), say) for name in names})
    report.control = [
        {"round": number + 1, "side": side, "row": row, **found}
        for number, sides in enumerate(rounds)
        for side, rows in sides.items()
        for row, found in rows.items()
    ]
    judge_rounds(report, rounds, names)
    return report


def _best(rows: Rows, kind: str) -> float:
    """The side's best rate over all its rows of a kind."""
    return max(float(found["per_s"]) for row, found in rows.items() if row.startswith(kind))


def _ratio(ours: float, theirs: float) -> float:
    return ours / theirs if theirs > 0 else float("nan")


def _median(values: list[float]) -> float:
    return statistics.median(values) if values else float("nan")


def judge_rounds(report: Report, rounds: list[dict[str, Rows]], names: Sequence[str]) -> None:
    """The bars. Ratios are medians over rounds; frames and errors are sums over all of them."""
    if "ours" not in names:
        return
    if "litellm" in names:
        _beside_litellm(report, rounds)
    if "vllm-router" in names:
        _beside_vllm_router(report, rounds)
    ours = [row for sides in rounds for row in sides["ours"].values()]
    streams = [row for sides in rounds for name, row in sides["ours"].items() if name.startswith("streams")]
    report.at_most("frames lost or out of order", sum(row["lost"] + row["misplaced"] for row in streams), 0, "")
    report.at_most("failed requests", sum(sum(row["errors"].values()) for row in ours), 0, "")
    report.at_most("degraded answers", sum(row["degraded"] for row in ours), 0, "")


def _beside_litellm(report: Report, rounds: list[dict[str, Rows]]) -> None:
    def over(row: str, kind: str) -> float:
        pairs = [(sides["ours"][row]["per_s"], _best(sides["litellm"], kind)) for sides in rounds]
        return _median([_ratio(ours, theirs) for ours, theirs in pairs])

    latency = [_ratio(sides["ours"]["unary 1"]["p50_ms"], sides["litellm"]["unary 1"]["p50_ms"]) for sides in rounds]
    report.at_least("unary req/s at 64 connections / LiteLLM's best", over("unary 64", "unary"), 15)
    report.at_most("unary p50 at 1 connection / LiteLLM's", _median(latency), 0.35)
    report.at_least("32-token streams/s at 64 / LiteLLM's best", over("streams 64", "streams"), 8)
    report.at_least("32-token streams/s at 200 / LiteLLM's best", over("streams 200", "streams"), 8)


def _beside_vllm_router(report: Report, rounds: list[dict[str, Rows]]) -> None:
    for row, bar in (("unary 64", 0.3), ("streams 64", 0.9), ("streams 200", 0.9)):
        ratios = [_ratio(sides["ours"][row]["per_s"], sides["vllm-router"][row]["per_s"]) for sides in rounds]
        report.at_least(f"{row} / vllm-router's", _median(ratios), bar)
