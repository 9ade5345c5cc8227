"""Our engine beside vLLM, llama.cpp's server and transformers: same weights, same prompts, same threads.

Every engine is started once and idles while another works; inside a round each row is measured on one after the other, so
that a machine that drifts drifts for all. The ratio of a row is taken inside the round.
"""

from __future__ import annotations

import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from rungway.chaos.bench.child import BenchError
from rungway.chaos.bench.engines import judge, rows
from rungway.chaos.bench.engines.lines import LineChild
from rungway.chaos.bench.engines.prompts import Encoder
from rungway.chaos.bench.engines.start import ENGINE_SIDES, Running, Setting, start_ours
from rungway.chaos.bench.engines.timeline import Rate, median
from rungway.chaos.bench.report import Report, Say, surroundings

_BIG = 300_000_000  # bytes of weights a step reads; above, answers are shorter
FULL = rows.Plan(rounds=3, tokens=64)
QUICK = rows.Plan(rounds=1, tokens=32, prefill=512, questions=1)


@dataclass
class _Bench:
    """What one benchmark has: the engines that are there, and where it says what it found."""

    report: Report
    setting: Setting
    encoder: Encoder
    plan: rows.Plan
    say: Say
    stack: ExitStack
    engines: dict[str, Running]


def bench_engine(
    *,
    source: str,
    models_dir: Path,
    sides: Sequence[str],
    threads: int,
    rounds: int | None,
    quick: bool,
    by: str,
    say: Say,
) -> Report:
    """`source` is a `model:` of a platform file; it is fetched into `models_dir` where it is missing. `sides`: beside ours.
    `by`: clock | cpu, what ratios are of. Raises BenchError where ours does not run."""
    from rungway.engine.loader import fetch_model
    from rungway.engine.tokenizer import HfTokenizer
    from rungway.engine.weights import read_config

    plan = QUICK if quick else FULL
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the way out ends the other engines
    with ExitStack() as stack:
        work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rungway-bench-")))
        model = fetch_model(source, models_dir)
        context = int(read_config(model)["max_position_embeddings"])
        setting = Setting(model, source, threads, min(context, 8192), work)
        report = Report("engine", notes=[surroundings(), f"{source}, {threads} thread(s) each, ratios by {by}"])
        plan = replace(plan, rounds=rounds or plan.rounds)
        bench = _Bench(report, setting, HfTokenizer(model), plan, say, stack, {})
        _start(bench, ("ours", *sides))
        ours = bench.engines["ours"]
        if ours.facts["weight_bytes"] > _BIG:
            bench.plan = replace(plan, tokens=max(16, plan.tokens // 2))
        found = [_round(bench, number) for number in range(bench.plan.rounds)]
        judge.judge_beside(report, found, sides, by)
        judge.judge_bandwidth(report, found, ours.facts["weight_bytes"], ours.facts["dtype"], by)
        _alone(bench, by)
        report.control += _control(bench, found, sides)
        return report


def _start(bench: _Bench, names: Sequence[str]) -> None:
    for name in names:
        try:
            engine = ENGINE_SIDES[name].start(bench.setting)
        except BenchError as error:
            if name == "ours":
                raise
            bench.say(f"{name:<13} not here: {error}")
            bench.report.notes.append(f"{name}: not here: {error}")
            continue
        bench.stack.callback(engine.stop)
        bench.engines[name] = engine
        bench.say(
            f"{name:<13} {engine.facts['dtype']}, {engine.facts['threads']} thread(s): {ENGINE_SIDES[name].about}"
        )
        _warm(bench, engine)


def _warm(bench: _Bench, engine: Running) -> None:
    """Not measured: what an engine does on first use."""
    rows.decode(engine, bench.encoder, replace(bench.plan, tokens=8), 8, "sampled", next(rows.SEEDS))


def _round(bench: _Bench, number: int) -> judge.Round:
    """One engine after the other at each row. `ours` also reads a buffer of the size of its weights, right after decoding one
    stream."""
    encoder, plan = bench.encoder, bench.plan
    found: judge.Round = {name: {} for name in bench.engines}
    for streams, kind in judge.rows_of("ours"):
        seed = next(rows.SEEDS)
        measure = partial(rows.decode, encoder=encoder, plan=plan, streams=streams, kind=kind, seed=seed)
        for side in list(bench.engines):
            if (streams, kind) in judge.rows_of(side):
                _row(bench, found, side, judge.decode_row(streams, kind), measure)
        if (streams, kind) == (1, "greedy"):
            _row(bench, found, "ours", "bandwidth", _bandwidth)
    measure = partial(rows.prefill, encoder=encoder, plan=plan, seed=next(rows.SEEDS))
    for side in [side for side in bench.engines if side != "transformers"]:
        _row(bench, found, side, "prefill", measure)
    bench.say(f"round {number + 1} of {plan.rounds} done")
    return found


def _row(bench: _Bench, found: judge.Round, side: str, row: str, measure: Callable[[Running], Rate]) -> None:
    """A side that fails is out for the rest of the benchmark; without ours there is none."""
    try:
        rate = found[side][row] = measure(bench.engines[side])
    except BenchError as error:
        if side == "ours":
            raise
        bench.report.notes.append(f"{side}: failed at {row}: {error}")
        bench.say(f"{side:<13} failed at {row}: {error}")
        del bench.engines[side]
        return
    bench.say(f"{side:<13} {row:<18} {rate.clock:>12,.1f} /s by the clock {rate.cpu:>12,.1f} /s of processor time")


def _bandwidth(engine: Running) -> Rate:
    assert isinstance(engine, LineChild)
    clock, cpu = engine.ask({"bandwidth": engine.facts["weight_bytes"]})["bandwidth"]
    return Rate(clock, cpu)


def _alone(bench: _Bench, by: str) -> None:
    """What is measured on ours only: the prefix cache against none, and streams beside a long prompt."""
    ours = bench.engines["ours"]
    uncached = start_ours(bench.setting, prefix_cache=False)
    bench.stack.callback(uncached.stop)
    _warm(bench, uncached)
    pairs: list[tuple[Rate, Rate]] = []
    for _ in range(bench.plan.rounds):
        on, off = (
            rows.shared_prefix(engine, bench.encoder, bench.plan, next(rows.SEEDS)) for engine in (ours, uncached)
        )
        pairs += zip(on, off, strict=True)
        bench.say(
            f"shared prefix: first token after {on[-1].clock * 1e3:.0f} ms, without cache {off[-1].clock * 1e3:.0f} ms"
        )
    judge.judge_prefix(bench.report, [on for on, _ in pairs], [off for _, off in pairs], by)
    uncached.stop()
    judge.judge_starvation(bench.report, _starved(bench, ours, by))
    ttft = {name: round(1e3 * median(pair[at].clock for pair in pairs), 1) for at, name in enumerate(("on", "off"))}
    bench.report.control.append({"row": "shared prefix TTFT, ms", **ttft})


def _starved(bench: _Bench, ours: Running, by: str) -> list[dict[str, float]]:
    """Nothing where a machine is too slow or too busy for the longest prompt."""
    try:
        found = rows.starved(ours, bench.encoder, ours.facts["context"], next(rows.SEEDS), by)
    except BenchError as error:
        bench.report.notes.append(f"beside a long prompt: {error}")
        return []
    bench.say(f"beside a long prompt: {found}")
    bench.report.control.append({"row": "starvation", **found})
    return [found]


def _control(bench: _Bench, rounds: Sequence[judge.Round], sides: Sequence[str]) -> list[dict[str, Any]]:
    """Medians of every row of every side, and the rounds' ratios by the clock and by processor time."""
    made = []
    for row in dict.fromkeys(row for found in rounds for side in found.values() for row in side):
        entry: dict[str, Any] = {"row": row}
        for side in ("ours", *sides):
            rates = [found[side][row] for found in rounds if row in found.get(side, {})]
            if rates:
                entry[side] = round(median(rate.clock for rate in rates), 1)
        for side in sides:
            pairs = [
                found["ours"][row].over(found[side][row])
                for found in rounds
                if row in found.get(side, {}) and row in found["ours"]
            ]
            if pairs:
                entry[f"ours / {side}"] = {
                    "clock": [round(pair.clock, 3) for pair in pairs],
                    "cpu": [round(pair.cpu, 3) for pair in pairs],
                }
        made.append(entry)
    return made
