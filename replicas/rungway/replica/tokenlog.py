"""The engine's token log: what every open attempt has emitted, in a file that survives `kill -9`.

A replica maps one file of fixed slots and writes each attempt's counters into it on every engine step: memory writes, no
system call. The pages belong to the kernel, so a killed process leaves them exact to its last step. Each slot also
carries who pays (the `Billing`, as JSON), so a table can be read without its writer. (One table instead of a table and a
log of lines: slots are reused, so the file never grows, and identity and counters cannot disagree.)

Ownership is an exclusive `flock` held on the file as long as its process lives; the kernel drops it at death, so pid
reuse cannot fool anyone and two starting replicas cannot both adopt one table. The pid in the header is for people.

Slots go free -> open -> ended -> free; a slot is freed when the controller has acknowledged the attempt's end.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import re
import socket
import struct
from pathlib import Path
from typing import NamedTuple

import msgspec

from rungway.types import AttemptEnd, Billing, Usage

_MAGIC = b"RWTOKLG2"
_HEADER = struct.Struct("<8sIIq64s128s")  # magic, slots, slot bytes, pid, host, replica id
_HEADER_BYTES = 4096
# state, finish, attempt, prompt, cached, emitted, started wall ns, ended wall ns, id bytes, billing bytes
_SLOT = struct.Struct("<BBIIIIqqHH")
_COUNTERS = struct.Struct("<III")
_COUNTERS_AT = 6  # offset of prompt, cached, emitted in a packed slot
_SLOT_BYTES = 1536
_ID_BYTES_MAX = 192
_BILLING_BYTES_MAX = _SLOT_BYTES - _SLOT.size - _ID_BYTES_MAX
_FREE, _OPEN, _ENDED = 0, 1, 2
FINISHES = ("lost", "stop", "length", "cancelled", "error")
SLOTS_DEFAULT = 8192

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Billing).decode


class TokenLogError(Exception):
    """The table is full, an entry does not fit its slot, or the file cannot be made."""


class Entry(NamedTuple):
    """One slot as read back. `finish` is "lost" for an attempt that was open when its process died."""

    slot: int
    end: AttemptEnd


class TokenLog:
    """A mapped table. `create` makes this replica's own, `adopt` takes those of dead ones; both hold the file's lock
    until `close` or `remove`."""

    def __init__(self, path: Path, descriptor: int, slots: int) -> None:
        self.path = path
        self._descriptor = descriptor
        self._map = mmap.mmap(descriptor, _HEADER_BYTES + slots * _SLOT_BYTES)
        self._free = list(range(slots - 1, -1, -1))

    @classmethod
    def create(cls, folder: Path, replica_id: str, slots: int = SLOTS_DEFAULT) -> TokenLog:
        """A new, empty table `folder/<replica_id>.table` (numbered where that name is taken). Disk space is reserved
        now, because a full disk would otherwise kill the process in the middle of a step. Raises TokenLogError."""
        folder.mkdir(parents=True, exist_ok=True)
        stem = re.sub(r"[^A-Za-z0-9._-]", "_", replica_id)
        making = folder / f".{stem}.{os.getpid()}.{id(replica_id):x}"
        descriptor = os.open(making, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            header = _HEADER.pack(
                _MAGIC, slots, _SLOT_BYTES, os.getpid(), socket.gethostname().encode()[:64], replica_id.encode()[:128]
            )
            os.pwrite(descriptor, header, 0)
            _reserve(descriptor, _HEADER_BYTES + slots * _SLOT_BYTES)
            path = _publish(making, folder, stem)
            return cls(path, descriptor, slots)
        except OSError as error:
            os.close(descriptor)
            raise TokenLogError(f"cannot make a token log in {folder}: {error}") from error
        finally:
            making.unlink(missing_ok=True)

    @property
    def room(self) -> int:
        """Free slots."""
        return len(self._free)

    def open(self, request_id: str, attempt: int, billing: Billing, started_wall_ns: int) -> int:
        """Take a slot for an attempt; returns its number. Raises TokenLogError where it does not fit."""
        name, payer = request_id.encode(), _encode(billing)
        if not self._free:
            raise TokenLogError("the token log is full")
        if len(name) > _ID_BYTES_MAX or len(payer) > _BILLING_BYTES_MAX:
            raise TokenLogError(f"{len(name)} bytes of request id, {len(payer)} of billing: too long for a slot")
        slot = self._free.pop()
        at = self._at(slot)
        body = at + _SLOT.size
        self._map[body : body + len(name)] = name
        self._map[body + len(name) : body + len(name) + len(payer)] = payer
        _SLOT.pack_into(self._map, at, _FREE, 0, attempt, 0, 0, 0, started_wall_ns, 0, len(name), len(payer))
        self._map[at] = _OPEN  # last: a process killed before this line has not begun the attempt
        return slot

    def count(self, slot: int, prompt: int, cached: int, emitted: int) -> None:
        """Set an attempt's counters (tokens)."""
        _COUNTERS.pack_into(self._map, _HEADER_BYTES + slot * _SLOT_BYTES + _COUNTERS_AT, prompt, cached, emitted)

    def end(self, slot: int, end: AttemptEnd) -> None:
        """The attempt is over; the slot stays taken until `free`."""
        self.count(slot, end.usage.prompt_tokens, end.usage.cached_tokens, end.usage.output_tokens)
        at = self._at(slot)
        struct.pack_into("<q", self._map, at + 26, end.ended_wall_ns)
        self._map[at + 1] = FINISHES.index(end.finish)
        self._map[at] = _ENDED

    def free(self, slot: int) -> None:
        """Acknowledged: the slot may be used again."""
        self._map[self._at(slot)] = _FREE
        self._free.append(slot)

    def entries(self, now_wall_ns: int) -> list[Entry]:
        """Every slot that is not free, as the end to report. Open ones end now, "lost"."""
        size, replica_id = self._header()
        found = []
        for slot in range(size):
            at = self._at(slot)
            if self._map[at] == _FREE:
                continue
            state, finish, attempt, prompt, cached, emitted, started, ended, name_bytes, payer_bytes = (
                _SLOT.unpack_from(self._map, at)
            )
            body = at + _SLOT.size
            end = AttemptEnd(
                request_id=self._map[body : body + name_bytes].decode(),
                attempt=attempt,
                replica_id=replica_id,
                usage=Usage(prompt_tokens=prompt, cached_tokens=cached, output_tokens=emitted),
                finish=FINISHES[finish] if state == _ENDED else "lost",
                billing=_decode(self._map[body + name_bytes : body + name_bytes + payer_bytes]),
                started_wall_ns=started,
                ended_wall_ns=ended if state == _ENDED else now_wall_ns,
            )
            found.append(Entry(slot, end))
        return found

    def close(self) -> None:
        """Unmap and unlock; the file stays for whoever starts next."""
        self._map.close()
        os.close(self._descriptor)

    def remove(self) -> None:
        """Everything in it is acknowledged: delete the file, then unlock."""
        self.path.unlink(missing_ok=True)
        self.close()

    def _header(self) -> tuple[int, str]:
        _, slots, _, _, _, replica_id = _HEADER.unpack_from(self._map, 0)
        return slots, replica_id.rstrip(b"\0").decode()

    @staticmethod
    def _at(slot: int) -> int:
        return _HEADER_BYTES + slot * _SLOT_BYTES


