"""`rungway bench NAME`: measurements with bars. Exit code 1 when a bar is missed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from rungway.commands.common import DEFAULT_CONFIG, AsJson, Config, State, emit_json, fail, load, show, table

if TYPE_CHECKING:
    from rungway.chaos.bench.report import Report

app = typer.Typer(no_args_is_help=True, help="Measure: gateway, engine, scheduler, controller, soak.")
Quick = Annotated[bool, typer.Option("--quick", help="Short runs: for a look, not for the record.")]

BENCHMARKS: dict[str, str] = {
    "gateway": "Requests and streams a second beside LiteLLM's proxy, vllm-router and the upstream alone.",
    "engine": "Decode of the small model beside transformers.generate.",
    "scheduler": "A step of the engine's scheduler alone, with 1,000 sequences running and 10,000 waiting.",
    "controller": "Decisions a second of the controller's core alone, with 1,000 tenants.",
    "soak": "Minutes of load at 80 %: memory stays flat, nothing stays held.",
}


@app.command("list")
def list_benchmarks(as_json: AsJson = False) -> None:
    """The benchmarks and what each measures."""
    if as_json:
        emit_json([{"name": name, "what": what} for name, what in BENCHMARKS.items()])
    else:
        show(table("", ("benchmark", "measures"), list(BENCHMARKS.items())))


@app.command()
def gateway(
    quick: Quick = False,
    only: Annotated[
        list[str] | None, typer.Option(help="One side: ours, litellm, vllm-router or upstream. May be repeated.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Requests and streams a second beside other gateways; installs them on first use (RUNGWAY_BENCH_CACHE)."""
    from rungway.chaos.bench.gateway import bench_gateway
    from rungway.chaos.bench.sides import SIDES

    unknown = [name for name in only or [] if name not in SIDES]
    if unknown:
        raise fail(f"no side {unknown[0]!r}; there are {', '.join(SIDES)}", 2)
    _finish(bench_gateway(quick=quick, only=only or [], say=_say), as_json)


@app.command()
def soak(
    seconds: Annotated[float, typer.Option(min=10.0, max=86_400.0, help="Length of the load.")] = 600.0,
    as_json: AsJson = False,
) -> None:
    """Load at 80 % of what was measured; then look at memory, reservations, gauges and queues."""
    from rungway.chaos.bench.soak import bench_soak

    _finish(bench_soak(seconds=seconds, say=_say), as_json)


@app.command()
def controller(quick: Quick = False, as_json: AsJson = False) -> None:
    """Decisions a second of the controller's core alone."""
    from rungway.chaos.bench.controller import bench_controller

    _finish(bench_controller(quick=quick, say=_say), as_json)


@app.command()
def scheduler(quick: Quick = False, as_json: AsJson = False) -> None:
    """Processor time of one step of the engine's scheduler alone."""
    from rungway.chaos.bench.scheduler import bench_scheduler

    _finish(bench_scheduler(quick=quick, say=_say), as_json)


@app.command()
def engine(config: Config = DEFAULT_CONFIG, state: State = None, quick: Quick = False, as_json: AsJson = False) -> None:
    """Decode of the smallest tier's model beside transformers.generate."""
    from pathlib import Path

    from rungway.chaos.bench.engine_speed import bench_engine

    platform = load(config, state)
    natives = [version for tier in platform.tiers for version in tier.versions if version.backend == "native"]
    if not natives:
        raise fail("the platform file has no version with a native engine", 2)
    models_dir = Path(platform.state_dir) / "models"
    _finish(bench_engine(source=natives[0].model, models_dir=models_dir, quick=quick, say=_say), as_json)


def _say(line: str) -> None:
    """Progress, on stderr: stdout has the result."""
    typer.echo(line, err=True)


def _finish(report: Report, as_json: bool) -> None:
    if as_json:
        emit_json(report.to_dict())
    else:
        show(*report.notes)
        if report.verdicts:
            rows = [(verdict.what, verdict.measured, verdict.bar, verdict.ok) for verdict in report.verdicts]
            show(table(report.name, ("what", "measured", "bar", "ok"), rows))
    if report.verdicts and not report.ok:
        raise typer.Exit(1)
