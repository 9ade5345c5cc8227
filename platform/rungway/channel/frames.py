"""The frame: what one zmq message holds, and the only place that packs or reads its header.

    magic(3) kind(1) session(8) seq(8) ack(8) body      little endian

`session` names one life of one connection; `seq` numbers DATA frames from 1 and is, in every other kind, the highest
number assigned so far (so that a heartbeat reveals a lost tail); `ack` is the highest number delivered in order.
The body of DATA is a msgpack array of messages; of OPEN, the client's name; of everything else, nothing.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple

MAGIC = b"RW\x01"
_HEADER = struct.Struct("<3sBQQQ")
HEADER_BYTES = _HEADER.size
_pack = _HEADER.pack
_unpack = _HEADER.unpack_from


class Kind(IntEnum):
    """OPEN asks for a session, OPENED grants it. BEAT says "alive" and carries an ack; PING wants a BEAT at once;
    NAK asks for everything after `ack` again; CLOSE ends the session, or says that it is not known here."""

    OPEN = 1
    OPENED = 2
    DATA = 3
    BEAT = 4
    PING = 5
    NAK = 6
    CLOSE = 7


KINDS = frozenset(int(kind) for kind in Kind)


class Header(NamedTuple):
    kind: int
    session: int
    seq: int
    ack: int


def pack(kind: int, session: int, seq: int, ack: int, body: bytes = b"") -> bytes:
    """One frame, ready for the socket."""
    return _pack(MAGIC, kind, session, seq, ack) + body


def unpack(frame: bytes) -> Header | None:
    """The header, or None if this is not a frame of ours."""
    if len(frame) < HEADER_BYTES:
        return None
    magic, kind, session, seq, ack = _unpack(frame)
    if magic != MAGIC or kind not in KINDS:
        return None
    return Header(kind, session, seq, ack)


def array_of(parts: list[bytes]) -> bytes:
    """A msgpack array of elements that are already encoded (header as in the msgpack specification)."""
    count = len(parts)
    if count < 16:
        head = bytes((0x90 | count,))
    elif count < 65536:
        head = b"\xdc" + count.to_bytes(2, "big")
    else:
        head = b"\xdd" + count.to_bytes(4, "big")
    return head + b"".join(parts)
