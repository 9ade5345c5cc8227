"""One session: exactly-once, in-order delivery of messages between two live ends over a link that may lose, delay,
duplicate and reorder frames. No socket, no loop, no clock: frames go in and come out, time is a parameter.

Sending: messages gather as encoded parts; `outgoing` seals them into numbered frames while fewer than
`window_batches` are unacknowledged, and lets them gather further otherwise. Unacknowledged frames are retained.
Loss is found by the receiver (a gap, or a heartbeat that names a number not seen) and repaired by going back N.
Below lies TCP, so loss means a reconnect: timers beyond the heartbeat would only resend to a busy peer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from rungway.channel.frames import Kind, array_of, pack
from rungway.clock import NS_PER_MS
from rungway.contracts import ChannelSpec

PART_OVERHEAD_BYTES = 64  # what a small bytes object costs beyond its content, so that the bound is one of memory
FRAME_BYTES_MAX = 1_000_000  # a sealed frame stops growing here; one larger message still travels alone


class Session:
    """State of one end. Both ends are equal once the session is open."""

    def __init__(self, session_id: int, spec: ChannelSpec, now_ns: int) -> None:
        self.id = session_id
        self.name = ""
        self.route = b""
        self.heard_ns = now_ns
        self.down_ns = 0  # since when the transport below says it has no connection; 0 = it has
        self.closed = False
        self._window = max(1, spec.window_batches)
        self._bytes_max = spec.buffer_bytes_max
        self._beat_ns = int(spec.heartbeat_ms * NS_PER_MS)
        self._lost_after_ns = int(spec.lost_after_ms * NS_PER_MS)
        self._parts: deque[bytes] = deque()  # encoded messages that wait for a frame
        self._retained: deque[bytes] = deque()  # bodies of frames acked+1, acked+2, ...
        self._buffered = 0
        self._acked = 0  # highest of our frames that the peer has
        self._cursor = 1  # number of the next frame to put on the wire
        self._expected = 1  # number of the next frame to deliver
        self._unacked_frames = 0
        self._unacked_bytes = 0
        self._owe_beat = False
        self._owe_nak = False
        self._nak_ns = -self._beat_ns
        self._nak_at = 0
        self._rewind_ns = -self._beat_ns
        self._rewind_at = 0
        self._sent_ns = now_ns
        self._ack_frames = max(1, self._window // 4)
        self._ack_bytes = self._bytes_max // 8

    @property
    def buffered_bytes(self) -> int:
        """Memory held for the peer: messages not yet framed and frames not yet acknowledged."""
        return self._buffered

    @property
    def idle(self) -> bool:
        """Everything pushed has been acknowledged."""
        return not self._parts and not self._retained

    def push(self, part: bytes) -> bool:
        """Take one encoded message. False: the buffer is over its bound and the peer must be dropped."""
        size = len(part) + PART_OVERHEAD_BYTES
        if self._buffered + size > self._bytes_max:
            return False
        self._buffered += size
        self._parts.append(part)
        return True

    def accept(self, kind: int, seq: int, ack: int, size: int, now_ns: int) -> bool:
        """Take note of a frame of this session; True if its body is next in order and must be delivered."""
        self.heard_ns = now_ns
        self.down_ns = 0
        self._acknowledge(ack)
        if kind == Kind.DATA:
            if seq == self._expected:
                self._expected += 1
                self._unacked_frames += 1
                self._unacked_bytes += size
                return True
            if seq < self._expected:
                self._owe_beat = True  # a duplicate: perhaps our acknowledgement was lost
            else:
                self._want_resend(now_ns)
            return False
        if seq >= self._expected and kind != Kind.OPENED:
            self._want_resend(now_ns)
        if kind == Kind.PING:
            self._owe_beat = True
        elif kind == Kind.NAK:
            self._rewind(ack, now_ns)
        return False

    def outgoing(self, now_ns: int) -> Iterator[bytes]:
        """Frames to put on the wire now: new and rewound data, else an acknowledgement or request that is due."""
        self._seal()
        sent = False
        while (index := self._cursor - self._acked - 1) < len(self._retained):
            sent = True
            self._clear_debt()
            self._cursor += 1
            yield pack(Kind.DATA, self.id, self._cursor - 1, self._expected - 1, self._retained[index])
        if self._owe_nak:
            self._owe_nak = False
            sent = True
            self._clear_debt()
            yield self._control(Kind.NAK)
        elif self._owe_beat or self._unacked_frames >= self._ack_frames or self._unacked_bytes >= self._ack_bytes:
            sent = True
            self._clear_debt()
            yield self._control(Kind.BEAT)
        if sent:
            self._sent_ns = now_ns

    def beat(self, now_ns: int) -> bytes | None:
        """Called once per heartbeat: the frame that says "alive", unless another one said so already."""
        if now_ns - self._sent_ns < self._beat_ns // 2 and not self._unacked_frames:
            return None
        self._clear_debt()
        self._sent_ns = now_ns
        return self._control(Kind.BEAT)

    def ping(self) -> bytes:
        """A frame that the peer answers at once, for an early acknowledgement or sign of life."""
        return self._control(Kind.PING)

    def close(self) -> bytes:
        """The frame that ends the session."""
        return self._control(Kind.CLOSE)

    def route_down(self, now_ns: int) -> None:
        """The transport has no connection to the peer: a short grace to reconnect, then it counts as lost."""
        if not self.down_ns:
            self.down_ns = now_ns

    def lost(self, now_ns: int) -> bool:
        """Nothing heard for `lost_after_ms`, or no connection for two heartbeats."""
        if now_ns - self.heard_ns >= self._lost_after_ns:
            return True
        return self.down_ns != 0 and now_ns - self.down_ns >= 2 * self._beat_ns

    def _control(self, kind: Kind) -> bytes:
        return pack(kind, self.id, self._acked + len(self._retained), self._expected - 1)

    def _clear_debt(self) -> None:
        self._unacked_frames = 0
        self._unacked_bytes = 0
        self._owe_beat = False

    def _seal(self) -> None:
        """Move gathered parts into numbered frames while the window has room."""
        parts = self._parts
        while parts and len(self._retained) < self._window:
            taken = [parts.popleft()]
            size = len(taken[0])
            while parts and size + len(parts[0]) <= FRAME_BYTES_MAX:
                size += len(parts[0])
                taken.append(parts.popleft())
            body = array_of(taken)
            self._retained.append(body)
            self._buffered += len(body) - size - PART_OVERHEAD_BYTES * (len(taken) - 1)

    def _acknowledge(self, ack: int) -> None:
        """Forget frames up to `ack`. An ack of something never sent is ignored: the frame lies."""
        if ack <= self._acked or ack >= self._acked + len(self._retained) + 1:
            return
        while self._acked < ack:
            self._buffered -= len(self._retained.popleft()) + PART_OVERHEAD_BYTES
            self._acked += 1
        self._cursor = max(self._cursor, ack + 1)

    def _want_resend(self, now_ns: int) -> None:
        """Ask once per missing number and heartbeat; a burst of later frames must not ask again and again."""
        if self._nak_at != self._expected or now_ns - self._nak_ns >= self._beat_ns:
            self._owe_nak = True
            self._nak_at = self._expected
            self._nak_ns = now_ns

    def _rewind(self, ack: int, now_ns: int) -> None:
        """Go back N to the first unacknowledged frame; a stale or duplicated NAK does nothing."""
        if ack != self._acked or (self._rewind_at == ack and now_ns - self._rewind_ns < self._beat_ns // 2):
            return
        self._cursor = ack + 1
        self._rewind_at = ack
        self._rewind_ns = now_ns
