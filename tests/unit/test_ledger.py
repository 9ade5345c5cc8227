"""Writing and reading the ledger, on SQLite and, where a server is there, on PostgreSQL."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.exc import OperationalError

from rungway.contracts import Price, Slo
from rungway.errors import LedgerError
from rungway.ledger import LedgerReader, LedgerWriter
from rungway.ledger import writer as writer_module
from rungway.types import AttemptEnd, AuditEntry, Billing, LedgerRow, Usage

ROOT = Path(__file__).parents[2]
WAIT_S = 60.0
POSTGRES = os.environ.get("RUNGWAY_TEST_POSTGRES")
SECOND = 1_000_000_000


def row(number: int, **changed: Any) -> LedgerRow:
    plain = LedgerRow(
        request_id=f"req_{number:08d}",
        started_wall_ns=number * SECOND,
        ended_wall_ns=number * SECOND + 500,
        tenant="acme",
        key_id="acme-1",
        tenant_class="interactive",
        risk="normal",
        action="read",
        endpoint="chat",
        model="auto",
        tier="small",
        version="v1",
        rung=0,
        degraded="",
        reason="best offer",
        outcome="completed",
        code="",
        prompt_tokens=10,
        cached_tokens=4,
        output_tokens=7,
        wasted_tokens=0,
        cost_nusd=1000,
        price_input=200_000,
        price_cached_input=50_000,
        price_output=600_000,
        attempts=1,
        replica_id="r1",
        gateway_id="g1",
        session="",
        cache="off",
        queue_wait_ms=1.5,
        ttft_ms=20.0,
        tpot_ms=5.0,
        e2e_ms=100.0,
        slo_met=1,
        decision='{"offers":[]}',
    )
    return msgspec.structs.replace(plain, **changed)


def entry(number: int, **changed: Any) -> AuditEntry:
    plain = AuditEntry(
        wall_ns=number * SECOND,
        kind="downgrade",
        tenant="acme",
        request_id=f"req_{number:08d}",
        rung=4,
        detail='{"from":"large","to":"small"}',
    )
    return msgspec.structs.replace(plain, **changed)


def attempt(number: int, *, which: int = 1, output: int = 7, replica: str = "r1") -> AttemptEnd:
    billing = Billing(
        tenant="acme",
        key_id="acme-1",
        tenant_class="interactive",
        risk="normal",
        action="read",
        model="auto",
        tier="small",
        version="v1",
        rung=0,
        degraded=(),
        reason="",
        price=Price(input=1, cached_input=1, output=1),
        gateway_id="g1",
        received_wall_ns=number * SECOND,
    )
    return AttemptEnd(
        request_id=f"req_{number:08d}",
        attempt=which,
        replica_id=replica,
        usage=Usage(prompt_tokens=10, cached_tokens=4, output_tokens=output),
        finish="stop",
        billing=billing,
        started_wall_ns=number * SECOND,
        ended_wall_ns=number * SECOND + 400,
    )


class Book:
    """A ledger under test: a writer that can be reopened, a reader, and the tickets that came back."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.tickets: list[int] = []
        self.writer = LedgerWriter(url, self.tickets.append)
        self.reader = LedgerReader(url)

    def put(self, **what: Any) -> None:
        ticket = self.writer.put(**what)
        wait(lambda: bool(self.tickets) and self.tickets[-1] >= ticket)

    def reopen(self) -> None:
        self.writer.close()
        self.tickets.clear()
        self.writer = LedgerWriter(self.url, self.tickets.append)

    def close(self) -> None:
        self.writer.close()
        self.reader.close()


