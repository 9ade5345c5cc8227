"""Talking to a running platform: where it is, with which key, and its errors as one line."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import typer

from rungway.commands.common import fail, load

TIMEOUT_S = 15.0


@dataclass(frozen=True)
class Target:
    """A platform and a key for it. `found`: it comes from ready.json, so it may be gone."""

    url: str
    key: str
    found: bool


class Unreachable(Exception):
    """Nothing answers at the URL."""


def find(url: str | None, key: str | None, config: Path, state: Path | None, *, name: str = "admin") -> Target | None:
    """`--url` and `--key` (or their variables) first, then ready.json in the state folder, whose key `name` is used
    when none is given. An empty one (a variable that is set to nothing) is none. None: no URL was given and no server runs
    on that state folder."""
    url, key = url or None, key or None
    ready: dict[str, Any] = {}
    if url is None or key is None:
        ready = _ready(state) if state is not None or url is None else {}
        if not ready and url is None:
            ready = _ready(Path(load(config, state).state_dir))
    if url is None and not ready:
        return None
    keys = ready.get("keys") or {}
    key = key or keys.get(name) or (next(iter(keys.values())) if keys and name != "admin" else None)
    if key is None:
        raise fail("no key: set RUNGWAY_KEY or give --key (`rungway keys create platform` makes an admin key)", 2)
    return Target((url or str(ready["url"])).rstrip("/"), key, found=url is None)


def need(url: str | None, key: str | None, config: Path, state: Path | None) -> Target:
    """As `find`, but it is an error when no platform runs."""
    target = find(url, key, config, state)
    if target is None:
        raise fail("no platform is running on this state folder (give --url, or start one with `rungway serve`)")
    return target


def _ready(state: Path | None) -> dict[str, Any]:
    if state is None:
        return {}
    try:
        data = json.loads((state / "ready.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) and isinstance(data.get("url"), str) else {}


def call(
    target: Target, method: str, path: str, *, params: Mapping[str, Any] | None = None, body: Any = None
) -> tuple[int, Any]:
    """Status and parsed body of one request. Raises Unreachable; an answer that is no JSON is one line and exit 1."""
    query = {name: value for name, value in (params or {}).items() if value is not None}
    headers = {"Authorization": f"Bearer {target.key}"}
    try:
        with httpx.Client(timeout=TIMEOUT_S, headers=headers) as client:
            answer = client.request(method, target.url + path, params=query, json=body)
    except (httpx.TransportError, httpx.InvalidURL, ValueError) as error:
        raise Unreachable(f"{target.url} does not answer ({type(error).__name__})") from error
    try:
        return answer.status_code, answer.json()
    except ValueError:
        raise fail(f"{target.url}{path} answered {answer.status_code} with something that is no JSON") from None


def fetch(target: Target, method: str, path: str, *, params: Mapping[str, Any] | None = None, body: Any = None) -> Any:
    """The body of a successful answer; otherwise one line on stderr and exit 1."""
    try:
        status, answer = call(target, method, path, params=params, body=body)
    except Unreachable as error:
        raise fail(str(error)) from None
    return checked(status, answer)


def checked(status: int, answer: Any) -> Any:
    if status < 400:
        return answer
    raise refused(status, answer)


def refused(status: int, answer: Any) -> typer.Exit:
    error = answer.get("error") if isinstance(answer, dict) else None
    if isinstance(error, dict):
        return fail(f"{error.get('code') or status}: {error.get('message')}")
    return fail(f"the platform answered {status}")
