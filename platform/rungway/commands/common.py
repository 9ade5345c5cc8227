"""Options and output that commands share. Imports nothing heavy: every command's `--help` comes through here."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rungway.clock import NS_PER_S, wall_ns

if TYPE_CHECKING:
    from rungway.contracts import Platform

Config = Annotated[Path, typer.Option("--config", "-c", envvar="RUNGWAY_CONFIG", help="The platform file.")]
State = Annotated[
    Path | None, typer.Option("--state", envvar="RUNGWAY_STATE", help="State folder, in place of the file's state_dir.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Url = Annotated[str | None, typer.Option("--url", envvar="RUNGWAY_URL", help="A running platform.")]
Key = Annotated[
    str | None,
    typer.Option(
        "--key", envvar="RUNGWAY_KEY", show_envvar=True, help="API key; the variable keeps it out of the process list."
    ),
]
DEFAULT_CONFIG = Path("config/quickstart.yaml")
_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}


def load(config: Path, state: Path | None) -> Platform:
    """The platform that a command is about. Raises ConfigError."""
    from rungway.settings import load_platform

    return load_platform(config, state_dir=state)


def emit_json(data: Any) -> None:
    typer.echo(json.dumps(data, indent=2, ensure_ascii=False))


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> Any:
    """A rich table; numbers to the right, text to the left."""
    from rich.table import Table

    made = Table(title=title or None, title_justify="left", header_style="bold")
    for index, column in enumerate(columns):
        number = bool(rows) and all(isinstance(row[index], int | float) for row in rows)
        made.add_column(column, justify="right" if number else "left", overflow="fold")
    for row in rows:
        made.add_row(*(cell(value) for value in row))
    return made


def cell(value: object) -> str:
    """A value as a person reads it, with rich's markup switched off."""
    from rich.markup import escape

    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.6g}" if isinstance(value, float) else escape(str(value))


def show(*parts: object) -> None:
    """Prints rich values or text."""
    from rich.console import Console

    width = None if os.isatty(1) else 160  # a pipe has no width; do not fold its lines
    console = Console(highlight=False, width=width)
    for part in parts:
        console.print(part, soft_wrap=isinstance(part, str))


def fail(message: str, code: int = 1) -> typer.Exit:
    """One line on stderr; raise what it returns."""
    typer.echo(f"rungway: {message}", err=True)
    return typer.Exit(code)


def moment_s(text: str | None) -> int | None:
    """`24h`, `7d`, an ISO time or seconds since the epoch -> seconds since the epoch. Exit 2 when it is none."""
    if text is None:
        return None
    if match := re.fullmatch(r"(\d{1,9})([smhdw])", text):
        return wall_ns() // NS_PER_S - int(match[1]) * _UNITS_S[match[2]]
    if re.fullmatch(r"\d{1,11}", text):
        return int(text)
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise fail(f"{text!r} is no time (allowed: 30m, 24h, 7d, an ISO time, seconds since 1970)", 2) from None
    return int((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp())


def clock_text(ns: int) -> str:
    """Wall-clock nanoseconds as UTC, to the millisecond."""
    text = datetime.fromtimestamp(ns / NS_PER_S, UTC).isoformat(sep=" ", timespec="milliseconds")
    return text.removesuffix("+00:00") + "Z"