def wait(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.002)


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path / 'state' / 'ledger.db'}"
        return
    if POSTGRES is None:
        pytest.skip("RUNGWAY_TEST_POSTGRES names no server")
    admin = create_engine(POSTGRES.replace("postgresql://", "postgresql+psycopg://"))
    schema = f"t{uuid.uuid4().hex}"
    with admin.begin() as connection:
        connection.execute(text(f"CREATE SCHEMA {schema}"))
    yield f"{POSTGRES}{'&' if '?' in POSTGRES else '?'}options=-csearch_path%3D{schema}"
    with admin.begin() as connection:
        connection.execute(text(f"DROP SCHEMA {schema} CASCADE"))
    admin.dispose()


@pytest.fixture
def book(url: str) -> Iterator[Book]:
    book = Book(url)
    yield book
    book.close()


def test_a_row_comes_back_as_it_was(book: Book) -> None:
    plain = row(1, ttft_ms=None, tpot_ms=None, slo_met=None, reason="größter Preis", wasted_tokens=1 << 40)
    book.put(rows=[plain])
    assert book.reader.row("req_00000001") == plain
    assert book.reader.row("req_00000002") is None


def test_the_first_row_of_a_request_stays(book: Book) -> None:
    book.put(rows=[row(1)], attempts=[attempt(1)])
    book.put(rows=[row(1, cost_nusd=99), row(2)], attempts=[attempt(1, output=99), attempt(1, which=2, output=3)])
    found = book.reader.row("req_00000001")
    assert found is not None
    assert found.cost_nusd == 1000
    truth = book.reader.engine_truth(since_ns=0, limit=10, request_id="req_00000001")
    assert truth["totals"] == {"attempts": 2, "prompt_tokens": 20, "cached_tokens": 8, "output_tokens": 10}
    assert book.reader.usage(since_ns=0, until_ns=1 << 62)["totals"]["requests"] == 2


def test_only_rows_wait_long_for_company(book: Book, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "GATHER_S", 10 * WAIT_S)
    first = book.writer.put(rows=[row(1)])
    assert book.writer.hurry() == first
    wait(lambda: book.tickets == [first])
    second = book.writer.put(rows=[row(2)])
    book.put(audit=[entry(3)])
    assert second < book.tickets[-1], "a row goes with the audit entry that hurries"
    assert book.reader.usage(since_ns=0, until_ns=1 << 62)["totals"]["requests"] == 2
    assert book.writer.hurry() == book.tickets[-1], "nothing waits"


