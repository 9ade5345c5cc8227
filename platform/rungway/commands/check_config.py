"""`rungway check-config`: every mistake of every file, or a summary of what would be in force."""

from __future__ import annotations

from dataclasses import asdict

import typer

from rungway.commands.common import DEFAULT_CONFIG, AsJson, Config, State, emit_json, load, show, table
from rungway.errors import ConfigError


def check_config(config: Config = DEFAULT_CONFIG, state: State = None, as_json: AsJson = False) -> None:
    """Check the platform file and all files it names. Exit code 2 when anything is wrong.

    With --json: {"ok", "mistakes": [{"file", "line", "path", "message"}], "config": the effective values, masked}.
    """
    from rungway.settings import effective

    try:
        platform = load(config, state)
    except ConfigError as error:
        if as_json:
            emit_json({"ok": False, "mistakes": [asdict(mistake) for mistake in error.mistakes], "config": None})
        else:
            typer.echo(str(error), err=True)
            typer.echo(f"{len(error.mistakes)} mistake(s)", err=True)
        raise typer.Exit(2) from None
    view = effective(platform)
    if as_json:
        emit_json({"ok": True, "mistakes": [], "config": view})
        return
    versions = [
        [version.pool, version.backend, f"{version.replicas_min}-{version.replicas_max}", version.model or "-"]
        for version in platform.versions()
    ]
    tenants = [
        [name, tenant["plan"], tenant["class"], tenant["weight"], len(tenant["keys"]), *_limits(tenant)]
        for name, tenant in view["tenants"].items()
    ]
    columns = ["tenant", "plan", "class", "weight", "keys", "requests/min", "tokens/min", "concurrent", "budget USD"]
    show(
        f"{config} is right. cell {platform.cell}, digest {platform.digest[:12]}",
        table("Pools", ["pool", "backend", "replicas", "model"], versions),
        table("Tenants", columns, tenants),
    )


def _limits(tenant: dict[str, dict[str, object]]) -> list[object]:
    quotas = tenant["quotas"]
    names = ("requests_per_minute", "tokens_per_minute", "concurrent_requests")
    return [*(quotas[name] for name in names), tenant["budget"]["usd"]]
