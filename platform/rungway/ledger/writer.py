"""The only writer of the ledger: one thread, group commit.

`put` queues and returns a ticket; the thread commits everything that waits in one transaction and then reports the
highest durable ticket. A failing database is tried again with back-off and nothing is dropped: the writer turns
unhealthy, refuses new rows, and recovers by itself when the database does.
"""

from __future__ import annotations

import threading
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from sqlalchemy import Connection, delete, desc, insert, select
from sqlalchemy.exc import IntegrityError, OperationalError, SQLAlchemyError

from rungway.clock import NS_PER_S, monotonic_ns
from rungway.errors import LedgerError
from rungway.ledger import chain
from rungway.ledger.schema import add_waste_sql, engine_log, insert_sql, ledger, meta, open_database
from rungway.ledger.schema import audit as audit_table
from rungway.types import AttemptEnd, AuditEntry, LedgerRow

BATCH_ITEMS_MAX = 2000
# After the first item of a batch, wait for more: a commit costs as much as a dozen rows. For rows only acknowledgements
# wait; an audit entry may hold back an answer, so it ends the long wait, as `hurry` does.
GATHER_S = 0.05
GATHER_AUDIT_S = 0.001
RETRY_S_MIN = 0.01
RETRY_S_MAX = 1.0
TRIES_HEALTHY = 6  # after so many failures of one batch (about 0.6 s) the writer counts as unhealthy

WASTE_MARK = "waste_mark"  # row of `meta`: the last batch that added waste, so that a repeated try adds it once
Waste = tuple[str, int]  # request id, engine output found after its row was written
Item = tuple[int, Sequence[LedgerRow], Sequence[AuditEntry], Sequence[AttemptEnd], Sequence[Waste]]
INT64_MAX = (1 << 63) - 1


class LedgerWriter:
    """Opens (and creates) the database at `url`; raises LedgerError if it cannot.

    `on_committed(ticket)` is called on the writer's thread after each commit, with the highest durable ticket; it must
    not block or raise. `queue_max` bounds the rows that wait.
    """

    def __init__(self, url: str, on_committed: Callable[[int], None], queue_max: int = 50_000) -> None:
        self.healthy = True
        self.last_error = ""
        self._engine = open_database(url)
        self._on_committed = on_committed
        self._queue_max = queue_max
        self._queue: deque[Item] = deque()
        self._waiting = 0
        self._ticket = 0
        self._wake = threading.Condition()
        self._sleeping = False
        self._urgent = False
        self._closing = False
        self._give_up_ns: int | None = None
        self._sql = {
            "ledger": insert_sql(self._engine, ledger, ignore=True),
            "audit": insert_sql(self._engine, audit_table, ignore=False),
            "engine_log": insert_sql(self._engine, engine_log, ignore=True),
            "waste": add_waste_sql(self._engine),
        }
        try:
            with self._engine.connect() as connection:
                self._head = _read_head(connection)
        except SQLAlchemyError as error:
            raise LedgerError(f"cannot read the head of the audit chain: {error}") from error
        self._thread = threading.Thread(target=self._run, name="ledger-writer", daemon=True)
        self._thread.start()

    def put(
        self,
        *,
        rows: Sequence[LedgerRow] = (),
        audit: Sequence[AuditEntry] = (),
        attempts: Sequence[AttemptEnd] = (),
        waste: Sequence[Waste] = (),
    ) -> int:
        """Queue rows; the ticket is durable once `on_committed` has named it or a higher one. Rows and attempts that
        are already there are left as they are; `waste` adds to the wasted tokens of a row that is. Raises LedgerError
        when full, closed or unhealthy."""
        size = len(rows) + len(audit) + len(attempts) + len(waste)
        with self._wake:
            if self._closing:
                raise LedgerError("the ledger is closed")
            if not self.healthy:
                raise LedgerError(f"the ledger cannot be written: {self.last_error}")
            if self._waiting + size > self._queue_max:
                raise LedgerError(f"the ledger is behind: {self._waiting} rows wait to be written")
            self._waiting += size
            self._ticket += 1
            self._queue.append((self._ticket, rows, audit, attempts, waste))
            hurry = bool(audit) and not self._urgent
            self._urgent = self._urgent or hurry
            if self._sleeping or hurry:
                self._wake.notify()
            return self._ticket

    def hurry(self) -> int:
        """Commit soon what waits. Returns the newest ticket, 0 where there is none yet."""
        with self._wake:
            if self._queue and not self._urgent:
                self._urgent = True
                self._wake.notify()
            return self._ticket

    @property
    def waiting(self) -> int:
        """Rows not yet durable."""
        return self._waiting

    def close(self, timeout_s: float = 5.0) -> None:
        """Write what waits, at most for `timeout_s`, and close. Raises LedgerError if rows were left unwritten."""
        with self._wake:
            self._closing = True
            self._give_up_ns = monotonic_ns() + int(timeout_s * NS_PER_S)
            self._wake.notify()
        self._thread.join(timeout_s + 1.0)
        if self._waiting:
            raise LedgerError(f"{self._waiting} rows could not be written: {self.last_error or 'out of time'}")

    def _run(self) -> None:
        while items := self._next():
            if not self._commit_until_done(items):
                break
            size = sum(len(part) for item in items for part in item[1:])
            with self._wake:
                self._waiting -= size
            self._on_committed(items[-1][0])
        self._engine.dispose()

    def _next(self) -> list[Item]:
        """Wait for work; everything that gathered, up to a bound. Empty when closed and written."""
        with self._wake:
            while not self._queue and not self._closing:
                self._sleeping = True
                self._wake.wait()
            self._sleeping = False
            if not self._closing and not self._urgent and len(self._queue) < BATCH_ITEMS_MAX:
                self._wake.wait(GATHER_S)
            if not self._closing and self._urgent and len(self._queue) < BATCH_ITEMS_MAX:
                self._wake.wait(GATHER_AUDIT_S)
            self._urgent = len(self._queue) > BATCH_ITEMS_MAX  # what is left over may hold one
            return [self._queue.popleft() for _ in range(min(len(self._queue), BATCH_ITEMS_MAX))]

    def _commit_until_done(self, items: list[Item]) -> bool:
        """True once the batch is durable; False if `close` ran out of time first."""
        batch = _Batch(
            rows=[msgspec.structs.astuple(row) for item in items for row in item[1]],
            entries=[entry for item in items for entry in item[2]],
            ends=[_flat(end) for item in items for end in item[3]],
            waste=[(tokens, request_id) for item in items for request_id, tokens in item[4]],
        )
        tries, delay_s = 0, RETRY_S_MIN
        while True:
            try:
                self._commit(batch, first=tries == 0)
            except (SQLAlchemyError, ValueError, OverflowError) as error:
                self.last_error = str(error).splitlines()[0]
                if not isinstance(error, OperationalError | IntegrityError):
                    batch.clean()
            else:
                self.healthy = True
                return True
            tries += 1
            self.healthy = tries < TRIES_HEALTHY
            with self._wake:
                if self._give_up_ns is not None and monotonic_ns() > self._give_up_ns:
                    return False
                self._wake.wait(delay_s)
            delay_s = min(2 * delay_s, RETRY_S_MAX)

    def _commit(self, batch: _Batch, *, first: bool) -> None:
        """One transaction. After a failure the chain's head is read again: another writer may have moved it, or the
        failed commit may have gone through after all."""
        with self._engine.begin() as connection:
            head = self._head
            if batch.waste and not batch.mark:
                batch.mark = uuid.uuid4().hex
            if batch.waste and not first and _mark(connection) == batch.mark:
                batch.waste = []
            if batch.entries:
                if not first:
                    head = _read_head(connection)
                if first or head != batch.tried:
                    links, head = chain.extend(head, batch.entries)
                    batch.tried = head
                    connection.exec_driver_sql(self._sql["audit"], links)
            if batch.rows:
                connection.exec_driver_sql(self._sql["ledger"], batch.rows)
            if batch.ends:
                connection.exec_driver_sql(self._sql["engine_log"], batch.ends)
            if batch.waste:
                connection.exec_driver_sql(self._sql["waste"], batch.waste)
                connection.execute(delete(meta).where(meta.c.key == WASTE_MARK))
                connection.execute(insert(meta).values(key=WASTE_MARK, value=batch.mark))
        self._head = head


