"""Sums over ledger rows: what tenants used, what it cost, how their objectives were met."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, Select, and_, case, func, or_, select

from rungway.clock import NS_PER_S
from rungway.contracts import NUSD_PER_USD, Slo
from rungway.ledger.schema import ledger
from rungway.outcomes import CODES, Outcome

SERIES_ROWS_MAX = 5000
LATENCY_SAMPLE_MAX = 20_000

_BROKEN = [str(outcome) for outcome in (Outcome.ERROR, Outcome.REPLICA_LOST, Outcome.GATEWAY_LOST, Outcome.TIMEOUT)]
_OURS = [str(code) for code, info in CODES.items() if info.whose == "platform"]
_CALLERS = [str(code) for code, info in CODES.items() if info.whose == "caller"]

_columns = ledger.c
_SUMS = (
    func.count().label("requests"),
    func.sum(_columns.prompt_tokens).label("input_tokens"),
    func.sum(_columns.cached_tokens).label("cached_tokens"),
    func.sum(_columns.output_tokens).label("output_tokens"),
    func.sum(_columns.wasted_tokens).label("wasted_tokens"),
    func.sum(_columns.cost_nusd).label("cost_nusd"),
)
_NAMES = tuple(column.name for column in _SUMS)


def span(since_ns: int, until_ns: int | None, tenant: str | None) -> ColumnElement[bool]:
    """Rows that ended in [since, until), of one tenant or of all."""
    terms = [_columns.ended_wall_ns >= since_ns]
    if until_ns is not None:
        terms.append(_columns.ended_wall_ns < until_ns)
    if tenant is not None:
        terms.append(_columns.tenant == tenant)
    return and_(*terms)


def usage(
    connection: Connection,
    *,
    since_ns: int,
    until_ns: int,
    tenant: str | None,
    bucket_s: int,
    targets: Mapping[str, Slo],
) -> dict[str, Any]:
    """The `usage` answer without its budget. `degraded` and `refused` are requests per tenant. Series are at most SERIES_ROWS_MAX rows, oldest first."""
    where = span(since_ns, until_ns, tenant)
    degraded = func.sum(case((_columns.degraded != "", 1), else_=0)).label("degraded")
    query = select(_columns.tenant, _columns.tier, _columns.outcome, degraded, *_SUMS).where(where)
    groups = connection.execute(query.group_by(_columns.tenant, _columns.tier, _columns.outcome)).all()
    outcomes: dict[str, int] = {}
    lowered: dict[str, int] = {}
    refused: dict[str, int] = {}
    for row in groups:
        outcomes[row.outcome] = outcomes.get(row.outcome, 0) + row.requests
        lowered[row.tenant] = lowered.get(row.tenant, 0) + int(row.degraded or 0)
        if row.outcome == Outcome.REFUSED:
            refused[row.tenant] = refused.get(row.tenant, 0) + row.requests
    return {
        "tenant": tenant,
        "totals": _totals(groups),
        "tenants": _totals_by(groups, "tenant"),
        "by_tier": _totals_by([row for row in groups if row.tier], "tier"),
        "by_outcome": outcomes,
        "degraded": lowered,
        "refused": refused,
        "series": _series(connection, where, bucket_s),
        "slo": slo(connection, since_ns=since_ns, until_ns=until_ns, tenant=tenant, targets=targets),
        "latency": _latency(connection, where),
    }


def slo(
    connection: Connection, *, since_ns: int, until_ns: int | None, tenant: str | None, targets: Mapping[str, Slo]
) -> dict[str, dict[str, float]]:
    """Attainment 0 to 1 per tenant: `overall` from the rows' own verdict, `availability` over the requests that the
    platform had to serve (a tenant's own limits and mistakes do not count), and, for tenants with targets, `ttft` and
    `tpot`. A name is absent where no row has a value."""
    refused = _columns.outcome == str(Outcome.REFUSED)
    ours = _columns.code.in_(_OURS)
    mistaken = and_(_columns.outcome.in_(_BROKEN), _columns.code.in_(_CALLERS))
    served = or_(and_(~refused, ~mistaken), ours)
    broken = or_(and_(_columns.outcome.in_(_BROKEN), ~mistaken), and_(refused, ours))
    query: Select[Any] = select(
        _columns.tenant,
        func.count(_columns.slo_met).label("judged"),
        func.sum(_columns.slo_met).label("met"),
        func.sum(case((served, 1), else_=0)).label("served"),
        func.sum(case((broken, 1), else_=0)).label("broken"),
        *_within("ttft", _columns.ttft_ms, {name: target.ttft_ms_p99 for name, target in targets.items()}),
        *_within("tpot", _columns.tpot_ms, {name: target.tpot_ms_p99 for name, target in targets.items()}),
    )
    shares: dict[str, dict[str, float]] = {}
    for row in connection.execute(query.where(span(since_ns, until_ns, tenant)).group_by(_columns.tenant)):
        mine = shares[row.tenant] = {}
        if row.judged:
            mine["overall"] = int(row.met) / int(row.judged)
        if row.served:
            mine["availability"] = 1.0 - int(row.broken) / int(row.served)
        for name, judged, met in (("ttft", row.ttft_n, row.ttft_met), ("tpot", row.tpot_n, row.tpot_met)):
            if row.tenant in targets and judged:
                mine[name] = int(met) / int(judged)
    return shares


def _within(name: str, column: ColumnElement[Any], limits: Mapping[str, float]) -> list[ColumnElement[Any]]:
    """How many rows have a value, and how many of them lie within their tenant's limit."""
    names: dict[float, list[str]] = {}  # few plans, many tenants: one term for each limit keeps the statement short
    for tenant, limit in limits.items():
        names.setdefault(limit, []).append(tenant)
    met = or_(*(and_(_columns.tenant.in_(group), column <= limit) for limit, group in names.items()))
    counted = func.sum(case((met, 1), else_=0)) if limits else func.sum(0)
    return [func.count(column).label(f"{name}_n"), counted.label(f"{name}_met")]


def _totals(rows: Sequence[Row[Any]]) -> dict[str, int | float]:
    sums: dict[str, int | float] = {name: sum(int(getattr(row, name) or 0) for row in rows) for name in _NAMES}
    sums["cost_usd"] = sums["cost_nusd"] / NUSD_PER_USD
    return sums


def _totals_by(rows: Sequence[Row[Any]], name: str) -> dict[str, dict[str, int | float]]:
    groups: dict[str, list[Row[Any]]] = {}
    for row in rows:
        groups.setdefault(getattr(row, name), []).append(row)
    return {key: _totals(group) for key, group in sorted(groups.items())}


def _series(connection: Connection, where: ColumnElement[bool], bucket_s: int) -> list[dict[str, Any]]:
    if bucket_s <= 0:
        return []
    bucket = (_columns.ended_wall_ns // (bucket_s * NS_PER_S)).label("bucket")
    query = select(bucket, _columns.tenant, _columns.tier, *_SUMS).where(where)
    grouped = query.group_by("bucket", _columns.tenant, _columns.tier)  # by name: PostgreSQL needs one expression
    newest = grouped.order_by(bucket.desc()).limit(SERIES_ROWS_MAX)
    found = connection.execute(newest).all()
    return [
        {
            "start": datetime.fromtimestamp(int(row.bucket) * bucket_s, UTC).isoformat(),
            "tenant": row.tenant,
            "tier": row.tier,
            **_totals([row]),
        }
        for row in sorted(found, key=lambda row: (row.bucket, row.tenant, row.tier))
    ]


def _latency(connection: Connection, where: ColumnElement[bool]) -> dict[str, float | None]:
    """Percentiles by nearest rank over the newest rows, at most LATENCY_SAMPLE_MAX of them."""
    query = select(_columns.ttft_ms, _columns.e2e_ms).where(where, _columns.e2e_ms.is_not(None))
    found = connection.execute(query.order_by(_columns.ended_wall_ns.desc()).limit(LATENCY_SAMPLE_MAX)).all()
    ttft = sorted(row.ttft_ms for row in found if row.ttft_ms is not None)
    e2e = sorted(row.e2e_ms for row in found)
    return {
        "ttft_ms_p50": _rank(ttft, 50),
        "ttft_ms_p99": _rank(ttft, 99),
        "e2e_ms_p50": _rank(e2e, 50),
        "e2e_ms_p99": _rank(e2e, 99),
    }


def _rank(ordered: Sequence[float], percent: int) -> float | None:
    return ordered[-(-len(ordered) * percent // 100) - 1] if ordered else None
