"""`rungway ladder`: where the degradation ladder stands, and how to hold it on a rung by hand."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from rungway.commands.common import DEFAULT_CONFIG, AsJson, Config, Key, State, Url, emit_json, show, table

app = typer.Typer(no_args_is_help=True, help="The degradation ladder: show, set by hand, clear.")
Pool = Annotated[str | None, typer.Option(help="Only this pool. Default: all.")]
TenantClass = Annotated[str | None, typer.Option("--class", help="interactive, standard or batch. Default: all.")]


@app.command("show")
def show_(
    url: Url = None, key: Key = None, config: Config = DEFAULT_CONFIG, state: State = None, as_json: AsJson = False
) -> None:
    """The declared rungs, and per pool and class the rung in force and its pressure."""
    answer = _fetch("GET", None, url, key, config, state)
    if as_json:
        emit_json(answer)
        return
    rungs = [[rung.get("index"), rung.get("name"), rung.get("enter")] for rung in answer.get("rungs") or []]
    names = ("pool", "tenant_class", "side", "rung", "name", "pressure", "signal", "override")
    scopes = [[scope.get(name) for name in names] for scope in answer.get("scopes") or []]
    show(
        table(f"Ladder (leave below {answer.get('leave')})", ["rung", "name", "enter at"], rungs),
        table("In force", ["pool", "class", "share", "rung", "name", "pressure", "from", "by hand"], scopes),
    )


@app.command("set")
def set_(
    rung: Annotated[str, typer.Argument(metavar="RUNG", help="Name or number of the rung.")],
    why: Annotated[str, typer.Option(help="Reason, for the audit.")],
    pool: Pool = None,
    tenant_class: TenantClass = None,
    ttl: Annotated[int, typer.Option(min=1, max=86_400, help="Seconds until it ends by itself.")] = 600,
    url: Url = None,
    key: Key = None,
    config: Config = DEFAULT_CONFIG,
    state: State = None,
    as_json: AsJson = False,
) -> None:
    """Hold the ladder on a rung for some time. Tenants' floors and opt-outs still count. Written to the audit."""
    body = {
        "rung": int(rung) if rung.isdecimal() else rung,
        "pool": pool,
        "tenant_class": tenant_class,
        "ttl_s": ttl,
        "why": why,
    }
    answer = _fetch("POST", body, url, key, config, state)
    if as_json:
        emit_json(answer)
    else:
        typer.echo(f"{answer.get('changed')} place(s) held on rung {answer.get('name', rung)} for {ttl} s")


@app.command()
def clear(
    pool: Pool = None,
    tenant_class: TenantClass = None,
    why: Annotated[str, typer.Option(help="Reason, for the audit.")] = "",
    url: Url = None,
    key: Key = None,
    config: Config = DEFAULT_CONFIG,
    state: State = None,
    as_json: AsJson = False,
) -> None:
    """End what `set` began; the ladder follows the pressure again."""
    body = {"pool": pool, "tenant_class": tenant_class, "why": why}
    answer = _fetch("DELETE", body, url, key, config, state)
    if as_json:
        emit_json(answer)
    else:
        typer.echo(f"{answer.get('changed')} place(s) cleared")


def _fetch(method: str, body: Any, url: str | None, key: str | None, config: Any, state: Any) -> Any:
    from rungway.commands.http import fetch, need

    return fetch(need(url, key, config, state), method, "/admin/ladder", body=body)
