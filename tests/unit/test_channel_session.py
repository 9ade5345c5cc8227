"""A session over a link that loses, delays, duplicates and reorders: exactly once, in order, in bounded memory."""

from __future__ import annotations

import heapq
import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rungway.channel.frames import HEADER_BYTES, Kind, array_of, pack, unpack
from rungway.channel.session import Session
from rungway.clock import NS_PER_MS
from rungway.contracts import ChannelSpec

SPEC = ChannelSpec(heartbeat_ms=50, lost_after_ms=60_000, window_batches=8, buffer_bytes_max=1_000_000)
STEP_NS = 5 * NS_PER_MS
_encode = msgspec.msgpack.encode


class End:
    """One end: a session, what it has delivered, and the link's queue towards it."""

    def __init__(self, spec: ChannelSpec) -> None:
        self.session = Session(7, spec, 0)
        self.delivered: list[int] = []
        self.wire: list[tuple[int, int, bytes]] = []
        self.frames_in = 0

    def receive_until(self, now_ns: int) -> None:
        while self.wire and self.wire[0][0] <= now_ns:
            frame = heapq.heappop(self.wire)[2]
            header = unpack(frame)
            assert header is not None
            self.frames_in += 1
            if self.session.accept(header.kind, header.seq, header.ack, len(frame), now_ns):
                self.delivered += msgspec.msgpack.decode(frame[HEADER_BYTES:], type=list[int])


class Link:
    def __init__(self, rng: random.Random, *, loss: float, twice: float, delay_ms: float) -> None:
        self.rng, self.loss, self.twice, self.delay_ms = rng, loss, twice, delay_ms
        self.count = 0

    def carry(self, frame: bytes, to: End, now_ns: int) -> None:
        for _ in range(2 if self.rng.random() < self.twice else 1):
            if self.rng.random() >= self.loss:
                self.count += 1
                delay_ns = int(self.rng.random() * self.delay_ms * NS_PER_MS)
                heapq.heappush(to.wire, (now_ns + delay_ns, self.count, frame))


def step(ends: tuple[End, End], link: Link, now_ns: int) -> None:
    for mine, other in (ends, ends[::-1]):
        mine.receive_until(now_ns)
        for frame in mine.session.outgoing(now_ns):
            link.carry(frame, other, now_ns)
        if now_ns % (50 * NS_PER_MS) == 0:
            beat = mine.session.beat(now_ns)
            if beat is not None:
                link.carry(beat, other, now_ns)


def converse(seed: int, *, loss: float, twice: float, delay_ms: float, steps: int) -> tuple[End, End, list[int]]:
    rng = random.Random(seed)
    ends = (End(SPEC), End(SPEC))
    link = Link(rng, loss=loss, twice=twice, delay_ms=delay_ms)
    sent = [0, 0]
    now_ns = 0
    for _ in range(steps):
        for who in (0, 1):
            for _ in range(rng.choice((0, 0, 1, 1, 5))):
                assert ends[who].session.push(_encode(sent[who]))
                sent[who] += 1
        step(ends, link, now_ns)
        now_ns += STEP_NS
    for _ in range(20_000):
        if ends[0].session.idle and ends[1].session.idle:
            break
        step(ends, link, now_ns)
        now_ns += STEP_NS
    return ends[0], ends[1], sent


@pytest.mark.parametrize("seed", range(12))
def test_exactly_once_in_order_over_a_bad_link(seed: int) -> None:
    a, b, sent = converse(seed, loss=0.2, twice=0.15, delay_ms=200, steps=300)
    assert b.delivered == list(range(sent[0]))
    assert a.delivered == list(range(sent[1]))
    assert a.session.buffered_bytes == 0
    assert b.session.buffered_bytes == 0


