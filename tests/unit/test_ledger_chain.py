"""The audit chain: stable hashes, and every kind of tampering found at its place."""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rungway.ledger import Head, LedgerReader, LedgerWriter
from rungway.ledger.chain import GENESIS, extend, row_hash
from rungway.types import AuditEntry

TEXT = st.text(st.characters(exclude_categories=["Cs"]))


def entry(number: int) -> AuditEntry:
    return AuditEntry(
        wall_ns=1_700_000_000_000_000_000 + number,
        kind="downgrade",
        tenant="acme",
        request_id=f"req_{number}",
        rung=4,
        detail=f'{{"n":{number}}}',
    )


def test_the_hash_of_a_known_row_never_changes() -> None:
    rows, head = extend(Head(), [entry(1), entry(2)])
    assert rows[0][7] == GENESIS
    assert [row[8] for row in rows] == [
        "d083b657541c6bc463ee34f307e3872918fa1f81b8236899cf107cdeb9550d12",
        "5b68bb1c53f224e7b746a7eb0a9843fbd5674b1af1949e5e2da68c39df9a74a7",
    ]
    assert head == Head(2, rows[1][8])


@given(st.integers(1, 1 << 62), st.integers(0, 1 << 62), TEXT, TEXT, TEXT, st.integers(0, 9), TEXT)
def test_anyone_can_recompute_a_hash_with_plain_json(
    seq: int, wall_ns: int, kind: str, tenant: str, request_id: str, rung: int, detail: str
) -> None:
    fields = {
        "seq": seq,
        "wall_ns": wall_ns,
        "kind": kind,
        "tenant": tenant,
        "request_id": request_id,
        "rung": rung,
        "detail": detail,
        "prev_hash": GENESIS,
    }
    plain = json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    expected = hashlib.sha256(plain.encode()).hexdigest()
    assert row_hash(seq, wall_ns, kind, tenant, request_id, rung, detail, GENESIS) == expected


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "ledger.db"
    writer = LedgerWriter(f"sqlite:///{path}", lambda ticket: None)
    for number in range(1, 11):
        writer.put(audit=[entry(number)])
    writer.close()
    return path


def _forge(database: sqlite3.Connection) -> None:
    """Change row 5 and give it a hash that fits its new content: the next row gives it away."""
    found = database.execute("SELECT wall_ns, kind, request_id, detail, prev_hash FROM audit WHERE seq = 5").fetchone()
    wall_ns, kind, request_id, detail, prev_hash = found
    digest = row_hash(5, wall_ns, kind, "globex", request_id, 4, detail, prev_hash)
    database.execute("UPDATE audit SET tenant = 'globex', hash = ? WHERE seq = 5", (digest,))


def _swap(database: sqlite3.Connection) -> None:
    database.execute("UPDATE audit SET seq = 100 WHERE seq = 4")
    database.execute("UPDATE audit SET seq = 4 WHERE seq = 5")
    database.execute("UPDATE audit SET seq = 5 WHERE seq = 100")


@pytest.mark.parametrize(
    ("tamper", "first_bad"),
    [
        (lambda db: db.execute("UPDATE audit SET detail = '{}' WHERE seq = 5"), 5),
        (lambda db: db.execute("UPDATE audit SET rung = 0 WHERE seq = 1"), 1),
        (lambda db: db.execute("UPDATE audit SET wall_ns = wall_ns + 1 WHERE seq = 10"), 10),
        (lambda db: db.execute("UPDATE audit SET hash = 'x' WHERE seq = 7"), 7),
        (lambda db: db.execute("DELETE FROM audit WHERE seq = 5"), 5),
        (lambda db: db.execute("DELETE FROM audit WHERE seq = 1"), 1),
        (lambda db: db.execute("DELETE FROM audit WHERE seq BETWEEN 3 AND 8"), 3),
        (_forge, 6),
        (_swap, 4),
    ],
)
def test_tampering_is_found_at_its_place(
    path: Path, tamper: Callable[[sqlite3.Connection], object], first_bad: int
) -> None:
    reader = LedgerReader(f"sqlite:///{path}")
    assert reader.verify().ok
    with sqlite3.connect(path) as database:
        tamper(database)
    database.close()
    result = reader.verify()
    assert not result.ok
    assert result.first_bad_seq == first_bad
    assert str(first_bad) in result.message
    reader.close()


def test_rows_cut_from_the_end_are_found_by_a_head_noted_before(path: Path) -> None:
    reader = LedgerReader(f"sqlite:///{path}")
    noted = reader.verify().head
    assert noted.seq == 10
    with sqlite3.connect(path) as database:
        database.execute("DELETE FROM audit WHERE seq > 8")
    database.close()
    assert reader.verify().ok
    result = reader.verify(anchor=noted)
    assert not result.ok
    assert result.first_bad_seq == 9
    reader.close()


def test_verify_walks_in_pages_and_reports_progress(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rungway.ledger.reader.VERIFY_PAGE", 3)
    reader = LedgerReader(f"sqlite:///{path}")
    seen: list[int] = []
    assert reader.verify(seen.append).rows == 10
    assert seen == [3, 6, 9, 10]
    reader.close()


def test_an_empty_chain_holds(tmp_path: Path) -> None:
    reader = LedgerReader(f"sqlite:///{tmp_path / 'new' / 'ledger.db'}")
    result = reader.verify(anchor=Head())
    assert (result.ok, result.rows, result.head) == (True, 0, Head(0, GENESIS))
    reader.close()
