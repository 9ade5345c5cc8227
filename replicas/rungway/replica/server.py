"""A replica without Ray: a channel server around an engine.

Gateways send Start and Cancel and get Deltas, one message per engine step and gateway. The controller gets ReplicaHello
on every connect, a Report every 100 ms, and for every Start that ever arrived exactly one AttemptEnd, whatever became
of it, re-sent until acknowledged; the token log keeps what a killed replica still owed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import msgspec

from rungway.channel import Server
from rungway.clock import wall_ns
from rungway.contracts import ChannelSpec, Version
from rungway.engine.protocol import Delta, Engine, EngineUsage, HoldsPrefixes
from rungway.errors import ChannelError
from rungway.messages import Cancel, Deltas, Message, ReplicaHello, ReplicaInfo, Report, Start
from rungway.replica.attempts import Attempt, Recent, attempt_end, closing_deltas
from rungway.replica.ends import Ends
from rungway.replica.link import ControllerLink
from rungway.replica.tokenlog import TokenLog, TokenLogError, adopt
from rungway.types import AttemptEnd

SEEN_MAX = 65_536
CHECK_EVERY_REPORTS = 10
FORBIDDEN_MAX = 4_096
_NOTHING = EngineUsage(0, 0, 0)

_log = logging.getLogger(__name__)


class ReplicaServer:
    """Life: `start`, then `drain` (which stops at its end) or `stop`. `healthy` is False once the engine is broken.

    A Start is turned away with a last Delta and an AttemptEnd without usage: finish "error" and error "draining",
    "accounting_full" (too many ends unacknowledged) or "engine_failed"; finish "cancelled", or "error" with "evicted",
    where a Cancel or Evict came before it.
    """

    def __init__(
        self,
        *,
        engine: Engine,
        replica_id: str,
        version: Version,
        resolve_controller: Callable[[], Awaitable[str]],
        channel: ChannelSpec,
        state_dir: Path,
        host: str = "127.0.0.1",
    ) -> None:
        self.replica_id = replica_id
        self._engine = engine
        self._version = version
        self._folder = state_dir / "engine"
        self._server = Server(host, channel, Start | Cancel, self._on_gateway, self._on_gateway_lost)
        self._link = ControllerLink(
            replica_id,
            resolve_controller,
            channel,
            self._hello,
            self._report,
            partial(self._interrupt, why="evicted"),
            engine if isinstance(engine, HoldsPrefixes) else None,
        )
        self._running: dict[str, Attempt] = {}
        self._held: dict[str, tuple[str, Start]] = {}  # next attempts that wait for the end of the one before
        self._seen: Recent[str, int] = Recent(SEEN_MAX)
        self._forbidden: Recent[str, str] = Recent(FORBIDDEN_MAX)
        self._quiet = asyncio.Event()
        self._quiet.set()
        self._draining = False
        self._started = False
        self._reports = 0
        self._failure: str | None = None

    @property
    def address(self) -> str:
        """Where gateways reach this replica; empty before `start`."""
        return self._server.address

    async def start(self) -> None:
        """Start the engine, open the token log, adopt those of dead replicas, listen, and register with the controller.
        Raises what the engine raises, TokenLogError, or ChannelError."""
        await self._engine.start(self._on_deltas)
        self._tokens = TokenLog.create(self._folder, self.replica_id)
        self._ends = Ends(self._tokens, adopt(self._folder), wall_ns())
        await self._server.start()
        await self._link.start(self._ends)
        self._started = True

    def healthy(self) -> bool:
        """Started, not stopped, and the engine works."""
        self._look_at_engine()
        return self._started and self._failure is None and self._link.alive

    async def drain(self, timeout_s: float) -> None:
        """Take no new Start, let the running attempts end within `timeout_s`, then stop."""
        self._draining = True
        self._link.report()
        try:
            await asyncio.wait_for(self._quiet.wait(), timeout_s)
        except TimeoutError:
            _log.warning("%s: %d attempts outlasted the drain", self.replica_id, len(self._running))
        await self.stop()

    async def stop(self) -> None:
        """Cancel what runs, report its usage, wait a bounded time for acknowledgements, close. May be called twice."""
        if not self._started:
            return
        self._started = False
        self._draining = True
        await self._engine.stop()
        self._close_all("cancelled", None)
        await self._server.stop()
        await self._link.stop()

    # --- from gateways

    def _on_gateway(self, peer: str, message: Message) -> None:
        if isinstance(message, Start):
            self._on_start(peer, message)
        elif isinstance(message, Cancel):
            self._interrupt(message.request_id)

    def _on_start(self, peer: str, start: Start) -> None:
        work = start.work
        last = self._seen.get(work.request_id)
        if last is not None and work.attempt <= last:
            return
        self._seen.put(work.request_id, work.attempt)
        forbidden = self._forbidden.pop(work.request_id)
        if forbidden == "evicted":
            self._turn_away(peer, start, "error", "evicted")
        elif forbidden is not None:
            self._turn_away(peer, start, "cancelled", None)
        elif work.request_id in self._running:
            # The engine knows requests, not attempts: the old attempt has to be out before the new one goes in.
            older = self._held.pop(work.request_id, None)
            if older is not None:
                self._turn_away(*older, "cancelled", None)
            self._held[work.request_id] = (peer, start)
            self._engine.cancel(work.request_id)
        else:
            self._run(peer, start)

    def _run(self, peer: str, start: Start) -> None:
        work = start.work
        if self._draining or self._failure is not None:
            self._turn_away(peer, start, "error", "draining" if self._draining else "engine_failed")
            return
        now_wall_ns = wall_ns()
        try:
            if self._ends.full:
                raise TokenLogError("too many ends are unacknowledged")
            slot = self._tokens.open(work.request_id, work.attempt, start.billing, now_wall_ns)
        except TokenLogError as error:
            _log.warning("%s turns %s away: %s", self.replica_id, work.request_id, error)
            self._turn_away(peer, start, "error", "accounting_full")
            return
        self._quiet.clear()
        self._running[work.request_id] = Attempt(work, start.billing, peer, slot, now_wall_ns)
        try:
            self._engine.submit(work)
        except Exception as error:  # noqa: BLE001 - an engine is a plug-in; whatever it raises, its attempts are settled
            _log.exception("%s: the engine refused %s", self.replica_id, work.request_id)
            self._fail(f"submit raised {type(error).__name__}: {error}")

    def _turn_away(self, peer: str, start: Start, finish: str, error: str | None) -> None:
        work, now_wall_ns = start.work, wall_ns()
        indices = list(range(work.sequences))
        self._send(peer, closing_deltas(work.request_id, work.attempt, indices, finish, error, _NOTHING))
        times = (now_wall_ns, now_wall_ns)
        end = attempt_end(self.replica_id, work.request_id, work.attempt, start.billing, _NOTHING, finish, times)
        self._settle(end, None)

    def _interrupt(self, request_id: str, number: int = 0, why: str = "cancelled") -> None:
        """Cancel, or Evict of one attempt (0 = all), in whatever state the request is here; also before it has come."""
        held = self._held.get(request_id)
        if held is not None and number in (0, held[1].work.attempt):
            finish, error = ("error", why) if why == "evicted" else ("cancelled", None)
            self._turn_away(*self._held.pop(request_id), finish, error)
        attempt = self._running.get(request_id)
        if attempt is not None and number in (0, attempt.attempt):
            attempt.evicted = attempt.evicted or why == "evicted"
            self._engine.cancel(request_id)
        elif request_id not in self._seen or number > (self._seen.get(request_id) or 0):
            self._forbidden.put(request_id, why)

    def _on_gateway_lost(self, peer: str) -> None:
        for request_id in [request_id for request_id, (owner, _) in self._held.items() if owner == peer]:
            self._turn_away(*self._held.pop(request_id), "cancelled", None)
        for attempt in list(self._running.values()):
            if attempt.gateway == peer:
                attempt.gateway = ""
                self._engine.cancel(attempt.request_id)

    # --- from the engine

    def _on_deltas(self, deltas: list[Delta]) -> None:
        """Count, log and route one engine step."""
        groups: dict[str, list[Delta]] = {}
        ended: list[tuple[Attempt, EngineUsage]] = []
        running, tokens = self._running, self._tokens
        for delta in deltas:
            attempt = running.get(delta.request_id)
            if attempt is None or attempt.attempt != delta.attempt:
                continue
            if attempt.counted(delta):
                tokens.count(attempt.slot, attempt.prompt_tokens, 0, attempt.emitted)
            if delta.finish is not None:
                if attempt.evicted and delta.finish == "cancelled":
                    delta = msgspec.structs.replace(delta, finish="error", error="evicted")
                attempt.finished(delta.index, delta.finish or "stop")
                if delta.usage is not None:
                    ended.append((attempt, delta.usage))
            group = groups.get(attempt.gateway)
            if group is None:
                groups[attempt.gateway] = [delta]
            else:
                group.append(delta)
        for gateway, group in groups.items():
            self._send(gateway, group)
        for attempt, usage in ended:
            self._ended(attempt, usage)

    def _ended(self, attempt: Attempt, usage: EngineUsage) -> None:
        del self._running[attempt.request_id]
        if not self._running:
            self._quiet.set()
        times = (attempt.started_wall_ns, wall_ns())
        key = (attempt.request_id, attempt.attempt)
        self._settle(attempt_end(self.replica_id, *key, attempt.billing, usage, attempt.finish, times), attempt.slot)
        held = self._held.pop(attempt.request_id, None)
        if held is not None:
            self._run(*held)

    def _send(self, gateway: str, deltas: list[Delta]) -> None:
        if not gateway:
            return
        try:
            self._server.send(gateway, Deltas(deltas))
        except ChannelError:
            self._on_gateway_lost(gateway)

    def _look_at_engine(self) -> None:
        """An engine whose step loop has died or whose block books do not balance says so in `check`."""
        if self._failure is None and (problems := self._engine.check()):
            self._fail("; ".join(problems))

    def _fail(self, why: str) -> None:
        """The engine is broken: settle what ran with what was counted; the deployment replaces an unhealthy replica."""
        _log.error("%s: engine failed: %s", self.replica_id, why)
        self._failure = why
        self._close_all("error", "engine_failed")

    def _close_all(self, finish: str, error: str | None) -> None:
        for attempt in list(self._running.values()):
            usage, indices = attempt.usage_so_far(), sorted(attempt.open_indices)
            attempt.finished(-1, finish)
            deltas = closing_deltas(attempt.request_id, attempt.attempt, indices, finish, error, usage)
            self._send(attempt.gateway, deltas)
            self._ended(attempt, usage)

    # --- for the controller

    def _hello(self) -> ReplicaHello:
        running = [(attempt.request_id, attempt.attempt) for attempt in self._running.values()]
        info = ReplicaInfo(
            self.replica_id,
            self._server.address,
            self._version.tier,
            self._version.name,
            self._engine.max_num_seqs,
            self._engine.kv_tokens,
            "draining" if self._draining else "ready",
        )
        return ReplicaHello(info, running)

    def _report(self) -> Report:
        """Stats, and progress since the last report."""
        self._reports += 1
        if self._reports % CHECK_EVERY_REPORTS == 0:
            self._look_at_engine()
        progress = []
        for attempt in self._running.values():
            if attempt.emitted != attempt.reported:
                attempt.reported = attempt.emitted
                progress.append((attempt.request_id, attempt.attempt, attempt.emitted))
        return Report(self.replica_id, self._engine.stats(), progress, self._draining)

    def _settle(self, end: AttemptEnd, slot: int | None) -> None:
        self._link.settle(end, slot)
