"""API keys: made here, shown once, kept only as SHA-256.

Keys from the command line go into key files, `state_dir/tenants/<tenant>.yaml` (folder 0700, file 0600), which
`load_platform` merges into the tenant's. The tenant files themselves, which people keep in version control, are never
written to.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import secrets
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from rungway.contracts import ApiKey, Platform, Tenant
from rungway.errors import ConfigError, Mistake
from rungway.settings.cross import ADMIN_TENANT
from rungway.settings.rule import Names
from rungway.settings.schema_tenant import KeysFile
from rungway.settings.validate import validate
from rungway.settings.yaml_lines import parse_document, read_document

KEY_BYTES = 32
KEY_CHARS_MAX = 256


def generate_key(tenant: str) -> str:
    """`rw_<tenant>_<43 url-safe characters>`, 256 random bits."""
    return f"rw_{tenant}_{secrets.token_urlsafe(KEY_BYTES)}"


def hash_key(text: str) -> str:
    """SHA-256 of the key's text, hex. This, never the text, is what the platform knows."""
    return hashlib.sha256(text.encode()).hexdigest()


def key_problem(text: str) -> str | None:
    """Why `text` cannot be sent as a bearer token; None = it can. The message never repeats the text."""
    if not text:
        return "the key is empty"
    if len(text) > KEY_CHARS_MAX:
        return f"the key is longer than {KEY_CHARS_MAX} characters"
    if not re.fullmatch(r"[A-Za-z0-9._~+/=-]+", text):
        return "the key has spaces or characters outside A-Z a-z 0-9 . _ ~ + / = -"
    return None


def add_key(
    state_dir: Path,
    tenant: str,
    key_id: str,
    scopes: Sequence[str] = ("inference", "usage"),
    expires: datetime | None = None,
) -> str:
    """Makes a key, writes its hash to the tenant's key file and returns its text, which is then nowhere else.

    `expires` must have a timezone. ConfigError: the id is taken or a value is not allowed.
    """
    text = generate_key(tenant)
    entry: dict[str, Any] = {"id": key_id, "sha256": hash_key(text), "scopes": list(scopes)}
    if expires is not None:
        entry["expires"] = expires.astimezone(UTC).isoformat().replace("+00:00", "Z")
    with _open(state_dir, tenant) as (path, entries):
        if any(known["id"] == key_id for known in entries):
            raise _wrong(path, "keys", f"tenant `{tenant}` has a key with the id `{key_id}` already")
        _write(path, tenant, [*entries, entry])
    return text


def revoke_key(state_dir: Path, tenant: Tenant, key_id: str) -> None:
    """Marks the key as revoked in the tenant's key file, also if it is declared in the tenant's own file.

    ConfigError: the tenant has no such key.
    """
    key = next((key for key in tenant.keys if key.id == key_id), None)
    with _open(state_dir, tenant.name) as (path, entries):
        entry = next((known for known in entries if known["id"] == key_id), None)
        if entry is None and key is None:
            raise _wrong(path, "keys", f"tenant `{tenant.name}` has no key with the id `{key_id}`")
        if entry is None and key is not None:
            entry = _entry(key)
            entries.append(entry)
        assert entry is not None
        entry["revoked"] = True
        _write(path, tenant.name, entries)


def make_demo_keys(platform: Platform, state_dir: Path) -> dict[str, str]:
    """Keys for the tenants in `demo_keys`, and for `platform` under the name `admin`, where a tenant has none at all:
    that is, on the first run. Returns their texts by name; load the platform again to have them in force."""
    if not platform.demo_keys:
        return {}
    made: dict[str, str] = {}
    for name in dict.fromkeys((*platform.demo_keys, ADMIN_TENANT)):
        tenant = platform.tenant(name)
        if tenant is None or tenant.keys or _path(state_dir, name).exists():
            continue
        admin = name == ADMIN_TENANT
        scopes = ("admin", "usage") if admin else ("inference", "usage")
        made["admin" if admin else name] = add_key(state_dir, name, f"{name}-demo", scopes)
    return made


def _entry(key: ApiKey) -> dict[str, Any]:
    entry: dict[str, Any] = {"id": key.id, "sha256": key.sha256, "scopes": list(key.scopes)}
    if key.expires_ns is not None:
        moment = datetime.fromtimestamp(key.expires_ns // 1_000_000_000, UTC)
        entry["expires"] = moment.isoformat().replace("+00:00", "Z")
    return entry


def _path(state_dir: Path, tenant: str) -> Path:
    return state_dir / "tenants" / f"{tenant}.yaml"


def _wrong(path: Path, where: str, message: str) -> ConfigError:
    return ConfigError([Mistake(str(path), 1, where, message)])


@contextmanager
def _open(state_dir: Path, tenant: str) -> Iterator[tuple[Path, list[dict[str, Any]]]]:
    """The key file's path and entries, under a lock that keeps two commands from losing each other's key."""
    path = _path(state_dir, tenant)
    state_dir.mkdir(parents=True, exist_ok=True)
    path.parent.mkdir(mode=0o700, exist_ok=True)
    lock = os.open(path.parent / ".lock", os.O_CREAT | os.O_RDWR, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield path, _entries(path)
    finally:
        os.close(lock)


def _entries(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    mistakes: list[Mistake] = []
    document = read_document(path, mistakes)
    if document is None or validate(KeysFile, document, Names(), mistakes) is None:
        raise ConfigError(mistakes)
    entries: list[dict[str, Any]] = document.data["keys"]
    return entries


def _write(path: Path, tenant: str, entries: list[dict[str, Any]]) -> None:
    """Checks what is to be written, then replaces the file in one step."""
    text = yaml.safe_dump({"tenant": tenant, "keys": entries}, sort_keys=False)
    mistakes: list[Mistake] = []
    document = parse_document(str(path), text.encode(), mistakes)
    if document is None or validate(KeysFile, document, Names(), mistakes) is None:
        raise ConfigError(mistakes)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".new-")  # mode 0600
    try:
        with os.fdopen(handle, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