def adopt(folder: Path) -> list[TokenLog]:
    """Tables in `folder` whose process on this host is dead, now locked by the caller. Files that are not tables, or of
    another layout, are left alone."""
    adopted = []
    for path in sorted(folder.glob("*.table")):
        try:
            descriptor = os.open(path, os.O_RDWR)
        except FileNotFoundError:
            continue
        slots = _claim(path, descriptor)
        if slots is None:
            os.close(descriptor)
        else:
            adopted.append(TokenLog(path, descriptor, slots))
    return adopted


def _claim(path: Path, descriptor: int) -> int | None:
    """Lock a table; its number of slots, or None where it is alive, elsewhere, gone meanwhile, or no table."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.stat(path).st_ino != os.fstat(descriptor).st_ino:
            return None
    except (BlockingIOError, FileNotFoundError):
        return None
    raw = os.pread(descriptor, _HEADER.size, 0)
    if len(raw) < _HEADER.size:
        return None
    magic, slots, slot_bytes, _, host, _ = _HEADER.unpack(raw)
    here = socket.gethostname().encode()[:64]
    if magic != _MAGIC or slot_bytes != _SLOT_BYTES or host.rstrip(b"\0") != here:
        return None
    whole = os.fstat(descriptor).st_size >= _HEADER_BYTES + slots * _SLOT_BYTES
    return int(slots) if whole else None


def _reserve(descriptor: int, size: int) -> None:
    """Have the whole file's blocks on disk. Raises OSError where there is no room."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, size)
        return
    for at in range(_HEADER_BYTES, size, _HEADER_BYTES):  # no such call on macOS: write the zeros
        os.pwrite(descriptor, bytes(min(_HEADER_BYTES, size - at)), at)


def _publish(making: Path, folder: Path, stem: str) -> Path:
    """Give the locked, complete file its name; names in use (by the living or by orphans) are passed over."""
    for number in range(1000):
        path = folder / (f"{stem}.table" if number == 0 else f"{stem}.{number}.table")
        try:
            os.link(making, path)
        except FileExistsError:
            continue
        return path
    raise TokenLogError(f"a thousand token logs named {stem} lie in {folder}")
