"""The side that connects: one DEALER socket at a time, one session on it, forever anew."""

from __future__ import annotations

import asyncio
import os
import warnings
import weakref
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import msgspec
import zmq

from rungway.channel.curve import CurveKeys
from rungway.channel.frames import HEADER_BYTES, Kind, pack, unpack
from rungway.channel.port import Inbox, Port, option_reader
from rungway.channel.session import Session
from rungway.clock import NS_PER_MS, monotonic_ns
from rungway.contracts import ChannelSpec
from rungway.errors import ChannelError

if TYPE_CHECKING:
    from rungway.messages import Message

BACKOFF_S_MIN = 0.02
BACKOFF_S_MAX = 1.0
OPEN_BEATS_MAX = 4  # heartbeats to wait for a session before asking for the address again
FLUSH_WAIT_MS_MAX = 1000.0

_encode = msgspec.msgpack.Encoder().encode
_EVENTS = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED


class Client:
    """Connects to the address that `resolve` gives and keeps doing so: after every loss `resolve` is awaited again,
    with a delay that doubles from 20 ms to 1 s. An error of `resolve` is a failed try, kept in `last_error`.

    Callbacks run on the loop: `on_up()` at every new session, `on_message(message)` in order, `on_lost()` once per
    session that was up, `on_batch()` after the messages of one turn. Nothing sent in an old session is carried over.
    """

    def __init__(
        self,
        name: str,
        resolve: Callable[[], Awaitable[str]],
        spec: ChannelSpec,
        accept: Any,
        on_message: Callable[[Message], None],
        on_up: Callable[[], None],
        on_lost: Callable[[], None],
        on_batch: Callable[[], None] | None = None,
        *,
        curve: CurveKeys | None = None,
    ) -> None:
        self.connected = False
        self.bad_frames = 0
        self.last_error: BaseException | None = None
        self._name = name
        self._resolve = resolve
        self._spec = spec
        self._decode = msgspec.msgpack.Decoder(list[accept]).decode
        self._on_message = on_message
        self._on_up = on_up
        self._on_lost = on_lost
        self._on_batch = on_batch
        self._curve = curve
        self._session: Session | None = None
        self._port: Port | None = None
        self._monitor: zmq.Socket[bytes] | None = None
        self._task: asyncio.Task[None] | None = None
        self._flush_due = False
        self._answered = False

    async def start(self) -> None:
        """Start connecting; does not wait for the first session."""
        self._loop = asyncio.get_running_loop()
        self._inbox = Inbox(self._on_batch)
        self._ended = asyncio.Event()
        self._beat_s = self._spec.heartbeat_ms / 1000
        self._task = self._loop.create_task(self._run(), name=f"channel-{self._name}")

    def send(self, message: Message) -> None:
        """Queue one message. Raises ChannelError when not connected, or when the server has read so slowly that
        `spec.buffer_bytes_max` is reached (the session is dropped then)."""
        session = self._session
        if session is None or not self.connected:
            raise ChannelError(f"{self._name} is not connected")
        if not session.push(_encode(message)):
            self._lose(session)
            raise ChannelError(f"the server reads too slowly: {session.buffered_bytes} bytes waited for it")
        if not self._flush_due:
            self._flush_due = True
            self._loop.call_soon(self._flush)

    async def stop(self) -> None:
        """Send what is pending (bounded wait for its acknowledgement), tell the server, close."""
        task, self._task = self._task, None
        if task is None:
            return
        session, port = self._session, self._port
        if session is not None and port is not None and self.connected:
            deadline = monotonic_ns() + int(min(self._spec.lost_after_ms, FLUSH_WAIT_MS_MAX) * NS_PER_MS)
            self._flush()
            if not session.idle:
                port.send(b"", session.ping())
            while not session.idle and not session.closed and monotonic_ns() < deadline:
                port.recheck()
                await asyncio.sleep(0.005)
        task.cancel()
        await asyncio.wait({task})
        self._inbox.close()
        self._hang_up()

    async def _run(self) -> None:
        delay_s = BACKOFF_S_MIN
        while True:
            address = await self._address()
            if address is not None and await self._open(address):
                delay_s = BACKOFF_S_MIN
                await self._keep()
            self._hang_up()
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, BACKOFF_S_MAX)

    async def _address(self) -> str | None:
        """The server's address now. Whatever `resolve` raises is its owner's operating error: noted, and tried again."""
        task = asyncio.ensure_future(self._resolve())
        task.add_done_callback(_retrieved)  # also of one that fails while `stop` is at work
        try:
            await asyncio.wait({task}, timeout=self._spec.lost_after_ms / 1000)
        finally:
            if not task.done():
                task.cancel()
        if not task.done() or task.cancelled():
            self.last_error = TimeoutError("resolve took too long")
            return None
        self.last_error = task.exception()
        return None if self.last_error is not None else task.result()

    async def _open(self, address: str) -> bool:
        """Connect and ask for a session; True once the server has answered."""
        self._ended.clear()
        self._answered = False
        session_id = int.from_bytes(os.urandom(8), "little")
        session = self._session = Session(session_id, self._spec, monotonic_ns())
        try:
            port = self._port = Port(zmq.DEALER, self._spec, self._curve, self._on_frame, self._on_turn)
            self._watch(port)
            port.socket.connect(address)
        except zmq.ZMQError as error:
            self.last_error = error
            return False
        for _ in range(OPEN_BEATS_MAX):
            port.send(b"", pack(Kind.OPEN, session.id, 0, 0, self._name.encode()))
            port.recheck()
            if await self._wait(self._beat_s):
                break
        return self._answered and not session.closed

    async def _keep(self) -> None:
        """Beat until the session ends."""
        while (session := self._session) is not None and (port := self._port) is not None:
            if await self._wait(self._beat_s) and session.closed:
                return
            drained = port.drain()
            now_ns = monotonic_ns()
            if session.closed or (drained and session.lost(now_ns)):
                self._lose(session)
                return
            frame = session.beat(now_ns)
            if frame is not None:
                port.send(b"", frame)
            port.recheck()

    async def _wait(self, seconds: float) -> bool:
        """Wait for news of the session (opened or ended), at most so long."""
        try:
            async with asyncio.timeout(seconds):  # not wait_for: in 3.11 it can swallow the cancellation of `stop`
                await self._ended.wait()
        except TimeoutError:
            return False
        self._ended.clear()
        return True

    def _watch(self, port: Port) -> None:
        """Have zmq tell of broken and refused connections: a dead process is noticed long before its silence is."""
        monitor = self._monitor = port.socket.get_monitor_socket(_EVENTS)
        self._abandoned = weakref.finalize(self, _abandon, self._name, port.socket, monitor)
        self._abandoned.atexit = False
        self._loop.add_reader(option_reader(monitor)(zmq.FD), self._on_transport)
        self._on_transport()  # a pipe signals only a reader that has found it empty before

    def _on_transport(self) -> None:
        monitor, session, port = self._monitor, self._session, self._port
        if monitor is None or session is None or port is None:
            return
        option = option_reader(monitor)
        while not monitor.closed and option(zmq.EVENTS) & zmq.POLLIN:
            event = int.from_bytes(monitor.recv_multipart(zmq.DONTWAIT)[0][:2], "little")
            if event == zmq.EVENT_DISCONNECTED:
                session.route_down(monotonic_ns())
                port.send(b"", session.ping())
                port.recheck()
            elif event == zmq.EVENT_CLOSED and (session.down_ns or not self._answered):
                port.drain()  # what arrived before the connection broke still counts
                self._lose(session)

    def _on_frame(self, route: bytes, frame: bytes, now_ns: int) -> None:
        header = unpack(frame)
        if header is None:
            self.bad_frames += 1
            return
        kind, session_id, seq, ack = header
        session = self._session
        if session is None or session_id != session.id or session.closed:
            return  # a late frame of an ended session
        if kind == Kind.CLOSE:
            self._lose(session)
            return
        if not self._answered:
            self._answered = True
            self.connected = True
            self._ended.set()
            self._inbox.call(self._on_up)
        if session.accept(kind, seq, ack, len(frame), now_ns):
            try:
                batch: list[Message] = self._decode(memoryview(frame)[HEADER_BYTES:])
            except msgspec.MsgspecError:
                self.bad_frames += 1  # its number counts as delivered: sending it again would not make it better
                return
            self._inbox.messages(self._on_message, batch)

    def _on_turn(self, now_ns: int) -> None:
        self._transmit(now_ns)
        self._inbox.deliver()

    def _flush(self) -> None:
        self._flush_due = False
        self._transmit(monotonic_ns())

    def _transmit(self, now_ns: int) -> None:
        session, port = self._session, self._port
        if session is None or port is None or session.closed or port.closed or not self.connected:
            return
        sent = False
        for frame in session.outgoing(now_ns):
            sent = True
            port.send(b"", frame)
        if sent:
            port.recheck()

    def _lose(self, session: Session) -> None:
        if session.closed:
            return
        session.closed = True
        self._ended.set()
        if self.connected:
            self.connected = False
            self._inbox.call(self._on_lost)

    def _hang_up(self) -> None:
        self.connected = False
        session, self._session = self._session, None
        monitor, self._monitor = self._monitor, None
        port, self._port = self._port, None
        if port is None:
            return
        if monitor is not None:
            self._abandoned.detach()
            self._loop.remove_reader(option_reader(monitor)(zmq.FD))
        _stop_watching(port.socket, monitor)
        if session is not None and not port.closed:
            port.send(b"", session.close())  # if the server still lives, it need not wait for our silence
        port.close()


def _retrieved(task: asyncio.Future[str]) -> None:
    """Mark a failure as seen, or the loop would log it as forgotten."""
    if not task.cancelled():
        task.exception()


def _stop_watching(socket: zmq.Socket[bytes], monitor: zmq.Socket[bytes] | None) -> None:
    """In this order: a socket that tells its events to a closed monitor blocks zmq's thread, and with it every channel of
    the process, for good."""
    socket.disable_monitor()
    if monitor is not None:
        monitor.close(linger=0)


def _abandon(name: str, socket: zmq.Socket[bytes], monitor: zmq.Socket[bytes]) -> None:
    """What the garbage collector does with a client that nobody stopped; left alone, it closes in any order."""
    _stop_watching(socket, monitor)
    socket.close(linger=0)
    warnings.warn(f"the channel of {name} was never stopped", ResourceWarning, stacklevel=1)
