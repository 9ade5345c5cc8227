"""The audit's hash chain: every row's hash covers its fields, its number and the hash before it.

    hash(n) = SHA-256( canonical JSON of {detail, kind, prev_hash, request_id, rung, seq, tenant, wall_ns} )

Canonical JSON: keys sorted, no whitespace, UTF-8 with only the escapes that JSON demands. Anyone can recompute it with
`json.dumps(..., sort_keys=True, separators=(",", ":"), ensure_ascii=False)`. Editing, deleting, inserting or moving a
row breaks every hash from there on. Rows cut from the end leave a valid shorter chain: note the head outside the
database (`VerifyResult.head`) and pass it to `verify` later to notice that, too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from rungway.types import AuditEntry

GENESIS = "0" * 64

_encode = msgspec.json.Encoder(order="sorted").encode

AuditRow = tuple[int, int, str, str, str, int, str, str, str]  # columns of the table, in their order


@dataclass(frozen=True)
class Head:
    """The last row of a chain; `Head(0, GENESIS)` of an empty one."""

    seq: int = 0
    hash: str = GENESIS


@dataclass(frozen=True)
class VerifyResult:
    """`first_bad_seq` is the first number at which the chain does not hold; None if it holds. `head` is where the
    sound part ends."""

    ok: bool
    rows: int
    first_bad_seq: int | None
    message: str
    head: Head


def row_hash(
    seq: int, wall_ns: int, kind: str, tenant: str, request_id: str, rung: int, detail: str, prev_hash: str
) -> str:
    """Hex SHA-256 of one row, as the module's head defines it."""
    fields = {
        "detail": detail,
        "kind": kind,
        "prev_hash": prev_hash,
        "request_id": request_id,
        "rung": rung,
        "seq": seq,
        "tenant": tenant,
        "wall_ns": wall_ns,
    }
    return hashlib.sha256(_encode(fields)).hexdigest()


def extend(head: Head, entries: Iterable[AuditEntry]) -> tuple[list[AuditRow], Head]:
    """Rows that continue the chain from `head`, and the new head."""
    seq, prev_hash = head.seq, head.hash
    rows: list[AuditRow] = []
    for entry in entries:
        seq += 1
        plain = (entry.wall_ns, str(entry.kind), entry.tenant, entry.request_id, entry.rung, entry.detail)
        digest = row_hash(seq, *plain, prev_hash)
        rows.append((seq, *plain, prev_hash, digest))
        prev_hash = digest
    return rows, Head(seq, prev_hash)


def check(head: Head, rows: Iterable[AuditRow]) -> tuple[Head, tuple[int, str] | None]:
    """Walk rows that should continue `head`; the head reached, and (number, what is wrong) at the first fault."""
    for row in rows:
        seq, prev_hash, stored = row[0], row[7], row[8]
        if seq != head.seq + 1:
            return head, (head.seq + 1, f"row {head.seq + 1} is missing; the next one is {seq}")
        if prev_hash != head.hash:
            return head, (seq, f"row {seq} does not continue the row before it")
        if row_hash(*row[:8]) != stored:
            return head, (seq, f"row {seq} was changed: its content does not match its hash")
        head = Head(seq, stored)
    return head, None
