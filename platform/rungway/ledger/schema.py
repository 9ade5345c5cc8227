"""Tables of the ledger and how the database is opened. SQLite by default, PostgreSQL by URL; one schema for both.

Columns of `ledger` are the fields of `LedgerRow`, in their order, so that a row is written as the struct's tuple.
"""

from __future__ import annotations

import types
import typing
from pathlib import Path
from typing import Any

import msgspec
from sqlalchemy import (
    BigInteger,
    Column,
    Connection,
    Engine,
    Float,
    Index,
    Integer,
    MetaData,
    Table,
    Text,
    bindparam,
    create_engine,
    event,
    make_url,
    select,
    text,
    update,
)
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import ArgumentError, SQLAlchemyError
from sqlalchemy.schema import CreateIndex, CreateTable

from rungway.contracts import Platform
from rungway.errors import LedgerError
from rungway.types import LedgerRow

SCHEMA_VERSION = 1
BUSY_TIMEOUT_S = 2.0
WAL_BYTES_KEPT = 64_000_000
WAL_PAGES = 4000
READERS_MAX = 4
_CREATE_LOCK = 0x52554E47  # any constant: two processes that create the schema at once take turns

metadata = MetaData()


def _columns_of(struct: type[msgspec.Struct], primary: str) -> list[Column[Any]]:
    columns: list[Column[Any]] = []
    for field in msgspec.structs.fields(struct):
        kind: object = field.type
        optional = isinstance(kind, types.UnionType)
        if optional:
            kind = next(arg for arg in typing.get_args(kind) if arg is not type(None))
        sql = {int: BigInteger, float: Float, str: Text}[typing.cast(type, kind)]
        columns.append(Column(field.name, sql, primary_key=field.name == primary, nullable=optional))
    return columns


meta = Table("meta", metadata, Column("key", Text, primary_key=True), Column("value", Text, nullable=False))

ledger = Table("ledger", metadata, *_columns_of(LedgerRow, "request_id"))
Index("ledger_ended", ledger.c.ended_wall_ns)
Index("ledger_tenant_ended", ledger.c.tenant, ledger.c.ended_wall_ns)

audit = Table(
    "audit",
    metadata,
    Column("seq", Integer().with_variant(BigInteger(), "postgresql"), primary_key=True, autoincrement=False),
    Column("wall_ns", BigInteger, nullable=False),
    Column("kind", Text, nullable=False),
    Column("tenant", Text, nullable=False),
    Column("request_id", Text, nullable=False),
    Column("rung", BigInteger, nullable=False),
    Column("detail", Text, nullable=False),
    Column("prev_hash", Text, nullable=False),
    Column("hash", Text, nullable=False),
)
Index("audit_request", audit.c.request_id)
Index("audit_tenant_seq", audit.c.tenant, audit.c.seq)

_ENGINE_TEXTS = ("replica_id", "finish", "tenant", "key_id", "tier", "version", "gateway_id")
_ENGINE_NUMBERS = (
    "prompt_tokens",
    "cached_tokens",
    "output_tokens",
    "rung",
    "price_input",
    "price_cached_input",
    "price_output",
    "received_wall_ns",
    "started_wall_ns",
    "ended_wall_ns",
)
engine_log = Table(
    "engine_log",
    metadata,
    Column("request_id", Text, primary_key=True),
    Column("attempt", BigInteger, primary_key=True, autoincrement=False),
    *(Column(name, Text, nullable=False) for name in _ENGINE_TEXTS),
    *(Column(name, BigInteger, nullable=False) for name in _ENGINE_NUMBERS),
)
Index("engine_log_ended", engine_log.c.ended_wall_ns)


def database_url(platform: Platform) -> str:
    """SQLAlchemy URL of a cell's ledger: `sqlite` means a file in its state directory."""
    if platform.database == "sqlite":
        return f"sqlite:///{Path(platform.state_dir) / 'ledger.db'}"
    return platform.database