def test_tickets_rise_and_each_is_named_or_passed(book: Book) -> None:
    given: list[int] = []
    lock = threading.Lock()

    def put_many(base: int) -> None:
        for number in range(200):
            with lock:
                given.append(book.writer.put(rows=[row(base + number)], audit=[entry(base + number)]))

    threads = [threading.Thread(target=put_many, args=(1000 * index,)) for index in range(1, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert given == list(range(1, 601))
    wait(lambda: bool(book.tickets) and book.tickets[-1] == 600)
    assert book.tickets == sorted(set(book.tickets))
    assert len(book.tickets) < 300, "commits are grouped"
    assert book.writer.waiting == 0
    assert book.reader.verify().rows == 600


def test_the_chain_goes_on_after_a_restart(book: Book) -> None:
    book.put(audit=[entry(1), entry(2)])
    first = book.reader.verify()
    book.reopen()
    book.put(audit=[entry(3, tenant="globex", kind="refusal")])
    verified = book.reader.verify(anchor=first.head)
    assert (verified.ok, verified.rows, verified.first_bad_seq) == (True, 3, None)
    assert [shown["seq"] for shown in book.reader.audit(after_seq=1, limit=10)] == [2, 3]
    assert [shown["seq"] for shown in book.reader.audit(limit=2, newest=True)] == [3, 2]
    assert [shown["seq"] for shown in book.reader.audit(tenant="globex")] == [3]
    assert [shown["seq"] for shown in book.reader.audit(kind="downgrade", limit=1)] == [1]
    (shown,) = book.reader.audit_of("req_00000003")
    assert shown["detail"] == {"from": "large", "to": "small"}
    assert shown["time"] == "1970-01-01T00:00:03.000+00:00"


def test_two_writers_share_one_chain(book: Book) -> None:
    tickets: list[int] = []
    other = LedgerWriter(book.url, tickets.append)
    for number in range(5):
        book.put(audit=[entry(number)])
        ticket = other.put(audit=[entry(100 + number)])
        wait(lambda ticket=ticket: bool(tickets) and tickets[-1] >= ticket)  # type: ignore[misc]
    other.close()
    assert book.reader.verify().ok
    assert book.reader.verify().rows == 10
    assert book.writer.healthy


def test_values_that_a_database_refuses_are_made_storable(book: Book) -> None:
    book.put(rows=[row(1, model="a\x00b\ud800c", cost_nusd=1 << 70)], audit=[entry(1, detail="\ud800")])
    found = book.reader.row("req_00000001")
    assert found is not None
    assert found.model.startswith("a")
    assert found.cost_nusd == (1 << 63) - 1
    assert book.reader.verify().ok
    book.put(rows=[row(2)])


def test_usage_adds_up_by_tenant_tier_outcome_and_time(book: Book) -> None:
    book.put(
        rows=[
            row(10),
            row(20, tier="large", cost_nusd=5_000_000_000, slo_met=0, ttft_ms=900.0, e2e_ms=1000.0),
            row(3700, tenant="globex", outcome="error", code="internal", slo_met=None, ttft_ms=None, e2e_ms=None),
            row(
                3701, tenant="globex", outcome="refused", code="overloaded", tier="", cost_nusd=0, attempts=0, slo_met=0
            ),
            row(3702, tenant="globex", outcome="refused", code="queue_full", tier="", cost_nusd=0, attempts=0),
            row(3703, tenant="globex"),
            row(3704, tenant="clumsy", outcome="error", code="invalid_schema", slo_met=None, ttft_ms=None),
            row(9000, tenant="late"),
        ]
    )
    slo = Slo(ttft_ms_p99=500, tpot_ms_p99=4, availability=0.99)
    answer = book.reader.usage(since_ns=0, until_ns=8000 * SECOND, targets={"acme": slo})
    assert answer["totals"]["requests"] == 7
    assert answer["tenants"]["acme"] == {
        "requests": 2,
        "input_tokens": 20,
        "cached_tokens": 8,
        "output_tokens": 14,
        "wasted_tokens": 0,
        "cost_nusd": 5_000_001_000,
        "cost_usd": 5.000001,
    }
    assert answer["by_outcome"] == {"completed": 3, "error": 2, "refused": 2}
    assert answer["by_tier"]["large"]["requests"] == 1
    assert "" not in answer["by_tier"]
    assert [(point["start"][11:16], point["tenant"], point["requests"]) for point in answer["series"]] == [
        ("00:00", "acme", 1),
        ("00:00", "acme", 1),
        ("01:00", "clumsy", 1),
        ("01:00", "globex", 2),
        ("01:00", "globex", 2),
    ]
    assert answer["slo"]["acme"] == {"overall": 0.5, "availability": 1.0, "ttft": 0.5, "tpot": 0.0}
    assert answer["slo"]["globex"]["availability"] == pytest.approx(1 / 3)
    assert answer["slo"]["clumsy"] == {}, "a tenant's own mistakes do not count"
    assert answer["latency"]["ttft_ms_p50"] == 20.0
    assert answer["latency"]["e2e_ms_p99"] == 1000.0
    json.dumps(answer)
    mine = book.reader.usage(since_ns=0, until_ns=8000 * SECOND, tenant="globex", bucket_s=0)
    assert set(mine["tenants"]) == {"globex"}
    assert mine["series"] == []
    assert book.reader.usage(since_ns=0, until_ns=1)["latency"]["e2e_ms_p50"] is None


def test_what_a_restarted_controller_reads(book: Book) -> None:
    book.put(
        rows=[
            row(1),
            row(2, output_tokens=9),
            row(3, tenant="globex", outcome="refused"),
            row(4, tenant="globex", outcome="length", tier="large"),
        ]
    )
    assert book.reader.spent_since("acme", 2 * SECOND) == 1000
    assert book.reader.spent_since("acme", 0) == 2000
    assert book.reader.spent_since("nobody", 0) == 0
    assert book.reader.recent(2 * SECOND) == {"acme": (1, 19), "globex": (1, 17)}
    assert book.reader.output_samples(2) == [("acme", "small", 9), ("globex", "large", 7)]


def test_bills_are_compared_with_the_engines(book: Book) -> None:
    book.put(
        rows=[
            row(1),
            row(2, output_tokens=5, wasted_tokens=4, attempts=2),
            row(3, outcome="cache_hit", attempts=0),
            row(4, output_tokens=8),
        ],
        attempts=[attempt(1), attempt(2, output=4), attempt(2, which=2, output=5, replica="r2"), attempt(4)],
    )
    books = book.reader.reconcile(0)
    assert not books["ok"]
    assert books["mismatched"] == ["req_00000004"]
    assert books["tenants"]["acme"] == {
        "requests": 3,
        "billed_output_tokens": 20,
        "wasted_tokens": 4,
        "engine_output_tokens": 23,
        "ok": False,
    }
    book.put(attempts=[attempt(4, which=2, output=1), attempt(5)])
    books = book.reader.reconcile(0)
    assert books["ok"]
    assert books["unsettled_ids"] == ["req_00000005"]
    truth = book.reader.engine_truth(limit=2)
    assert truth["by_replica"]["r2"]["output_tokens"] == 5
    assert [end["request_id"] for end in truth["attempts"]] == ["req_00000005", "req_00000004"]


def test_waste_found_late_is_added_once(book: Book, monkeypatch: pytest.MonkeyPatch) -> None:
    book.put(rows=[row(1), row(2)], attempts=[attempt(1), attempt(2)])
    book.put(attempts=[attempt(1, which=2, output=3)], waste=[("req_00000001", 3), ("req_unknown", 9)])
    assert book.reader.reconcile()["ok"]
    commit = book.writer._commit
    failures = 0

    def commit_and_fail(batch: Any, *, first: bool) -> None:
        """The commit goes through, but its answer is lost on the way."""
        nonlocal failures
        commit(batch, first=first)
        failures += 1
        if failures == 1:
            raise OperationalError("COMMIT", {}, ConnectionError("connection lost"))

    monkeypatch.setattr(book.writer, "_commit", commit_and_fail)
    book.put(audit=[entry(1)], attempts=[attempt(2, which=2, output=5)], waste=[("req_00000002", 5)])
    assert failures == 2
    found = book.reader.row("req_00000002")
    assert found is not None
    assert found.wasted_tokens == 5
    assert book.reader.reconcile()["ok"]
    assert book.reader.verify().rows == 1


def test_reading_while_writing(book: Book) -> None:
    for number in range(300):
        book.writer.put(rows=[row(number)], audit=[entry(number)], attempts=[attempt(number)])
        if number % 30 == 0:
            verified = book.reader.verify()
            assert verified.ok
            assert book.reader.reconcile(0)["mismatches"] == 0
    wait(lambda: book.writer.waiting == 0)
    assert book.reader.verify().rows == 300


def test_a_newer_schema_is_refused(url: str) -> None:
    Book(url).close()
    engine = create_engine(url.replace("postgresql://", "postgresql+psycopg://"))
    with engine.begin() as connection:
        connection.execute(text("UPDATE meta SET value = '99' WHERE key = 'schema_version'"))
    engine.dispose()
    with pytest.raises(LedgerError, match="schema 99"):
        LedgerWriter(url, lambda ticket: None)
    with pytest.raises(LedgerError, match="schema 99"):
        LedgerReader(url)


@pytest.mark.parametrize("bad", ["sqlite:////proc/no/such/ledger.db", "nonsense", "oracle://u:secret@h/x"])
def test_a_database_that_cannot_be_opened(bad: str) -> None:
    with pytest.raises(LedgerError) as caught:
        LedgerWriter(bad, lambda ticket: None)
    assert "secret" not in str(caught.value)


def test_the_queue_is_bounded(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    tickets: list[int] = []
    writer = LedgerWriter(f"sqlite:///{path}", tickets.append, queue_max=10)
    with sqlite3.connect(path) as blocker:
        blocker.execute("BEGIN IMMEDIATE")
        for number in range(5):
            writer.put(rows=[row(number)], audit=[entry(number)])
        with pytest.raises(LedgerError, match="behind"):
            writer.put(rows=[row(9)])
        blocker.rollback()
    blocker.close()
    wait(lambda: tickets[-1:] == [5])
    writer.put(rows=[row(9)])
    writer.close()
    with pytest.raises(LedgerError, match="closed"):
        writer.put(rows=[row(10)])


def test_a_failing_database_makes_it_unhealthy_until_it_recovers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_module, "TRIES_HEALTHY", 2)
    tickets: list[int] = []
    url = f"sqlite:///{tmp_path / 'ledger.db'}"
    writer = LedgerWriter(url, tickets.append)
    sql, writer._sql["ledger"] = writer._sql["ledger"], "INSERT INTO no_such_table VALUES (?)"
    writer.put(rows=[row(1)], audit=[entry(1)])
    wait(lambda: not writer.healthy)
    with pytest.raises(LedgerError, match="cannot be written"):
        writer.put(rows=[row(2)])
    writer._sql["ledger"] = sql
    wait(lambda: writer.healthy)
    writer.put(rows=[row(2)], audit=[entry(2)])
    writer.close()
    reader = LedgerReader(url)
    assert tickets[-1] == 2
    assert reader.row("req_00000001") == row(1)
    assert reader.verify().rows == 2
    reader.close()


def test_closing_over_a_locked_database_says_what_is_lost(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    writer = LedgerWriter(f"sqlite:///{path}", lambda ticket: None)
    with sqlite3.connect(path) as blocker:
        blocker.execute("BEGIN IMMEDIATE")
        writer.put(rows=[row(1)])
        with pytest.raises(LedgerError, match="1 rows"):
            writer.close(timeout_s=0.2)
        blocker.rollback()
    blocker.close()
    writer._thread.join(WAIT_S)


KILLED = """
import sys, time
sys.path[:0] = ["platform", "replicas", "tests/unit"]
import test_ledger as t
from rungway.ledger import LedgerWriter

writer = LedgerWriter(sys.argv[1], lambda ticket: print(ticket, flush=True))
number = 0
while True:
    while writer.waiting > 500:
        time.sleep(0.001)
    number += 1
    assert writer.put(rows=[t.row(number)], audit=[t.entry(number)], attempts=[t.attempt(number)]) == number
"""


def test_kill_9_keeps_every_acknowledged_ticket_and_a_whole_chain(url: str) -> None:
    for _ in range(2):
        process = subprocess.Popen([sys.executable, "-c", KILLED, url], stdout=subprocess.PIPE, text=True, cwd=ROOT)
        assert process.stdout is not None
        try:
            acknowledged = [int(process.stdout.readline()) for _ in range(8)]
        finally:
            process.kill()
        acknowledged += [int(line) for line in process.stdout.read().split("\n")[:-1]]
        process.wait()
        process.stdout.close()
        reader = LedgerReader(url)
        verified = reader.verify()
        assert verified.ok, verified.message
        assert verified.rows >= acknowledged[-1]
        assert all(reader.row(f"req_{number:08d}") == row(number) for number in range(1, acknowledged[-1] + 1, 37))
        assert reader.row(f"req_{acknowledged[-1]:08d}") is not None
        assert reader.reconcile(0)["ok"]
        reader.close()
