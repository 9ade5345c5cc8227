"""`rungway serve`: what the person at the terminal sees of a run. The run itself is `rungway.serve.runner`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeRemainingColumn

from rungway.errors import ConfigError
from rungway.serve.environment import StartError
from rungway.serve.runner import Ready, Reports, Runner


class Terminal:
    """Prints a run. Everything goes to stdout line by line; errors go to stderr."""

    def __init__(self) -> None:
        self._out = Console(highlight=False, soft_wrap=True)
        self._bar: Progress | None = None
        self._tasks: dict[str, TaskID] = {}

    def reports(self) -> Reports:
        return Reports(waiting=self.waiting, fetching=self.fetching, ready=self.ready, reloaded=self.reloaded)

    def waiting(self, what: str, elapsed_s: float) -> None:
        self.close()
        self._out.print(f"[{elapsed_s:5.1f} s] waiting for {what}", markup=False)

    def fetching(self, name: str, done: int, total: int) -> None:
        """One bar per step of a model's way here; `total` 0 = unknown."""
        if self._bar is None:
            columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
            self._bar = Progress(*columns, console=self._out)
            self._bar.start()
        task = self._tasks.get(name)
        if task is None:
            task = self._tasks[name] = self._bar.add_task(name, total=total or None)
        self._bar.update(task, completed=done, total=total or None)

    def close(self) -> None:
        """Let go of the terminal's bar."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
            self._tasks.clear()

    def ready(self, ready: Ready) -> None:
        self._out.print("\n".join(_ready_lines(ready)), markup=False)

    def reloaded(self, mistakes: list[str]) -> None:
        if mistakes:
            self._out.print(
                "reload refused, the old configuration stays in force:", *mistakes, sep="\n  ", markup=False
            )
        else:
            self._out.print("reload: the new configuration is in force", markup=False)


def _ready_lines(ready: Ready) -> list[str]:
    lines = [
        "",
        f"Rungway is ready at {ready.url} (started in {ready.elapsed():.0f} s)",
        f"dashboard  {ready.dashboard}",
    ]
    if ready.fallback_proxy:
        lines.append("proxy      Ray Serve's own: no HAProxy here, so expect about a tenth of the requests per second")
    if ready.keys:
        lines.append("keys       shown this once; only their hashes are kept")
        lines.extend(f"  {name:<9}{text}" for name, text in ready.keys.items())
    else:
        lines.append(
            "keys       those made before; `rungway keys create TENANT` (same --config and --state) makes another"
        )
    tenant_keys = [text for name, text in ready.keys.items() if name != "admin"]
    body = f'{{"model": "{ready.model}", "messages": [{{"role": "user", "content": "Say hello."}}]}}'
    lines += [
        "try",
        f"  curl -s {ready.url}/v1/chat/completions -H 'Content-Type: application/json' \\",
        f'    -H "Authorization: Bearer {tenant_keys[0] if tenant_keys else "$RUNGWAY_KEY"}" \\',
        f"    -d '{body}'",
        "stop with Ctrl-C",
    ]
    return lines


def serve(
    config: Annotated[Path, typer.Option(help="The platform file.")] = Path("config/quickstart.yaml"),
    state: Annotated[Path | None, typer.Option(help="Where ledger, keys and models lie; overrides state_dir.")] = None,
    port: Annotated[int | None, typer.Option(min=1, max=65535, help="Overrides listen.port.")] = None,
    host: Annotated[str | None, typer.Option(help="Overrides listen.host.")] = None,
    fake: Annotated[bool, typer.Option("--fake", help="Serve every version with the fake engine: no weights.")] = False,
    ready_timeout: Annotated[float, typer.Option(min=1.0, help="Seconds within which it must be ready.")] = 300.0,
    drain: Annotated[float, typer.Option(min=0.0, help="Seconds that running answers may take to end on stop.")] = 15.0,
) -> None:
    """Start the platform and serve until Ctrl-C or SIGTERM; SIGHUP reloads the configuration.

    Exit codes: 0 after a clean end, 1 when the platform failed, 2 when the configuration, the port, the state
    directory or a model is wrong.
    """
    terminal = Terminal()
    runner = Runner(config, state, port, host, fake, ready_timeout, drain, terminal.reports())
    try:
        runner.run()
    except ConfigError as wrong:
        typer.echo("\n".join(str(mistake) for mistake in wrong.mistakes), err=True)
        raise typer.Exit(2) from None
    except StartError as failed:
        typer.echo(f"rungway serve: {failed}", err=True)
        raise typer.Exit(failed.code) from None
    finally:
        terminal.close()
    typer.echo("stopped")
