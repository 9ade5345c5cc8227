"""`rungway models`: weights that a configuration needs, and whether they are here."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from rungway.commands.common import DEFAULT_CONFIG, AsJson, Config, State, emit_json, fail, load, show, table

app = typer.Typer(no_args_is_help=True, help="Fetch and list the models of a configuration.")


def _sources(config: Path, state: Path | None) -> tuple[dict[str, list[str]], Path]:
    """Model source -> pools that use it, and the folder of converted models."""
    platform = load(config, state)
    found: dict[str, list[str]] = {}
    for version in platform.versions():
        if version.backend == "native":
            for source in version.sources:
                found.setdefault(source, []).append(version.pool)
    return found, Path(platform.state_dir) / "models"


@app.command()
def fetch(
    source: Annotated[
        list[str] | None, typer.Argument(metavar="[SOURCE]...", help="Sources. Default: all of the configuration.")
    ] = None,
    config: Config = DEFAULT_CONFIG,
    state: State = None,
    as_json: AsJson = False,
) -> None:
    """Download, check and convert models; does nothing for those that are here."""
    from rich.console import Console
    from rich.progress import Progress

    from rungway.engine.errors import ModelError
    from rungway.engine.loader import fetch_model

    wanted, models_dir = _sources(config, state)
    fetched = []
    with Progress(console=Console(stderr=True)) as bar:
        for name in source or wanted:
            tasks: dict[str, Any] = {}

            def report(what: str, done: int, total: int, name: str = name, tasks: dict[str, Any] = tasks) -> None:
                if what not in tasks:
                    tasks[what] = bar.add_task(f"{what} {name}")
                bar.update(tasks[what], completed=done, total=total or None)

            try:
                fetched.append({"source": name, "path": str(fetch_model(name, models_dir, report))})
            except ModelError as error:
                bar.stop()
                raise fail(str(error), 2) from None
    if as_json:
        emit_json(fetched)
    else:
        for entry in fetched:
            typer.echo(f"{entry['source']}  {entry['path']}")


@app.command("list")
def list_(config: Config = DEFAULT_CONFIG, state: State = None, as_json: AsJson = False) -> None:
    """List the configuration's models and where their files lie."""
    from rungway.engine.errors import ModelError
    from rungway.engine.loader import model_dir

    wanted, models_dir = _sources(config, state)
    rows = []
    for source, pools in wanted.items():
        try:
            path = model_dir(source, models_dir)
        except ModelError as error:
            raise fail(str(error), 2) from None
        rows.append({"source": source, "pools": pools, "path": str(path), "present": (path / "config.json").is_file()})
    if as_json:
        emit_json(rows)
    else:
        columns = ["source", "pools", "present", "path"]
        show(table("", columns, [[r["source"], ", ".join(pools_of(r)), r["present"], r["path"]] for r in rows]))


def pools_of(row: dict[str, Any]) -> list[str]:
    pools: list[str] = row["pools"]
    return pools
