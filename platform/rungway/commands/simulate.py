"""`rungway simulate`: the whole platform on a virtual clock and one seed, under a trace or a random workload."""

from __future__ import annotations

import contextlib
import shlex
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from time import process_time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rungway.clock import monotonic_ns
from rungway.commands.common import DEFAULT_CONFIG, AsJson, emit_json, fail, load, show, table

if TYPE_CHECKING:
    from rungway.simulate.crowd import Crowd
    from rungway.simulate.world import World

RANDOM_S = 10.0
CHUNK = 25
SECONDS_MAX, FACTOR_MAX = 31 * 86_400.0, 1e6
NOTE_EVERY_NS = 60_000_000_000
CLASS_COLUMNS = ("requests", "shed_ratio", "goodput_per_s", "ttft_ms_p50", "ttft_ms_p99", "tpot_ms_p50", "tpot_ms_p99")
TENANT_COLUMNS = (
    "class",
    "requests",
    "goodput_per_s",
    "within_slo",
    "ttft_ms_p50",
    "ttft_ms_p99",
    "tpot_ms_p99",
    "hit_rate",
    "cost_usd",
)


Trace = Annotated[
    Path | None, typer.Argument(metavar="[TRACE]", help="A trace file or folder; without one, a random world.")
]
ConfigFile = Annotated[
    Path, typer.Option("--config", "-c", envvar="RUNGWAY_CONFIG", help="The platform file (with TRACE).")
]
Seed = Annotated[int, typer.Option(help="All randomness comes from it.")]
Seeds = Annotated[str | None, typer.Option(metavar="FROM:TO", help="Random worlds of many seeds; prints what broke.")]
Faults = Annotated[
    str,
    typer.Option(
        help="`all`, `none`, or KIND[:PER_MINUTE],... (delay cut disk replica gateway controller away partition clock slow)."
    ),
]
Duration = Annotated[
    float | None, typer.Option(min=0.1, max=SECONDS_MAX, help=f"Seconds to play. Random worlds: {RANDOM_S:g}.")
]
Start = Annotated[float, typer.Option(min=0, max=SECONDS_MAX, help="Begin at this second of the trace.")]
Speed = Annotated[float, typer.Option(min=0.001, max=FACTOR_MAX, help="Compress the trace's time by this factor.")]
Replicas = Annotated[int | None, typer.Option(min=1, help="Replicas per version (default: its minimum).")]
Costs = Annotated[
    list[str] | None, typer.Option(metavar="TIER=MODEL", help="Cost model of a tier: a10g-7b, h200-8b, ...")
]
Context = Annotated[int | None, typer.Option(min=16, help="Longest prompt + answer, in place of max_context.")]
Like = Annotated[
    str | None,
    typer.Option(
        metavar="TENANT,...", help="Whose contracts, in turn, tenants get that the configuration does not name."
    ),
]
Tenants = Annotated[
    int | None, typer.Option(min=1, help="Copy the trace's clients until there are so many, each with its own shape.")
]
LoadFactor = Annotated[
    float,
    typer.Option(
        "--load", min=0.001, max=FACTOR_MAX, help="With --tenants: all requests together over those of the trace."
    ),
]
Tries = Annotated[int, typer.Option(min=1, max=10, help="Tries per request of a client that is refused.")]
Deadlines = Annotated[bool, typer.Option("--deadlines", help="Clients send their contract's targets as deadlines.")]
ReportMs = Annotated[float, typer.Option(min=10, max=60_000, help="How often a replica reports.")]
Html = Annotated[Path | None, typer.Option(help="Write an HTML report.")]
Jobs = Annotated[int, typer.Option(min=1, help="Processes, with --seeds.")]


def simulate(
    trace: Trace = None,
    config: ConfigFile = DEFAULT_CONFIG,
    seed: Seed = 0,
    seeds: Seeds = None,
    faults: Faults = "none",
    duration: Duration = None,
    start: Start = 0.0,
    speed: Speed = 1.0,
    replicas: Replicas = None,
    cost: Costs = None,
    context: Context = None,
    like: Like = None,
    tenants: Tenants = None,
    load_factor: LoadFactor = 1.0,
    tries: Tries = 1,
    deadlines: Deadlines = False,
    report_ms: ReportMs = 100.0,
    report: Html = None,
    jobs: Jobs = 1,
    as_json: AsJson = False,
) -> None:
    """Play a trace (Azure 2023, Mooncake, VTC Arena, ServeGen, ShareGPT lengths) or a random world, and print the result.

    The controller, its policies and the ladder are the real ones; gateways, replicas and the ledger are played. Exit 1 when
    an invariant broke; the line printed reproduces it.
    """
    from rungway.simulate.faults import parse
    from rungway.simulate.play import Wish, play_trace
    from rungway.simulate.scenario import random_world
    from rungway.simulate.summary import summary

    kinds = parse(faults)
    _check_place(report)
    if seeds is not None:
        _many(seeds, faults, duration or RANDOM_S, jobs, as_json)
        return
    if trace is None:
        world = random_world(seed, kinds, duration or RANDOM_S)
        command = reproducer(seed, faults, duration or RANDOM_S)
    else:
        platform, crowd = load(config, None), _crowd(tenants, load_factor)
        costs = dict(_cost(part, [tier.name for tier in platform.tiers]) for part in cost or [])
        wish = Wish(
            seed, speed, start, duration, kinds, costs, replicas, tries, context, like, report_ms, deadlines, crowd
        )
        world = play_trace(platform, trace, wish)
        command = _command(trace, config, wish, faults)
    result = summary(world)
    result["command"] = command
    if report is not None:
        from rungway.simulate.report import html

        report.write_text(html(f"Simulation: {trace or f'seed {seed}'}", command, result, world.sampler.samples))
    if as_json:
        emit_json(result)
    else:
        _print(result, world)
    if result["violations"]:
        raise fail(f"an invariant broke; reproduce: {command}")


