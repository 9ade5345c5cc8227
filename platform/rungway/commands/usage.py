"""`rungway usage`: what tenants asked for, what they got and what it cost."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from rungway.commands.common import (
    DEFAULT_CONFIG,
    AsJson,
    Config,
    Key,
    State,
    Url,
    emit_json,
    fail,
    moment_s,
    show,
    table,
)

COLUMNS = ("requests", "input_tokens", "cached_tokens", "output_tokens", "wasted_tokens", "cost_usd")


def usage(
    tenant: Annotated[str | None, typer.Option(help="Only this tenant (with an admin key).")] = None,
    since: Annotated[str | None, typer.Option(help="24h, 7d, an ISO time or epoch seconds. Default: one day.")] = None,
    until: Annotated[str | None, typer.Option(help="As --since. Default: now.")] = None,
    bucket: Annotated[int, typer.Option(min=1, max=2_678_400, help="Seconds per point of the series (--json).")] = 3600,
    url: Url = None,
    key: Key = None,
    config: Config = DEFAULT_CONFIG,
    state: State = None,
    as_json: AsJson = False,
) -> None:
    """Requests, tokens and cost per tenant and tier. A tenant's key sees its own tenant only.

    Reads the database itself when no server runs on the state folder.
    """
    from rungway.commands.http import Unreachable, call, checked, find

    params = {"since": moment_s(since), "until": moment_s(until), "bucket": bucket, "tenant": tenant}
    target = find(url, key, config, state, name="admin")
    answer = None
    if target is not None:
        try:
            status, answer = call(target, "GET", "/admin/usage", params=params)
            if status == 403:
                status, answer = call(target, "GET", "/v1/usage", params=params | {"tenant": None})
            answer = checked(status, answer)
        except Unreachable as error:
            if not target.found:
                raise fail(str(error)) from None
    if answer is None:
        answer = _offline(config, state, params)
    if as_json:
        emit_json(answer)
    else:
        _print(answer)


def _offline(config: Any, state: Any, params: Mapping[str, Any]) -> dict[str, Any]:
    from rungway.clock import NS_PER_S, wall_ns
    from rungway.commands.offline import open_ledger

    until_ns = wall_ns() if params["until"] is None else params["until"] * NS_PER_S
    since_ns = until_ns - 86_400 * NS_PER_S if params["since"] is None else params["since"] * NS_PER_S
    with open_ledger(config, state) as (reader, platform):
        return reader.usage(
            since_ns=since_ns,
            until_ns=until_ns,
            tenant=params["tenant"],
            bucket_s=params["bucket"],
            targets={each.name: each.slo for each in platform.tenants},
        )


def _print(answer: Mapping[str, Any]) -> None:
    groups = [("tenant", dict(answer.get("tenants") or {})), ("tier", dict(answer.get("by_tier") or {}))]
    if not groups[0][1] and isinstance(answer.get("totals"), dict):
        groups[0][1][str(answer.get("tenant") or "all")] = answer["totals"]
    for name, totals in groups:
        rows = [[label or "-", *(values.get(column) for column in COLUMNS)] for label, values in totals.items()]
        show(table("", [name, *COLUMNS], rows))
    outcomes = answer.get("by_outcome") or {}
    if outcomes:
        show(table("", ["outcome", "requests"], list(outcomes.items())))
    budget = answer.get("budget")
    if isinstance(budget, dict) and budget:
        limit = budget.get("limit_usd")
        said = "unlimited" if limit is None else f"{limit:g}"
        show(f"budget: spent {budget.get('spent_usd') or 0:g} of {said} USD")
