"""The side that is connected to: one ROUTER socket, one session per client."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
import zmq

from rungway.channel.curve import CurveKeys
from rungway.channel.frames import HEADER_BYTES, Kind, pack, unpack
from rungway.channel.port import Inbox, Port
from rungway.channel.session import Session
from rungway.clock import NS_PER_MS, monotonic_ns
from rungway.contracts import ChannelSpec
from rungway.errors import ChannelError

if TYPE_CHECKING:
    from rungway.messages import Message

PEERS_MAX = 4096
CLOSED_MAX = 1024  # ended sessions remembered, so that a frame delayed past the end cannot bring one back
NAME_BYTES_MAX = 256
FLUSH_WAIT_MS_MAX = 1000.0

_encode = msgspec.msgpack.Encoder().encode


class Server:
    """Listens on a free port of `host`. A peer is known from its first message on, under the name that its client
    gave; the same name again is a new life of it, and the old one is reported lost first.

    Callbacks run on the loop: `on_message(peer, message)` in order per peer, `on_lost(peer)` once per life,
    `on_batch()` after the messages of one turn. `send` raises ChannelError if the peer is unknown, or has read so
    slowly that `spec.buffer_bytes_max` is reached (it is dropped then). `bad_frames` counts what was thrown away.
    """

    def __init__(
        self,
        host: str,
        spec: ChannelSpec,
        accept: Any,
        on_message: Callable[[str, Message], None],
        on_lost: Callable[[str], None],
        on_batch: Callable[[], None] | None = None,
        *,
        curve: CurveKeys | None = None,
    ) -> None:
        self.address = ""
        self.bad_frames = 0
        self._host = host
        self._spec = spec
        self._decode = msgspec.msgpack.Decoder(list[accept]).decode
        self._on_message = on_message
        self._on_lost = on_lost
        self._on_batch = on_batch
        self._curve = curve
        self._sessions: dict[int, Session] = {}
        self._peers: dict[str, Session] = {}
        self._closed: dict[int, None] = {}
        self._touched: set[Session] = set()
        self._dirty: set[Session] = set()
        self._running = False
        self._tick_timer: asyncio.TimerHandle | None = None

    async def start(self) -> None:
        """Bind. Raises ChannelError if the host cannot be bound."""
        self._loop = asyncio.get_running_loop()
        self._inbox = Inbox(self._on_batch)
        self._port = Port(zmq.ROUTER, self._spec, self._curve, self._on_frame, self._on_turn)
        try:
            found = await self._loop.getaddrinfo(self._host, None, family=socket.AF_INET)  # zmq binds numbers only
            self._port.socket.bind(f"tcp://{found[0][4][0]}:*")
        except (zmq.ZMQError, OSError) as error:
            self._port.close()
            raise ChannelError(f"cannot listen on {self._host}: {error}") from error
        self.address = self._port.socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._running = True
        self._beat_s = self._spec.heartbeat_ms / 1000
        self._tick_timer = self._loop.call_later(self._beat_s, self._tick)

    def peers(self) -> list[str]:
        """Names of the clients that have spoken and are not lost."""
        return list(self._peers)

    def send(self, peer: str, message: Message) -> None:
        """Queue one message; what one loop turn queues for a peer leaves as one frame."""
        session = self._peers.get(peer)
        if session is None:
            raise ChannelError(f"peer {peer} is not connected")
        if not session.push(_encode(message)):
            self._drop(session)
            self._port.recheck()
            raise ChannelError(f"peer {peer} reads too slowly: {session.buffered_bytes} bytes waited for it")
        if not self._dirty:
            self._loop.call_soon(self._flush)
        self._dirty.add(session)

    async def stop(self) -> None:
        """Send what is pending (bounded wait for its acknowledgement), tell the peers, close."""
        if not self._running:
            return
        self._running = False
        deadline = monotonic_ns() + int(min(self._spec.lost_after_ms, FLUSH_WAIT_MS_MAX) * NS_PER_MS)
        for session in self._peers.values():
            if not session.idle:
                self._transmit(session, monotonic_ns())
                self._port.send(session.route, session.ping())
        while any(not session.idle for session in self._peers.values()) and monotonic_ns() < deadline:
            self._port.recheck()
            await asyncio.sleep(0.005)
        for session in list(self._sessions.values()):
            self._port.send(session.route, session.close())
        if self._tick_timer is not None:
            self._tick_timer.cancel()
        self._inbox.close()
        self._port.close()
        self._sessions.clear()
        self._peers.clear()

    def _on_frame(self, route: bytes, frame: bytes, now_ns: int) -> None:
        header = unpack(frame)
        if header is None:
            self.bad_frames += 1
            return
        kind, session_id, seq, ack = header
        session = self._sessions.get(session_id)
        if session is None:
            self._on_unknown(route, kind, session_id, frame, now_ns)
            return
        session.route = route
        if kind == Kind.CLOSE:
            self._drop(session, tell=False)
            return
        if kind == Kind.OPEN:
            self._port.send(route, pack(Kind.OPENED, session_id, 0, 0))
        elif session.accept(kind, seq, ack, len(frame), now_ns):
            self._take(session, frame)
        self._touched.add(session)

    def _on_unknown(self, route: bytes, kind: int, session_id: int, frame: bytes, now_ns: int) -> None:
        """A frame of no session: a request for one, or a client that must learn that its session is gone."""
        if kind == Kind.CLOSE:
            return
        name = frame[HEADER_BYTES : HEADER_BYTES + NAME_BYTES_MAX].decode(errors="replace")
        if kind == Kind.OPEN and name and session_id not in self._closed and len(self._sessions) < PEERS_MAX:
            session = Session(session_id, self._spec, now_ns)
            session.name, session.route = name, route
            self._sessions[session_id] = session
            self._port.send(route, pack(Kind.OPENED, session_id, 0, 0))
        else:
            self._port.send(route, pack(Kind.CLOSE, session_id, 0, 0))

    def _take(self, session: Session, frame: bytes) -> None:
        try:
            batch: list[Message] = self._decode(memoryview(frame)[HEADER_BYTES:])
        except msgspec.MsgspecError:
            self.bad_frames += 1  # its number counts as delivered: sending it again would not make it better
            return
        known = self._peers.get(session.name)
        if known is not session:
            if known is not None:
                self._drop(known)
            self._peers[session.name] = session
        self._inbox.messages(partial(self._on_message, session.name), batch)

    def _on_turn(self, now_ns: int) -> None:
        touched = self._touched
        while touched:
            self._transmit(touched.pop(), now_ns)
        self._inbox.deliver()

    def _flush(self) -> None:
        dirty, self._dirty = self._dirty, set()
        now_ns = monotonic_ns()
        for session in dirty:
            self._transmit(session, now_ns)

    def _transmit(self, session: Session, now_ns: int) -> None:
        if session.closed or self._port.closed:
            return
        sent = False
        for frame in session.outgoing(now_ns):
            sent = True
            if not self._port.send(session.route, frame):
                session.route_down(now_ns)
                break
        if sent:
            self._port.recheck()

    def _tick(self) -> None:
        """Once per heartbeat: read first (this loop may have slept), then beat, then judge who is lost."""
        self._tick_timer = self._loop.call_later(self._beat_s, self._tick)
        drained = self._port.drain()
        now_ns = monotonic_ns()
        for session in list(self._sessions.values()):
            if drained and session.lost(now_ns):
                self._drop(session)
                continue
            frame = session.beat(now_ns)
            if frame is not None and not self._port.send(session.route, frame):
                session.route_down(now_ns)
        self._port.recheck()

    def _drop(self, session: Session, *, tell: bool = True) -> None:
        """End a session; report the peer lost if it was known under this one."""
        if session.closed:
            return
        session.closed = True
        del self._sessions[session.id]
        self._closed[session.id] = None
        if len(self._closed) > CLOSED_MAX:
            del self._closed[next(iter(self._closed))]
        if tell:
            self._port.send(session.route, session.close())
        if self._peers.get(session.name) is session:
            del self._peers[session.name]
            self._inbox.call(partial(self._on_lost, session.name))