def _check_place(report: Path | None) -> None:
    if report is not None and not report.parent.is_dir():
        raise fail(f"--report: there is no folder {report.parent}", 2)


def _cost(text: str, tiers: list[str]) -> tuple[str, str]:
    tier, _, model = text.partition("=")
    if tier not in tiers or not model:
        raise fail(f"--cost takes TIER=MODEL, not {text!r} (tiers: {', '.join(tiers)})", 2)
    return tier, model


def _crowd(tenants: int | None, load_factor: float) -> Crowd | None:
    from rungway.simulate.crowd import Crowd

    if tenants is None and load_factor != 1.0:
        raise fail("--load needs --tenants", 2)
    return None if tenants is None else Crowd(tenants, load_factor)


def reproducer(seed: int, faults: str, duration_s: float) -> str:
    """The line that plays a random world again."""
    return f"rungway simulate --seed {seed} --faults {faults} --duration {duration_s:g}"


def _command(trace: Path, config: Path, wish: Any, faults: str) -> str:
    words = ["rungway", "simulate", str(trace), "--config", str(config), "--seed", str(wish.seed)]
    for name, value, default in (
        ("--faults", faults, "none"),
        ("--speed", wish.speed, 1.0),
        ("--start", wish.start_s, 0.0),
        ("--duration", wish.duration_s, None),
        ("--replicas", wish.replicas, None),
        ("--context", wish.context, None),
        ("--like", wish.like, None),
        ("--tries", wish.tries_max, 1),
        ("--report-ms", wish.report_ms, 100.0),
        ("--tenants", wish.crowd and wish.crowd.tenants, None),
        ("--load", wish.crowd.load if wish.crowd else 1.0, 1.0),
    ):
        if value != default:
            words += [name, f"{value:g}" if isinstance(value, float) else str(value)]
    for tier, name in wish.costs.items():
        words += ["--cost", f"{tier}={name}"]
    return shlex.join([*words, "--deadlines"] if wish.deadline else words)


# -- many seeds -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Broken:
    seed: int
    command: str
    violations: list[str]


def _many(span: str, faults: str, duration_s: float, jobs: int, as_json: bool) -> None:
    first, colon, last = span.partition(":")
    if not colon or not first.isdigit() or not last.isdigit() or int(first) >= int(last):
        raise fail(f"--seeds takes FROM:TO, not {span!r}", 2)
    chunks = [
        (begin, min(begin + CHUNK, int(last)), faults, duration_s) for begin in range(int(first), int(last), CHUNK)
    ]
    broken: list[_Broken] = []
    cpu_s, noted = 0.0, monotonic_ns()
    with ProcessPoolExecutor(jobs) if jobs > 1 else contextlib.nullcontext() as pool:
        for chunk, (found, took_s) in zip(chunks, (pool.map if pool else map)(_chunk, chunks), strict=True):
            broken += found
            cpu_s += took_s
            if not as_json:  # at once: a run that is ended early has said what it found
                for each in found:
                    show(f"{each.command}\n    {each.violations[0]}")
            if monotonic_ns() - noted > NOTE_EVERY_NS:
                noted = monotonic_ns()
                typer.echo(f"{first}:{chunk[1]} played, {cpu_s:.0f} s of processor time", err=True)
    if as_json:
        emit_json({"seeds": span, "broken": [{"command": b.command, "violations": b.violations} for b in broken]})
    else:
        show(f"{len(broken)} of {int(last) - int(first)} seeds broke an invariant, {cpu_s:.0f} s of processor time")
    if broken:
        raise typer.Exit(1)


def _chunk(chunk: tuple[int, int, str, float]) -> tuple[list[_Broken], float]:
    """Seeds that broke something, and seconds of processor time."""
    from rungway.simulate.faults import parse
    from rungway.simulate.scenario import random_world

    begin, end, faults, duration_s = chunk
    kinds, broken, before_s = parse(faults), [], process_time()
    for seed in range(begin, end):
        try:
            found = random_world(seed, kinds, duration_s).watch.broken
        except Exception as failed:  # noqa: BLE001  (a world that cannot be played to its end is a finding like any other)
            found = [f"it cannot be played: {failed!r}"]
        if found:
            broken.append(_Broken(seed, reproducer(seed, faults, duration_s), found))
    return broken, process_time() - before_s


# -- output ---------------------------------------------------------------------------------------------------------


def _print(result: dict[str, Any], world: World) -> None:
    totals = [
        [name, value] for name, value in result.items() if not isinstance(value, dict | list) and name != "command"
    ]
    totals += [[f"fairness {name}", value] for name, value in result["fairness"].items()]
    totals += [[f"outcome {name}", value] for name, value in result["outcomes"].items()]
    totals += [[f"code {name}", value] for name, value in result["codes"].items()]
    show(table("totals", ["", "value"], totals))
    for title, first, columns in (("classes", "class", CLASS_COLUMNS), ("tenants", "tenant", TENANT_COLUMNS)):
        shown = [[name, *(row[column] for column in columns)] for name, row in result[title].items()]
        show(table(title, [first, *columns], shown))
    show(f"{world.loop.turns:,} events, {result['checks']:,} checks; reproduce: {result['command']}")
    for violation in result["violations"]:
        show(f"BROKEN {violation}")
