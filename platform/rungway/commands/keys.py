"""`rungway keys`: the text of a key is shown once, by `create`; everything else knows only its hash."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rungway.commands.common import (
    DEFAULT_CONFIG,
    AsJson,
    Config,
    State,
    clock_text,
    emit_json,
    fail,
    load,
    moment_s,
    show,
    table,
)

if TYPE_CHECKING:
    from rungway.contracts import Platform, Tenant

app = typer.Typer(no_args_is_help=True, help="Make, hash, revoke and list API keys.")
TenantName = Annotated[str, typer.Argument(metavar="TENANT", help="The tenant's name.")]


@app.command()
def create(
    tenant: TenantName,
    key_id: Annotated[str | None, typer.Option("--id", help="Name of the key. Default: TENANT-N.")] = None,
    scope: Annotated[list[str] | None, typer.Option(help="inference, usage or admin; may be repeated.")] = None,
    expires: Annotated[str | None, typer.Option(help="ISO time from which it is refused. Default: never.")] = None,
    config: Config = DEFAULT_CONFIG,
    state: State = None,
    as_json: AsJson = False,
) -> None:
    """Make a key, print it once and keep its hash in the state folder."""
    from rungway.settings import add_key
    from rungway.settings.cross import ADMIN_TENANT

    platform = load(config, state)
    owner = _tenant(platform, tenant)
    scopes = tuple(scope or (("admin", "usage") if tenant == ADMIN_TENANT else ("inference", "usage")))
    if "admin" in scopes and tenant != ADMIN_TENANT:
        raise fail(f"the scope admin is only for the tenant `{ADMIN_TENANT}`", 2)
    taken = {key.id for each in platform.tenants for key in each.keys}
    key_id = key_id or next(name for n in range(1, len(taken) + 2) if (name := f"{owner.name}-{n}") not in taken)
    if key_id in taken:
        raise fail(f"there is a key with the id `{key_id}` already", 2)
    until = moment_s(expires)
    when = datetime.fromtimestamp(until, UTC) if until is not None else None
    text = add_key(Path(platform.state_dir), owner.name, key_id, scopes, when)
    reloaded = _reload_running(Path(platform.state_dir))
    if as_json:
        emit_json({"tenant": owner.name, "id": key_id, "key": text, "scopes": list(scopes), "reloaded": reloaded})
        return
    typer.echo(text)
    typer.echo(f"key `{key_id}` of `{owner.name}`, shown this once. {_when(reloaded)}", err=True)


@app.command("hash")
def hash_(as_json: AsJson = False) -> None:
    """Read a key from standard input and print the SHA-256 that goes into a tenant file."""
    from rungway.settings import hash_key
    from rungway.settings.keys import key_problem

    if sys.stdin.isatty():
        text = typer.prompt("key", hide_input=True, err=True)
    else:
        text = sys.stdin.read(4096).removesuffix("\n")
    if problem := key_problem(text):
        raise fail(problem, 2)
    emit_json({"sha256": hash_key(text)}) if as_json else typer.echo(hash_key(text))


@app.command()
def revoke(
    tenant: TenantName,
    key_id: Annotated[str, typer.Argument(metavar="KEY_ID", help="The key's id, from `keys list`.")],
    config: Config = DEFAULT_CONFIG,
    state: State = None,
    as_json: AsJson = False,
) -> None:
    """Refuse a key from now on. A running server on the same state folder is told at once."""
    from rungway.settings import revoke_key

    platform = load(config, state)
    revoke_key(Path(platform.state_dir), _tenant(platform, tenant), key_id)
    reloaded = _reload_running(Path(platform.state_dir))
    if as_json:
        emit_json({"tenant": tenant, "id": key_id, "revoked": True, "reloaded": reloaded})
    else:
        typer.echo(f"key `{key_id}` of `{tenant}` is revoked. {_when(reloaded)}")


@app.command("list")
def list_(
    tenant: Annotated[str | None, typer.Option(help="Only this tenant.")] = None,
    config: Config = DEFAULT_CONFIG,
    state: State = None,
    as_json: AsJson = False,
) -> None:
    """List keys: ids, scopes, expiry. Never the keys; hashes only by their first characters."""
    platform = load(config, state)
    owners = [_tenant(platform, tenant)] if tenant else platform.tenants
    keys: list[dict[str, Any]] = [
        {
            "tenant": owner.name,
            "id": key.id,
            "sha256": f"{key.sha256[:8]}...",
            "scopes": list(key.scopes),
            "expires": clock_text(key.expires_ns) if key.expires_ns is not None else None,
            "revoked": key.revoked,
        }
        for owner in owners
        for key in owner.keys
    ]
    if as_json:
        emit_json(keys)
        return
    columns = ["tenant", "id", "sha256", "scopes", "expires", "revoked"]
    show(table("", columns, [[*(key[c] if c != "scopes" else ", ".join(key[c]) for c in columns)] for key in keys]))


def _tenant(platform: Platform, name: str) -> Tenant:
    tenant = platform.tenant(name)
    if tenant is None:
        known = ", ".join(each.name for each in platform.tenants)
        raise fail(f"there is no tenant `{name}` (tenants: {known})", 2)
    return tenant


def _when(reloaded: bool) -> str:
    if reloaded:
        return "The running server was told to reload."
    return "It counts from the next start, or from POST /admin/reload."


def _reload_running(state_dir: Path) -> bool:
    """Tells a ready server on this state folder to reload. The folder's lock proves that the recorded process is the
    server and not a stranger that got its number."""
    try:
        pid = int(json.loads((state_dir / "ready.json").read_text())["pid"])
        lock = os.open(state_dir / "serve.lock", os.O_RDWR)
    except (OSError, ValueError, KeyError, TypeError):
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.kill(pid, signal.SIGHUP)
        return True
    finally:
        os.close(lock)
    return False
