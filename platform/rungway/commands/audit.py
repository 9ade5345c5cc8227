"""`rungway audit`: what was downgraded, refused, overridden or reloaded, and whether the log is whole."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from rungway.commands.common import (
    DEFAULT_CONFIG,
    AsJson,
    Config,
    Key,
    State,
    Url,
    clock_text,
    emit_json,
    fail,
    show,
    table,
)

app = typer.Typer(help="The log of downgrades, refusals and overrides; verify its hash chain.")


@app.callback(invoke_without_command=True)
def audit(
    ctx: typer.Context,
    after: Annotated[int, typer.Option(min=0, help="Only entries after this number.")] = 0,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="Entries at most.")] = 100,
    oldest: Annotated[bool, typer.Option("--oldest", help="From the start, not the newest.")] = False,
    tenant: Annotated[str | None, typer.Option(help="Only this tenant.")] = None,
    kind: Annotated[
        str | None, typer.Option(help="Only downgrade, refusal, eviction, rung, override, reload or rollout.")
    ] = None,
    url: Url = None,
    key: Key = None,
    config: Config = DEFAULT_CONFIG,
    state: State = None,
    as_json: AsJson = False,
) -> None:
    """Print the newest entries, in order (all of them are in the database). Needs an admin key, or no running server."""
    if ctx.invoked_subcommand is not None:
        return
    newest = not oldest and after == 0
    params = {"after": after, "limit": limit, "tenant": tenant, "kind": kind, "order": "newest" if newest else None}
    answer = _ask("/admin/audit", params, url, key, config, state)
    if answer is None:
        from rungway.commands.offline import open_ledger

        with open_ledger(config, state) as (reader, _):
            answer = {"data": reader.audit(after_seq=after, limit=limit, tenant=tenant, kind=kind, newest=newest)}
    if as_json:
        emit_json(answer)
        return
    entries = sorted(answer.get("data") or [], key=lambda entry: entry.get("seq", 0))
    show(table("", ["seq", "time", "kind", "tenant", "rung", "request", "detail"], [_row(entry) for entry in entries]))


def _row(entry: Mapping[str, Any]) -> list[object]:
    when = entry.get("wall_ns")
    detail = entry.get("detail")
    if isinstance(detail, dict):
        detail = ", ".join(f"{name}={value}" for name, value in detail.items())
    values = (entry.get(name) for name in ("kind", "tenant", "rung", "request_id"))
    time = clock_text(when) if isinstance(when, int) else entry.get("time")
    return [entry.get("seq"), time, *values, str(detail or "")[:160]]


@app.command()
def verify(
    url: Url = None, key: Key = None, config: Config = DEFAULT_CONFIG, state: State = None, as_json: AsJson = False
) -> None:
    """Recompute the hash chain. Exit 1 when an entry was changed, removed or put in."""
    answer = _ask("/admin/audit/verify", {}, url, key, config, state)
    if answer is None:
        from rungway.commands.offline import open_ledger

        with open_ledger(config, state) as (reader, _):
            result = reader.verify()
        answer = {
            "ok": result.ok,
            "rows": result.rows,
            "first_bad_seq": result.first_bad_seq,
            "message": result.message,
        }
    if as_json:
        emit_json(answer)
    elif answer.get("ok"):
        typer.echo(f"the audit chain is whole: {answer.get('rows')} entries")
    else:
        typer.echo(f"the audit chain is BROKEN at entry {answer.get('first_bad_seq')}: {answer.get('message')}")
    if not answer.get("ok"):
        raise typer.Exit(1)


def _ask(
    path: str, params: Mapping[str, Any], url: str | None, key: str | None, config: Path, state: Path | None
) -> Any:
    """The running platform's answer; None when there is none to ask."""
    from rungway.commands.http import Unreachable, call, checked, find

    target = find(url, key, config, state)
    if target is None:
        return None
    try:
        return checked(*call(target, "GET", path, params=params))
    except Unreachable as error:
        if target.found:
            return None
        raise fail(str(error)) from None
