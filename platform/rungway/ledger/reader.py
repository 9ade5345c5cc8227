"""Reads of the ledger: short transactions on a small pool of connections, safe from several threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

import msgspec
from sqlalchemy import Connection, RowMapping, desc, func, select
from sqlalchemy.exc import SQLAlchemyError

from rungway.clock import NS_PER_S
from rungway.contracts import Slo
from rungway.errors import LedgerError
from rungway.ledger import chain, truth, usage
from rungway.ledger.schema import audit, engine_log, ledger, open_database
from rungway.outcomes import Outcome
from rungway.types import LedgerRow

VERIFY_PAGE = 2000
AUDIT_OF_MAX = 1000
NO_TARGETS: Mapping[str, Slo] = {}


class LedgerReader:
    """Opens the database at `url` for reading (and creates an empty one if there is none). Every method raises
    LedgerError if the database fails."""

    def __init__(self, url: str) -> None:
        self._engine = open_database(url, read_only=True)

    def close(self) -> None:
        self._engine.dispose()

    def usage(
        self,
        *,
        since_ns: int,
        until_ns: int,
        tenant: str | None = None,
        bucket_s: int = 3600,
        targets: Mapping[str, Slo] = NO_TARGETS,
    ) -> dict[str, Any]:
        """The `usage` answer (without budget) over rows that ended in [since, until) of the wall clock. `targets` are
        the tenants' objectives: with them `slo` tells ttft and tpot apart. `bucket_s` 0 leaves the series out."""
        with self._reading() as connection:
            return usage.usage(
                connection, since_ns=since_ns, until_ns=until_ns, tenant=tenant, bucket_s=bucket_s, targets=targets
            )

    def slo(
        self,
        *,
        since_ns: int,
        until_ns: int | None = None,
        tenant: str | None = None,
        targets: Mapping[str, Slo] = NO_TARGETS,
    ) -> dict[str, dict[str, float]]:
        """Attainment per tenant and objective, 0 to 1."""
        with self._reading() as connection:
            return usage.slo(connection, since_ns=since_ns, until_ns=until_ns, tenant=tenant, targets=targets)

    def row(self, request_id: str) -> LedgerRow | None:
        with self._reading() as connection:
            found = connection.execute(select(ledger).where(ledger.c.request_id == request_id)).mappings().first()
        return LedgerRow(**found) if found is not None else None

    def audit(
        self,
        *,
        after_seq: int = 0,
        limit: int = 100,
        tenant: str | None = None,
        kind: str | None = None,
        newest: bool = False,
    ) -> list[dict[str, Any]]:
        """Audit rows with a number above `after_seq`, oldest first, or newest first with `newest`."""
        query = select(audit).where(audit.c.seq > after_seq)
        if tenant is not None:
            query = query.where(audit.c.tenant == tenant)
        if kind is not None:
            query = query.where(audit.c.kind == kind)
        order = desc(audit.c.seq) if newest else audit.c.seq
        with self._reading() as connection:
            return [_shown(row) for row in connection.execute(query.order_by(order).limit(limit)).mappings()]

    def audit_of(self, request_id: str) -> list[dict[str, Any]]:
        """The audit rows of one request, oldest first (at most AUDIT_OF_MAX)."""
        query = select(audit).where(audit.c.request_id == request_id).order_by(audit.c.seq).limit(AUDIT_OF_MAX)
        with self._reading() as connection:
            return [_shown(row) for row in connection.execute(query).mappings()]

    def verify(
        self, progress: Callable[[int], None] | None = None, anchor: chain.Head | None = None
    ) -> chain.VerifyResult:
        """Walk the whole chain in bounded memory; `progress(rows so far)` after each page. `anchor` is a head noted
        earlier: the chain must still contain it, or rows were cut from its end."""
        head = chain.Head()
        anchored = anchor is None or anchor == head
        while True:
            query = select(audit).where(audit.c.seq > head.seq).order_by(audit.c.seq).limit(VERIFY_PAGE)
            with self._reading() as connection:
                page = [tuple(row) for row in connection.execute(query)]
            if not page:
                break
            head, fault = chain.check(head, page)
            if fault is not None:
                return chain.VerifyResult(False, head.seq, fault[0], fault[1], head)
            anchored = anchored or any((row[0], row[8]) == (anchor.seq, anchor.hash) for row in page if anchor)
            if progress is not None:
                progress(head.seq)
        if not anchored and anchor is not None:
            bad = min(anchor.seq, head.seq + 1)
            return chain.VerifyResult(False, head.seq, bad, f"row {anchor.seq} is not the one noted before", head)
        return chain.VerifyResult(True, head.seq, None, f"{head.seq} rows, the chain holds", head)

    def spent_since(self, tenant: str, wall_ns: int, until_ns: int | None = None) -> int:
        """Nano-dollars billed to a tenant for requests that ended since then, and before `until_ns`."""
        query = select(func.coalesce(func.sum(ledger.c.cost_nusd), 0)).where(usage.span(wall_ns, until_ns, tenant))
        with self._reading() as connection:
            return int(connection.execute(query).scalar_one())

    def newest_ns(self) -> int:
        """When the newest row ended, by the wall clock that wrote it; 0 without rows."""
        with self._reading() as connection:
            return int(connection.execute(select(func.coalesce(func.max(ledger.c.ended_wall_ns), 0))).scalar_one())

    def recent(self, since_ns: int) -> dict[str, tuple[int, int]]:
        """Per tenant: requests that were not refused, and their input + output tokens, since then."""
        tokens = func.sum(ledger.c.prompt_tokens + ledger.c.output_tokens)
        query = select(ledger.c.tenant, func.count().label("requests"), tokens.label("tokens"))
        query = query.where(usage.span(since_ns, None, None), ledger.c.outcome != str(Outcome.REFUSED))
        with self._reading() as connection:
            found = connection.execute(query.group_by(ledger.c.tenant)).all()
        return {row.tenant: (int(row.requests), int(row.tokens)) for row in found}

    def output_samples(self, limit: int) -> list[tuple[str, str, int]]:
        """(tenant, tier, output tokens) of the newest finished answers of models, oldest first."""
        query = select(ledger.c.tenant, ledger.c.tier, ledger.c.output_tokens).where(
            ledger.c.outcome.in_([str(Outcome.COMPLETED), str(Outcome.LENGTH)]), ledger.c.output_tokens > 0
        )
        with self._reading() as connection:
            found = connection.execute(query.order_by(ledger.c.ended_wall_ns.desc()).limit(limit)).all()
        return [(row.tenant, row.tier, int(row.output_tokens)) for row in reversed(found)]

    def settled(self, since_ns: int, limit: int) -> list[tuple[str, str, dict[int, int]]]:
        """(request id, code if it was refused, output tokens of each attempt as its engine counted them) of the newest
        `limit` rows that ended since then, oldest first. Under attempt 0: tokens that the row has counted and no engine
        has reported yet."""
        newest = (
            select(
                ledger.c.request_id,
                ledger.c.outcome,
                ledger.c.code,
                ledger.c.ended_wall_ns,
                (ledger.c.output_tokens + ledger.c.wasted_tokens).label("counted"),
            )
            .where(usage.span(since_ns, None, None))
            .order_by(desc(ledger.c.ended_wall_ns))
            .limit(limit)
            .subquery()
        )
        joined = newest.outerjoin(engine_log, engine_log.c.request_id == newest.c.request_id)
        query = select(newest, engine_log.c.attempt, engine_log.c.output_tokens.label("output")).select_from(joined)
        found: dict[str, tuple[str, str, dict[int, int]]] = {}
        with self._reading() as connection:
            for row in connection.execute(query.order_by(newest.c.ended_wall_ns)):
                refused = row.code if row.outcome == str(Outcome.REFUSED) else ""
                entry = found.setdefault(row.request_id, (row.request_id, refused, {0: int(row.counted)}))
                if row.attempt is not None:
                    entry[2][int(row.attempt)] = int(row.output)
                    entry[2][0] -= int(row.output)
        return list(found.values())

    def engine_truth(self, *, since_ns: int = 0, limit: int = 1000, request_id: str | None = None) -> dict[str, Any]:
        """Tokens as the engines counted them: totals, by replica, and the newest attempts."""
        with self._reading() as connection:
            return truth.engine_truth(connection, since_ns=since_ns, limit=limit, request_id=request_id)

    def reconcile(self, since_ns: int = 0) -> dict[str, Any]:
        """Bills against the engine log, per tenant and request."""
        with self._reading() as connection:
            return truth.reconcile(connection, since_ns)

    @contextmanager
    def _reading(self) -> Iterator[Connection]:
        """A connection on one snapshot, so that several queries of one answer fit together."""
        try:
            with self._engine.connect() as connection:
                if connection.dialect.name == "sqlite":
                    connection.exec_driver_sql("BEGIN")  # the driver itself opens no transaction for reads
                yield connection
        except SQLAlchemyError as error:
            raise LedgerError(f"the ledger cannot be read: {str(error).splitlines()[0]}") from error


def _shown(row: RowMapping) -> dict[str, Any]:
    """An audit row for people: its detail as JSON where it is JSON, and the time as text beside the number."""
    shown = dict(row)
    shown["time"] = datetime.fromtimestamp(row["wall_ns"] / NS_PER_S, UTC).isoformat(timespec="milliseconds")
    try:
        shown["detail"] = msgspec.json.decode(row["detail"])
    except msgspec.DecodeError:
        pass
    return shown
