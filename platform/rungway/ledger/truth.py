"""The engine's side of the books: attempts as the replicas counted them, and the comparison with the bills."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, and_, func, select

from rungway.ledger.schema import engine_log, ledger

MISMATCHES_SHOWN_MAX = 100

_SUMS = (
    func.count().label("attempts"),
    func.sum(engine_log.c.prompt_tokens).label("prompt_tokens"),
    func.sum(engine_log.c.cached_tokens).label("cached_tokens"),
    func.sum(engine_log.c.output_tokens).label("output_tokens"),
)
_NAMES = tuple(column.name for column in _SUMS)


def engine_truth(connection: Connection, *, since_ns: int, limit: int, request_id: str | None) -> dict[str, Any]:
    """Tokens that each replica emitted, in total, by replica, and for the newest `limit` attempts (newest first)."""
    where = engine_log.c.ended_wall_ns >= since_ns
    if request_id is not None:
        where = engine_log.c.request_id == request_id
    by_replica = select(engine_log.c.replica_id, *_SUMS).where(where).group_by(engine_log.c.replica_id)
    replicas = {
        row.replica_id: {name: int(getattr(row, name)) for name in _NAMES} for row in connection.execute(by_replica)
    }
    newest = select(engine_log).where(where).order_by(engine_log.c.ended_wall_ns.desc()).limit(limit)
    return {
        "totals": {name: sum(sums[name] for sums in replicas.values()) for name in _NAMES},
        "by_replica": replicas,
        "attempts": [dict(row) for row in connection.execute(newest).mappings()],
    }


def reconcile(connection: Connection, since_ns: int) -> dict[str, Any]:
    """Compare bills with the engine log, request by request: billed output + wasted == output over all attempts.

    Looks at rows that ended since then and at all attempts of those requests. Rows without an attempt (refused, cache,
    template) have nothing to compare. `unsettled` are attempts whose request has no row yet; once nothing is in flight
    they, too, are an error. Answer: {"ok", "tenants": {name: sums}, "mismatches": n, "mismatched": [ids], "unsettled": n,
    "unsettled_ids": [ids]}; lists hold at most MISMATCHES_SHOWN_MAX ids.
    """
    emitted = (
        select(engine_log.c.request_id, func.sum(engine_log.c.output_tokens).label("output"))
        .group_by(engine_log.c.request_id)
        .subquery()
    )
    engine = func.coalesce(emitted.c.output, 0)
    claimed = ledger.c.output_tokens + ledger.c.wasted_tokens
    compared = and_(ledger.c.ended_wall_ns >= since_ns, (ledger.c.attempts > 0) | emitted.c.request_id.is_not(None))
    joined = ledger.outerjoin(emitted, emitted.c.request_id == ledger.c.request_id)
    sums = (
        select(
            ledger.c.tenant,
            func.count().label("requests"),
            func.sum(ledger.c.output_tokens).label("billed_output_tokens"),
            func.sum(ledger.c.wasted_tokens).label("wasted_tokens"),
            func.sum(engine).label("engine_output_tokens"),
        )
        .select_from(joined)
        .where(compared)
        .group_by(ledger.c.tenant)
    )
    tenants: dict[str, dict[str, Any]] = {}
    for row in connection.execute(sums):
        mine = {name: int(value) for name, value in row._mapping.items() if name != "tenant"}
        mine["ok"] = mine["billed_output_tokens"] + mine["wasted_tokens"] == mine["engine_output_tokens"]
        tenants[row.tenant] = mine
    differ = select(ledger.c.request_id).select_from(joined).where(compared, claimed != engine)
    open_ids = (
        select(engine_log.c.request_id)
        .distinct()
        .select_from(engine_log.outerjoin(ledger, ledger.c.request_id == engine_log.c.request_id))
        .where(engine_log.c.ended_wall_ns >= since_ns, ledger.c.request_id.is_(None))
    )
    mismatches, mismatched = _count_and_some(connection, differ)
    unsettled, unsettled_ids = _count_and_some(connection, open_ids)
    return {
        "ok": mismatches == 0,
        "tenants": tenants,
        "mismatches": mismatches,
        "mismatched": mismatched,
        "unsettled": unsettled,
        "unsettled_ids": unsettled_ids,
    }


def _count_and_some(connection: Connection, ids: Any) -> tuple[int, list[str]]:
    count = connection.execute(select(func.count()).select_from(ids.subquery())).scalar_one()
    return int(count), list(connection.execute(ids.limit(MISMATCHES_SHOWN_MAX)).scalars())
