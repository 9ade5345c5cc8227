"""Played channels: ordered and reliable while a session lives, silent when it is cut, found out by heartbeats.

A session ends when a process dies or the line between two is cut. Messages under way are lost with it; each side notices
by itself within `lost_after_ms`; the client side then connects again, under the same name, as soon as it can.
"""

from __future__ import annotations

from random import Random
from typing import Protocol

from rungway.clock import NS_PER_MS
from rungway.contracts import ChannelSpec
from rungway.simulate.loop import Loop

CONNECT_EVERY_NS = 100 * NS_PER_MS


class Actor(Protocol):
    """A process. `alive` False = it was killed and never comes back under this name."""

    name: str
    alive: bool

    def receive(self, link: Link, message: object) -> None: ...

    def up(self, link: Link) -> None: ...

    def lost(self, link: Link) -> None: ...


class Wire:
    """What all links share: delays. `delay_ms` (mean of an exponential on top of the base) may be raised by a fault."""

    def __init__(self, loop: Loop, rng: Random, spec: ChannelSpec, *, base_us: int = 100, jitter_us: int = 50) -> None:
        self.loop, self.rng, self.spec = loop, rng, spec
        self.base_ns, self.jitter_ns = base_us * 1_000, jitter_us * 1_000
        self.extra_ms = 0.0
        self.sent = 0

    def delay_ns(self) -> int:
        delay = self.base_ns + int(self.rng.random() * self.jitter_ns)
        if self.extra_ms:
            delay += int(self.rng.expovariate(1.0 / self.extra_ms) * NS_PER_MS)
        return delay

    def notice_ns(self) -> int:
        """How long until heartbeats tell a side that the other is gone."""
        limit = self.spec.lost_after_ms
        return int((limit - self.rng.random() * self.spec.heartbeat_ms) * NS_PER_MS)


class Link:
    """From one client process to whatever process `server` names now."""

    def __init__(self, wire: Wire, client: Actor, server: Actor) -> None:
        self.wire, self.client, self.server = wire, client, server
        self.session = 0
        self.client_up = self.server_up = False
        self.closed = False
        self.blocked_until_ns = 0
        self.broken_ns: int | None = 0  # since when nothing gets through
        self._last = {True: 0, False: 0}
        self._connecting = False
        self.connect_soon(0)

    def send(self, sender: Actor, message: object) -> bool:
        """False when this side knows that the other is away. True promises nothing."""
        from_client = sender is self.client
        if not (self.client_up if from_client else self.server_up):
            return False
        wire, loop, last = self.wire, self.wire.loop, self._last
        when = loop.now_ns + wire.delay_ns()
        if when < last[from_client]:
            when = last[from_client]
        last[from_client] = when
        wire.sent += 1
        loop.at(when, self._deliver, from_client, message, self.session)
        return True

    def _deliver(self, from_client: bool, message: object, session: int) -> None:
        if session != self.session or self.broken_ns is not None:
            return
        target = self.server if from_client else self.client
        if target.alive:
            target.receive(self, message)

    def cut(self, blocked_ns: int = 0) -> None:
        """The session is gone; nobody has noticed yet. `blocked_ns`: no new one before that."""
        loop = self.wire.loop
        self.blocked_until_ns = max(self.blocked_until_ns, loop.now_ns + blocked_ns)
        if self.broken_ns is not None:
            return
        self.broken_ns = loop.now_ns
        loop.after(self.wire.notice_ns(), self._notice, True, self.session)
        loop.after(self.wire.notice_ns(), self._notice, False, self.session)

    def close(self) -> None:
        """The client does not want this link any more."""
        self.closed = True
        self.cut()

    def _notice(self, client_side: bool, session: int) -> None:
        if session != self.session:
            return
        if client_side and self.client_up:
            self.client_up = False
            if self.client.alive:
                self.client.lost(self)
                self.connect_soon(CONNECT_EVERY_NS)
        elif not client_side and self.server_up:
            self.server_up = False
            if self.server.alive:
                self.server.lost(self)

    def connect_soon(self, after_ns: int) -> None:
        if not self._connecting:
            self._connecting = True
            self.wire.loop.after(after_ns, self._connect)

    def _connect(self) -> None:
        self._connecting = False
        if self.closed or not self.client.alive or self.client_up:
            return
        if not self.server.alive or self.wire.loop.now_ns < self.blocked_until_ns:
            self.connect_soon(CONNECT_EVERY_NS)
            return
        if self.server_up:  # the server learns of the old session's end by the new one
            self.server_up = False
            self.server.lost(self)
        self.session += 1
        self.broken_ns = None
        self.client_up = self.server_up = True
        self._last = {True: self.wire.loop.now_ns, False: self.wire.loop.now_ns}
        self.client.up(self)