def open_database(url: str, *, read_only: bool = False) -> Engine:
    """Engine on an up-to-date schema, created if absent. Raises LedgerError if the database cannot be opened or was
    written by a newer Rungway."""
    try:
        parsed = make_url(url)
        if parsed.drivername in ("postgres", "postgresql"):
            parsed = parsed.set(drivername="postgresql+psycopg")
        engine = _engine(parsed, read_only)
        _ensure_schema(engine)
        if read_only and engine.dialect.name == "sqlite":
            event.listen(engine, "connect", lambda raw, _: raw.execute("PRAGMA query_only=ON"))
            engine.dispose()  # the connection above was opened before the listener was there
    except (SQLAlchemyError, ArgumentError, OSError, ImportError) as error:
        raise LedgerError(f"cannot open the ledger at {_shown(url)}: {error}") from error
    return engine


def _engine(url: Any, read_only: bool) -> Engine:
    if url.get_backend_name() == "sqlite":
        if url.database:
            Path(url.database).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        engine = create_engine(
            url,
            pool_size=READERS_MAX if read_only else 1,
            max_overflow=0,
            connect_args={"timeout": BUSY_TIMEOUT_S, "check_same_thread": False},
        )
        event.listen(engine, "connect", _sqlite_pragmas)
        return engine
    return create_engine(
        url,
        pool_size=READERS_MAX if read_only else 1,
        max_overflow=0,
        pool_pre_ping=True,
        paramstyle="format",  # positional, so that rows travel as tuples
        isolation_level="REPEATABLE READ" if read_only else "READ COMMITTED",
    )


def _sqlite_pragmas(raw: Any, _: object) -> None:
    """WAL lets readers work while the writer commits; FULL makes each commit survive a loss of power. Rarer checkpoints
    write the pages at the end of tables and indexes, which change with every commit, less often."""
    kept = (f"journal_size_limit={WAL_BYTES_KEPT}", f"wal_autocheckpoint={WAL_PAGES}")
    for pragma in ("journal_mode=WAL", "synchronous=FULL", *kept):
        raw.execute(f"PRAGMA {pragma}").close()


def _ensure_schema(engine: Engine) -> None:
    with engine.begin() as connection:
        if engine.dialect.name == "postgresql":
            connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _CREATE_LOCK})
        connection.execute(CreateTable(meta, if_not_exists=True))
        found = connection.execute(select(meta.c.value).where(meta.c.key == "schema_version")).scalar()
        if found is not None:
            if int(found) > SCHEMA_VERSION:
                raise LedgerError(
                    f"the ledger has schema {found}; this Rungway knows schemas up to {SCHEMA_VERSION}. Use a newer one."
                )
            return
        _create(connection)


def _create(connection: Connection) -> None:
    for table in (ledger, audit, engine_log):
        connection.execute(CreateTable(table, if_not_exists=True))
        for index in table.indexes:
            connection.execute(CreateIndex(index, if_not_exists=True))
    connection.exec_driver_sql(
        insert_sql(connection.engine, meta, ignore=True), ("schema_version", str(SCHEMA_VERSION))
    )


def insert_sql(engine: Engine, table: Table, *, ignore: bool) -> str:
    """Compiled INSERT with one positional placeholder per column, in column order; `ignore` skips known keys."""
    statement = sqlite.insert(table) if engine.dialect.name == "sqlite" else postgresql.insert(table)
    full = statement.values({column.name: None for column in table.columns})
    return str((full.on_conflict_do_nothing() if ignore else full).compile(dialect=engine.dialect))


def add_waste_sql(engine: Engine) -> str:
    """Compiled UPDATE that adds to a row's wasted tokens; its parameters are (tokens, request id)."""
    more = update(ledger).values(wasted_tokens=ledger.c.wasted_tokens + bindparam("tokens"))
    return str(more.where(ledger.c.request_id == bindparam("id")).compile(dialect=engine.dialect))


def _shown(url: str) -> str:
    """The URL without its password."""
    try:
        return make_url(url).render_as_string(hide_password=True)
    except ArgumentError:
        return "the configured URL"
