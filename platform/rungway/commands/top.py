"""`rungway top`: everything that moves, looked at once a second."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from rungway.commands.common import DEFAULT_CONFIG, AsJson, Config, Key, State, Url, emit_json, show, table

PERIOD_S = 1.0


def top(
    once: Annotated[bool, typer.Option("--once", help="Print one look and end.")] = False,
    url: Url = None,
    key: Key = None,
    config: Config = DEFAULT_CONFIG,
    state: State = None,
    as_json: AsJson = False,
) -> None:
    """Pools, ladder and tenants, refreshed each second until Ctrl-C. --json prints one look."""
    from rungway.commands.http import fetch, need

    target = need(url, key, config, state)
    look = fetch(target, "GET", "/admin/live")
    if as_json:
        emit_json(look)
        return
    if once:
        show(view(look))
        return
    from rich.live import Live

    with Live(view(look), screen=True, auto_refresh=False) as screen:
        while True:
            time.sleep(PERIOD_S)
            screen.update(view(fetch(target, "GET", "/admin/live")), refresh=True)


def view(look: Mapping[str, Any]) -> Any:
    """One look as a group of tables."""
    from rich.console import Group

    from rungway.commands.pools import pool_table

    scopes = [scope for scope in look.get("ladder") or () if scope.get("rung") or scope.get("pressure")]
    names = ("pool", "tenant_class", "side", "rung", "name", "pressure", "signal", "override")
    columns = ["tenant", "class", "running", "waiting", "requests left", "tokens left", "spent USD", "breaker"]
    tenants = [
        [
            name,
            tenant.get("class"),
            *(tenant.get(field) for field in ("running", "waiting", "requests_remaining", "tokens_remaining")),
            (tenant.get("budget") or {}).get("spent_usd"),
            tenant.get("breaker"),
        ]
        for name, tenant in (look.get("tenants") or {}).items()
    ]
    return Group(
        f"in flight {look.get('flights')}   gateways {look.get('gateways')}",
        pool_table(look.get("pools") or {}),
        table(
            "Ladder",
            ["pool", "class", "share", "rung", "name", "pressure", "from", "by hand"],
            [[scope.get(name) for name in names] for scope in scopes],
        ),
        table("Tenants", columns, tenants),
    )
