"""`rungway explain REQUEST_ID`: the decision about one request, from its ledger row and its audit entries."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from rungway.commands.common import DEFAULT_CONFIG, AsJson, Config, Key, State, Url, emit_json, fail


def explain(
    request_id: Annotated[str, typer.Argument(metavar="REQUEST_ID", help="From the header x-request-id.")],
    url: Url = None,
    key: Key = None,
    config: Config = DEFAULT_CONFIG,
    state: State = None,
    as_json: AsJson = False,
) -> None:
    """Why a request was answered the way it was: offers, limits, pressure, rung, times, tokens, cost.

    A request can be explained once it has ended. A tenant's key explains that tenant's requests.
    """
    from rungway.commands.http import Unreachable, call, checked, find

    answer = None
    target = find(url, key, config, state)
    if target is not None:
        try:
            answer = checked(*call(target, "GET", f"/v1/decisions/{request_id}"))
        except Unreachable as error:
            if not target.found:
                raise fail(str(error)) from None
    if answer is None:
        answer = _offline(request_id, config, state)
    if as_json:
        emit_json(answer)
        return
    from rungway.commands.explain_text import print_explanation

    print_explanation(answer)


def _offline(request_id: str, config: Path, state: Path | None) -> Mapping[str, Any]:
    import msgspec

    from rungway.commands.offline import open_ledger

    with open_ledger(config, state) as (reader, _):
        row, trail = reader.row(request_id), reader.audit_of(request_id)
    if row is None:
        raise fail(f"no settled request {request_id!r}")
    shown: dict[str, Any] = msgspec.to_builtins(row)
    try:
        shown["decision"] = json.loads(row.decision or "{}")
    except ValueError:
        shown["decision"] = {}
    return {"request": shown, "audit": trail}
