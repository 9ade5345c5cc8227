"""One zmq socket on the running event loop: read without threads or tasks, deliver in order, gather what is sent.

zmq's file descriptor is edge-triggered: it signals changes, not state. So reading goes on until the socket has
nothing more, and after every send the socket's events are looked at again. `add_reader` costs a few microseconds a
wake-up, against roughly fifty for the future-based zmq.asyncio.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, cast

import zmq

from rungway.channel.curve import CurveKeys, context_of
from rungway.clock import monotonic_ns
from rungway.contracts import ChannelSpec

if TYPE_CHECKING:
    from rungway.messages import Message

FRAMES_PER_TURN_MAX = 256  # then the loop gets a turn for others
CLOSE_LINGER_MS = 200
RECONNECT_MS = 50
FRAME_SLACK_BYTES = 4096

_AGAIN = zmq.Again


def option_reader(socket: zmq.Socket[bytes]) -> Callable[[int], int]:
    """`getsockopt` for options that are integers (the stubs know them as "int or bytes")."""
    return cast(Callable[[int], int], socket.getsockopt)


class Port:
    """The socket of a server or client. `on_frame(route, frame, now_ns)` gets every frame, `on_turn(now_ns)` is called
    after the frames of one turn. All calls happen on the loop on which the port was opened."""

    def __init__(
        self,
        kind: int,
        spec: ChannelSpec,
        curve: CurveKeys | None,
        on_frame: Callable[[bytes, bytes, int], None],
        on_turn: Callable[[int], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._router = kind == zmq.ROUTER
        self._on_frame = on_frame
        self._on_turn = on_turn
        self._turn_due = False
        self.closed = False
        socket: zmq.Socket[bytes] = context_of(curve, server=self._router).socket(kind)
        self.socket = socket
        hwm = 4 * max(1, spec.window_batches) + 64
        socket.set(zmq.SNDHWM, hwm)
        socket.set(zmq.RCVHWM, hwm)
        socket.set(zmq.LINGER, CLOSE_LINGER_MS)
        socket.set(zmq.MAXMSGSIZE, spec.buffer_bytes_max + FRAME_SLACK_BYTES)
        socket.set(zmq.RECONNECT_IVL, RECONNECT_MS)
        if self._router:
            socket.set(zmq.ROUTER_MANDATORY, 1)
        if curve is not None:
            curve.apply(socket, server=self._router)
        self._option = option_reader(socket)
        self._fd = self._option(zmq.FD)
        self._loop.add_reader(self._fd, self._read)

    def send(self, route: bytes, frame: bytes) -> bool:
        """Hand one frame to zmq. False: there is no connection to that peer. A full pipe drops the frame: the window
        bounds what is outstanding, and the receiver asks again for what it misses."""
        socket = self.socket
        try:
            if self._router:
                socket.send(route, zmq.DONTWAIT | zmq.SNDMORE)
            socket.send(frame, zmq.DONTWAIT)
        except _AGAIN:
            return True
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return False
        return True

    def recheck(self) -> None:
        """To be called after sends: a send may have consumed the edge that told of frames to read."""
        if not self.closed and not self._turn_due and self._option(zmq.EVENTS) & zmq.POLLIN:
            self._turn_due = True
            self._loop.call_soon(self._read)

    def drain(self) -> bool:
        """Read now; True if nothing is left to read."""
        self._read()
        return self.closed or not self._turn_due

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self._loop.remove_reader(self._fd)
            self.socket.close()

    def _read(self) -> None:
        self._turn_due = False
        if self.closed:
            return
        receive, on_frame, now_ns = self.socket.recv, self._on_frame, monotonic_ns()
        route = b""
        try:
            for _ in range(FRAMES_PER_TURN_MAX):
                if self._router:
                    route = receive(zmq.DONTWAIT)
                frame = receive(zmq.DONTWAIT)
                if self._option(zmq.RCVMORE):
                    frame = self._skip_rest()
                on_frame(route, frame, now_ns)
            self._turn_due = True
            self._loop.call_soon(self._read)
        except _AGAIN:
            pass
        self._on_turn(now_ns)

    def _skip_rest(self) -> bytes:
        """A foreign message with more parts than ours: read it to its end; the empty frame counts as bad."""
        while self._option(zmq.RCVMORE):
            self.socket.recv(zmq.DONTWAIT)
        return b""


class Inbox:
    """Events for the layer above, in order: batches of messages, and calls such as "lost". If a handler raises, the
    error goes to the loop's exception handler and the rest is still delivered."""

    def __init__(self, on_batch: Callable[[], None] | None) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_batch = on_batch
        self._events: deque[tuple[Callable[[Message], None] | None, Iterator[Message], Callable[[], None] | None]] = (
            deque()
        )
        self._scheduled = False
        self._batch = False
        self.closed = False

    def messages(self, handler: Callable[[Message], None], batch: list[Message]) -> None:
        self._events.append((handler, iter(batch), None))

    def call(self, event: Callable[[], None]) -> None:
        """Deliver an event that is no message, on a later turn if none is going on."""
        self._events.append((None, iter(()), event))
        self.schedule()

    def schedule(self) -> None:
        if not self._scheduled and not self.closed:
            self._scheduled = True
            self._loop.call_soon(self._later)

    def deliver(self) -> None:
        events = self._events
        try:
            while events and not self.closed:
                handler, batch, event = events[0]
                if handler is not None:
                    self._batch = True
                    for message in batch:
                        handler(message)
                    events.popleft()
                else:
                    events.popleft()
                    if event is not None:
                        event()
            if self._batch and not self.closed:
                self._batch = False
                if self._on_batch is not None:
                    self._on_batch()
        finally:
            if events:
                self.schedule()

    def close(self) -> None:
        self.closed = True
        self._events.clear()

    def _later(self) -> None:
        self._scheduled = False
        self.deliver()
