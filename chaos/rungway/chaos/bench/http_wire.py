"""One keep-alive HTTP/1.1 connection as an asyncio protocol: send bytes, get an `Answer`, by callback.

The load client shares its cores with the servers under test, so nothing is parsed while an answer comes in but where
it ends; its text is looked at once it is complete. It understands Content-Length and chunked bodies, nothing more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

from rungway.clock import monotonic_ns

_END_OF_CHUNKS = b"\r\n0\r\n\r\n"
HEAD_BYTES_MAX = 65_536


class Answer:
    """What came back. Times are monotonic ns: `sent_ns` when the request was written, `first_ns` of the first byte of
    the body (0 = none came), `end_ns` when the last one was here. `gaps_ns` are the pauses between reads that brought
    body bytes. `broken`: why there is no whole answer, "" = there is one."""

    __slots__ = ("broken", "chunked", "end_ns", "first_ns", "gaps_ns", "head", "raw", "sent_ns", "status")

    def __init__(self, sent_ns: int) -> None:
        self.sent_ns = sent_ns
        self.first_ns = self.end_ns = 0
        self.gaps_ns: list[int] = []
        self.status = 0
        self.head = b""
        self.raw = b""
        self.chunked = False
        self.broken = ""

    def body(self) -> bytes:
        """The body without its chunk framing."""
        if not self.chunked:
            return self.raw
        parts: list[bytes] = []
        at, raw = 0, self.raw
        while True:
            line = raw.index(b"\r\n", at)
            size = int(raw[at:line].split(b";")[0], 16)
            if size == 0:
                return b"".join(parts)
            parts.append(raw[line + 2 : line + 2 + size])
            at = line + 4 + size


class Connection(asyncio.Protocol):
    """`on_answer(connection, answer)` is called for every request sent; the answer is `broken` where the connection
    ended before it. After that `open` says whether the connection can be used again."""

    __slots__ = ("_answer", "_body_at", "_buffer", "_last_ns", "_need", "_transport", "index", "on_answer", "tag")

    def __init__(self, index: int, on_answer: Callable[[Connection, Answer], None]) -> None:
        self.index = index
        self.tag: Any = None
        self.on_answer = on_answer
        self._transport: asyncio.Transport | None = None
        self._answer: Answer | None = None
        self._buffer = bytearray()
        self._body_at = self._need = -1
        self._last_ns = 0

    @property
    def open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    @property
    def busy(self) -> bool:
        return self._answer is not None

    def send(self, raw: bytes) -> None:
        """Write one request. Only on an open connection that is not busy."""
        assert self._transport is not None and self._answer is None, "a connection carries one request at a time"
        self._buffer.clear()
        self._body_at = self._need = -1
        self._answer = Answer(monotonic_ns())
        self._transport.write(raw)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self._answer is not None:
            self._finish("connection lost")

    def data_received(self, data: bytes) -> None:
        answer = self._answer
        if answer is None:
            return
        buffer = self._buffer
        buffer += data
        if self._body_at < 0 and not self._read_head(answer):
            return
        if len(buffer) > self._body_at:
            now_ns = monotonic_ns()
            if answer.first_ns:
                answer.gaps_ns.append(now_ns - self._last_ns)
            else:
                answer.first_ns = now_ns
            self._last_ns = now_ns
        if len(buffer) >= self._need if self._need >= 0 else self._chunks_ended():
            self._finish("")

    def _chunks_ended(self) -> bool:
        return self._buffer.endswith(_END_OF_CHUNKS) or self._buffer[self._body_at :] == _END_OF_CHUNKS[2:]

    def _read_head(self, answer: Answer) -> bool:
        """Find the end of the headers and how the body's end is told. False = not yet, or not understood."""
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            if len(self._buffer) > HEAD_BYTES_MAX:
                self._finish("endless headers")
            return False
        head = bytes(self._buffer[:end]).lower()
        self._body_at = end + 4
        answer.head = head
        answer.status = int(head[9:12])
        at = head.find(b"\r\ncontent-length:")
        if at >= 0:
            self._need = self._body_at + int(head[at + 17 :].split(b"\r\n", 1)[0])
        elif b"\r\ntransfer-encoding: chunked" in head:
            answer.chunked = True
        else:
            self._finish("neither content-length nor chunked")
            return False
        return True

    def _finish(self, broken: str) -> None:
        answer, self._answer = self._answer, None
        assert answer is not None
        answer.broken = broken
        answer.end_ns = monotonic_ns()
        if self._body_at >= 0:
            answer.raw = bytes(self._buffer[self._body_at :])
        if (broken or b"\r\nconnection: close" in answer.head) and self._transport is not None:
            self._transport.abort()
            self._transport = None
        self.on_answer(self, answer)
