"""The real core behind played channels and a played ledger, as `control/service.py` runs it: turns, group commit, held
sends, crash and restart."""

from __future__ import annotations

from collections import deque
from random import Random
from typing import Protocol

from rungway.clock import NS_PER_MS
from rungway.contracts import Platform
from rungway.control.core import Core
from rungway.control.effects import Effects
from rungway.control.restore import restore
from rungway.messages import (
    AttemptEnded,
    Finished,
    GatewayHello,
    Message,
    ReplicaHello,
    Report,
    Retry,
    Submit,
    Withdraw,
)
from rungway.policies.quality import QualityModel
from rungway.simulate.disk import Disk
from rungway.simulate.link import Link
from rungway.simulate.loop import Loop

TURN_NS = 200_000  # messages that come within this time are one turn, as in a busy event loop
COMMIT_NS = 2 * NS_PER_MS


class Watch(Protocol):
    """Looks at every turn; see `invariants.py`."""

    def turn(self, core: Core, effects: Effects) -> None: ...

    def sending(self, core: Core, message: Message) -> None: ...

    def restarted(self, core: Core) -> None: ...


class SimController:
    """`core` is None while the controller is dead. `told` counts messages handled."""

    name = "controller"

    def __init__(
        self, loop: Loop, rng: Random, platform: Platform, quality: QualityModel, disk: Disk, watch: Watch
    ) -> None:
        self.loop, self.rng, self.platform, self.quality = loop, rng, platform, quality
        self.disk, self.watch = disk, watch
        self.alive = False
        self.told = 0
        self.turns = 0
        self.commit_ns = COMMIT_NS  # a fault may make the disk slow
        self._commit_ns = 0  # when the last commit under way will be done
        self.core: Core
        self.links: dict[Link, None] = {}  # a set in order of arrival, or a seed would play differently in each process
        self._peers: dict[str, Link] = {}
        self._pending: deque[Effects] = deque()
        self._life = 0
        self._turn_due = False
        self.start()

    def start(self) -> None:
        """A new process: nothing in memory but what the ledger says."""
        self.alive = True
        self._life += 1
        self._turn_due = False
        self._commit_ns = self.loop.now_ns
        self.core = Core(self.platform, self.quality, self.loop.now())
        restore(self.core, self.disk, self.loop.now())
        self.watch.restarted(self.core)
        self.loop.after(int(self.platform.controller.tick_ms * NS_PER_MS), self._tick, self._life)

    def crash(self) -> None:
        """SIGKILL. Of the commits under way, the first so many made it to the disk; what hung on them is never sent."""
        self.alive = False
        for _ in range(self.rng.randint(0, len(self._pending))):
            self.disk.commit(self._pending.popleft())
        self._pending.clear()
        self._peers.clear()
        for link in self.links:
            link.cut()
            link.server_up = False

    @property
    def writing(self) -> bool:
        """Whether a commit is under way."""
        return bool(self._pending)

    # -- messages ---------------------------------------------------------------------------------------------

    def up(self, link: Link) -> None:
        raise AssertionError("a controller is nobody's client")

    def lost(self, link: Link) -> None:
        peer = link.client.name
        if self._peers.get(peer) is not link:
            return
        del self._peers[peer]
        if peer in self.core.cell.gateways:
            self.core.gateway_lost(peer, self.loop.now())
        else:
            self.core.replica_lost(peer, self.loop.now())
        self._turn()

    def receive(self, link: Link, message: object) -> None:
        peer, core, now = link.client.name, self.core, self.loop.now()
        self._peers[peer] = link
        self.told += 1
        match message:
            case Submit():
                core.submit(message.ask, now)
            case Finished():
                core.finished(peer, message.finish, now)
            case Report():
                core.report(message, now)
            case AttemptEnded():
                core.attempt_ended(peer, message.end, now)
            case Withdraw():
                core.withdraw(message.request_id, message.outcome, now)
            case Retry():
                core.retry(peer, message, now)
            case GatewayHello():
                core.gateway_hello(peer, message.flights, now)
            case ReplicaHello():
                core.replica_hello(message.info, now, message.running)
            case _:
                raise AssertionError(f"the controller does not take {type(message).__name__}")
        if not self._turn_due:
            self._turn_due = True
            self.loop.after(TURN_NS, self._end_turn, self._life)

    # -- turns ------------------------------------------------------------------------------------------------

    def _end_turn(self, life: int) -> None:
        if life == self._life and self.alive:
            self._turn()

    def _turn(self) -> None:
        self._turn_due = False
        self.core.settle_turn(self.loop.now())
        self._flush()

    def _tick(self, life: int) -> None:
        if life != self._life or not self.alive:
            return
        self.core.tick(self.loop.now())
        self._flush()
        self.loop.after(int(self.platform.controller.tick_ms * NS_PER_MS), self._tick, life)

    def _flush(self) -> None:
        """Carry out what the core decided in this turn."""
        self.turns += 1
        effects = self.core.cell.effects.drain()
        self.watch.turn(self.core, effects)
        for peer, message in effects.sends:
            self._send(peer, message)
        if effects.durable():
            self._pending.append(effects)
            self._commit_ns = max(self._commit_ns, self.loop.now_ns + self.commit_ns)
            self.loop.at(self._commit_ns, self._committed, self._life)
        elif self._pending:
            self._pending[-1].held += effects.held
        else:
            for peer, message in effects.held:
                self._send(peer, message)

    def _committed(self, life: int) -> None:
        if life != self._life or not self._pending:
            return
        effects = self._pending.popleft()
        self.disk.commit(effects)
        for peer, message in effects.held:
            self._send(peer, message)

    def _send(self, peer: str, message: Message) -> None:
        link = self._peers.get(peer)
        if link is not None:
            self.watch.sending(self.core, message)
            link.send(self, message)