@dataclass
class _Batch:
    """What one transaction writes. `tried` is the chain's head if the last try went through; `mark` names the batch where
    it adds waste."""

    rows: list[tuple[Any, ...]]
    entries: list[AuditEntry]
    ends: list[tuple[Any, ...]]
    waste: list[tuple[int, str]]
    tried: chain.Head | None = None
    mark: str = ""

    def clean(self) -> None:
        """Make values storable that a database refuses; a row with a mark in it is better than none."""
        self.rows = [tuple(map(_storable, row)) for row in self.rows]
        self.ends = [tuple(map(_storable, end)) for end in self.ends]
        self.entries = [
            AuditEntry(**{name: _storable(value) for name, value in msgspec.structs.asdict(entry).items()})
            for entry in self.entries
        ]


def _storable(value: Any) -> Any:
    """Text without NUL and lone surrogates (PostgreSQL and UTF-8 refuse them), integers within 64 bits."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode().replace("\x00", "\ufffd")
    if isinstance(value, int):
        return max(-INT64_MAX, min(INT64_MAX, value))
    return value


def _flat(end: AttemptEnd) -> tuple[Any, ...]:
    """Columns of `engine_log`, in their order."""
    usage, billing = end.usage, end.billing
    return (
        end.request_id,
        end.attempt,
        end.replica_id,
        end.finish,
        billing.tenant,
        billing.key_id,
        billing.tier,
        billing.version,
        billing.gateway_id,
        usage.prompt_tokens,
        usage.cached_tokens,
        usage.output_tokens,
        billing.rung,
        billing.price.input,
        billing.price.cached_input,
        billing.price.output,
        billing.received_wall_ns,
        end.started_wall_ns,
        end.ended_wall_ns,
    )


def _mark(connection: Connection) -> str | None:
    return connection.execute(select(meta.c.value).where(meta.c.key == WASTE_MARK)).scalar()


def _read_head(connection: Connection) -> chain.Head:
    query = select(audit_table.c.seq, audit_table.c.hash).order_by(desc(audit_table.c.seq)).limit(1)
    found = connection.execute(query).first()
    return chain.Head(found.seq, found.hash) if found is not None else chain.Head()
