"""The command line: `rungway COMMAND`.

A command is a file in `commands/` (`check-config` is `commands/check_config.py`) with a Typer app named `app`, or a
function named like the command; it is listed in `COMMANDS` with one line. Files are imported only when their command
runs, so that `rungway --help` does not wait for Ray or torch.

Exit codes: 0 done, 1 it failed, 2 wrong usage or configuration. Operating errors are one line on stderr.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.metadata import version
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

COMMANDS: dict[str, str] = {
    "serve": "Start the platform and serve until Ctrl-C.",
    "check-config": "Check the configuration files and report every mistake.",
    "keys": "Make, hash, revoke and list API keys.",
    "models": "Fetch and list the models of a configuration.",
    "usage": "Requests, tokens and cost per tenant.",
    "audit": "The log of downgrades, refusals and overrides; verify its hash chain.",
    "explain": "Why a request was answered the way it was.",
    "ladder": "The degradation ladder: show, set by hand, clear.",
    "pools": "The pools of replicas and how full they are.",
    "bench": "Measurements, many with bars; `bench list` names them.",
    "demo": "Two tenants, a stream, a refusal, a downgrade and the bills, printed.",
    "drill": "Load and faults with a verdict table; `drill list` names them.",
    "plan": "Capacity: sessions, rooflines, replicas and cost of a model on an accelerator.",
    "simulate": "The platform on a virtual clock: a trace or a random world, with faults.",
    "top": "Pools, queues and tenants, refreshed each second.",
}


class _LazyGroup(TyperGroup):
    """Knows its commands by name and help line; imports one when it is about to run."""

    _listing = False

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        if self._listing:
            return TyperCommand(cmd_name, help=COMMANDS[cmd_name])
        module = import_module(f"rungway.commands.{cmd_name.replace('-', '_')}")
        app = getattr(module, "app", None)
        if app is None:
            app = typer.Typer()
            app.command(cmd_name)(getattr(module, cmd_name.replace("-", "_")))
        return typer.main.get_command(app)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        self._listing = True
        try:
            super().format_help(ctx, formatter)
        finally:
            self._listing = False


app = typer.Typer(cls=_LazyGroup, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(version("rungway"))
        raise typer.Exit


@app.callback()
def _root(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Multi-tenant LLM inference: fair admission, value routing, an audited degradation ladder."""


def main() -> None:
    """Console script. Turns operating errors into one line (a configuration's mistakes: one line each)."""
    from rungway.errors import ConfigError, RungwayError

    try:
        app(prog_name="rungway")
    except ConfigError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    except RungwayError as error:
        print(f"rungway: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