@settings(max_examples=30, deadline=None)
@given(st.integers(), st.floats(0, 0.4), st.floats(0, 0.5), st.floats(0, 300))
def test_exactly_once_whatever_the_link(seed: int, loss: float, twice: float, delay_ms: float) -> None:
    a, b, sent = converse(seed, loss=loss, twice=twice, delay_ms=delay_ms, steps=60)
    assert b.delivered == list(range(sent[0]))
    assert a.delivered == list(range(sent[1]))


def test_a_clean_link_carries_no_frame_twice() -> None:
    _, b, sent = converse(1, loss=0, twice=0, delay_ms=0, steps=200)
    assert b.delivered == list(range(sent[0]))
    assert b.frames_in <= 200 + 40 + 50  # one frame a step at most, heartbeats, acknowledgements


def test_a_full_window_gathers_messages_into_the_next_frame() -> None:
    session = Session(1, ChannelSpec(window_batches=2), 0)
    for turn in range(10):
        session.push(_encode(turn))
        frames = list(session.outgoing(turn))
        assert len(frames) == (1 if turn < 2 else 0)
    session.accept(Kind.BEAT, 0, 2, 0, 20)
    (frame,) = session.outgoing(20)
    assert msgspec.msgpack.decode(frame[HEADER_BYTES:]) == list(range(2, 10))


def test_memory_is_bounded_and_given_back() -> None:
    session = Session(1, ChannelSpec(window_batches=4, buffer_bytes_max=10_000), 0)
    taken = 0
    while session.push(b"\xa5abcde"):
        taken += 1
        assert session.buffered_bytes <= 10_000
        if taken % 10 == 0:
            list(session.outgoing(0))
            assert session.buffered_bytes <= 10_000
    assert 50 < taken < 10_000 // 6
    session.accept(Kind.BEAT, 0, 4, 0, 1)
    list(session.outgoing(1))
    session.accept(Kind.BEAT, 0, 5, 0, 1)
    assert session.idle
    assert session.buffered_bytes == 0


def test_an_ack_of_frames_never_sent_is_ignored() -> None:
    session = Session(1, SPEC, 0)
    session.push(_encode(1))
    list(session.outgoing(0))
    session.accept(Kind.BEAT, 0, 99, 0, 1)
    assert not session.idle
    session.accept(Kind.BEAT, 0, 1, 0, 1)
    assert session.idle


def test_acknowledgements_come_before_the_window_is_used_up() -> None:
    session = Session(1, ChannelSpec(window_batches=8), 0)
    kinds = []
    for seq in range(1, 9):
        assert session.accept(Kind.DATA, seq, 0, 10, seq)
        kinds += [header.kind for frame in session.outgoing(seq) if (header := unpack(frame))]
    assert kinds == [Kind.BEAT] * 4


def test_lost_after_silence_and_sooner_without_a_route() -> None:
    session = Session(1, ChannelSpec(heartbeat_ms=100, lost_after_ms=1000), 0)
    assert not session.lost(999 * NS_PER_MS)
    assert session.lost(1000 * NS_PER_MS)
    session.accept(Kind.BEAT, 0, 0, 0, 1000 * NS_PER_MS)
    session.route_down(1100 * NS_PER_MS)
    assert not session.lost(1299 * NS_PER_MS)
    assert session.lost(1300 * NS_PER_MS)
    session.accept(Kind.BEAT, 0, 0, 0, 1250 * NS_PER_MS)
    assert not session.lost(1300 * NS_PER_MS)


@pytest.mark.parametrize("count", [0, 1, 15, 16, 65_535, 65_536])
def test_array_headers_match_msgpack(count: int) -> None:
    assert array_of([b"\x01"] * count) == msgspec.msgpack.encode([1] * count)


@pytest.mark.parametrize(
    "frame", [b"", b"RW", b"XX\x01" + bytes(40), pack(Kind.BEAT, 1, 2, 3)[:-1], b"RW\x01\x63" + bytes(24)]
)
def test_foreign_bytes_are_no_frames(frame: bytes) -> None:
    assert unpack(frame) is None
