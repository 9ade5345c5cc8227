"""`rungway drill NAME`: load and faults against a platform of its own, and a table of verdicts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rungway.commands.common import AsJson, emit_json, fail, show, table

if TYPE_CHECKING:
    from rungway.chaos.course import Report
    from rungway.chaos.invariants import Verdict


def drill(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A drill, `list`, or `all`.")],
    config: Annotated[
        Path | None,
        typer.Option("--config", "-c", help="Platform file of the drill's platform. Default: the drill's own."),
    ] = None,
    state: Annotated[
        Path | None, typer.Option(help="Keep the drill's ledger here (an empty folder). Default: a temporary one.")
    ] = None,
    url: Annotated[str | None, typer.Option(help="A running platform; needs --keys.")] = None,
    keys: Annotated[
        Path | None, typer.Option(help="With --url: that platform's ready.json, or a file of the same shape.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Run a drill against a platform that it starts and ends itself (fake engines), or against --url.

    Exit 0 only if every verdict holds and the control arm breaks as it must. `rungway drill list` names the drills.
    """
    try:
        from rungway.chaos.drills import DRILLS
    except ModuleNotFoundError as missing:
        raise fail(f"drills need the package {missing.name!r} (pip install 'rungway[drills]')") from None
    if name == "list":
        _list(as_json)
        return
    names = list(DRILLS) if name == "all" else [name]
    if name != "all" and name not in DRILLS:
        raise fail(f"there is no drill {name!r} (drills: {', '.join(DRILLS)})", 2)
    if (url is None) != (keys is None):
        raise fail("--url and --keys go together", 2)
    reports = [_run(each, config, state / each if state and name == "all" else state, url, keys) for each in names]
    if as_json:
        shapes = [_shape(report) for report in reports]
        emit_json(shapes if name == "all" else shapes[0])
    else:
        for report in reports:
            _print(report)
    if not all(report.ok for report in reports):
        raise typer.Exit(1)


def _list(as_json: bool) -> None:
    from rungway.chaos.drills import DRILLS

    if as_json:
        emit_json([{"name": name, "summary": one.summary, "seconds": one.seconds} for name, one in DRILLS.items()])
    else:
        rows = [(name, one.summary, f"about {one.seconds} s") for name, one in DRILLS.items()]
        show(table("", ["drill", "what it shows", "takes"], rows))


def _run(name: str, config: Path | None, state: Path | None, url: str | None, keys: Path | None) -> Report:
    from rungway.chaos import stage
    from rungway.chaos.drills import DRILLS

    one = DRILLS[name]
    _say(f"drill {name}: about {one.seconds} s")
    if url is not None and keys is not None:
        return one.run(stage.given(url, keys), _say)
    if state is not None and state.exists() and any(state.iterdir()):
        raise fail(f"{state} is not empty: a drill makes its own keys and ledger", 2)
    with stage.own(config or one.config, state, _say) as place:
        return one.run(place, _say)


def _say(text: str) -> None:
    """Progress goes to stderr: stdout is the table or the JSON."""
    typer.echo(text, err=True)


def _shape(report: Report) -> dict[str, object]:
    def rows(verdicts: list[Verdict]) -> list[dict[str, object]]:
        return [{"what": v.what, "measured": v.measured, "bar": v.bar, "ok": v.ok} for v in verdicts]

    return {"name": report.name, "verdicts": rows(report.verdicts), "control": rows(report.control)}


def _print(report: Report) -> None:
    columns = ["verdict", "measured", "bar", "ok"]
    for title, verdicts in ((report.name, report.verdicts), ("control arm: isolation off", report.control)):
        rows = [(one.what, one.measured, one.bar, "yes" if one.ok else "NO") for one in verdicts]
        show(table(title, columns, rows))
    show(f"{report.name}: {'every verdict holds' if report.ok else 'FAILED'}")
