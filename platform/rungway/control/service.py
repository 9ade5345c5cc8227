"""The controller as a process: channels in, ledger out, one event loop.

messages -> Core -> effects:  sends go at once; rows and audit go to the ledger's writer;
                              held sends (degraded grants, acknowledgements) go when their ticket is committed
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from rungway.channel import Server
from rungway.clock import monotonic_ns, wall_ns
from rungway.contracts import Platform, Tier
from rungway.control import queries
from rungway.control.cell import Now
from rungway.control.core import Core
from rungway.control.restore import look_up, newcomers, recall, restore
from rungway.control.session_secret import load_secret
from rungway.errors import ChannelError, ConfigError, LedgerError, RequestError
from rungway.ledger import LedgerReader, LedgerWriter, database_url
from rungway.messages import (
    Answer,
    AttemptEnded,
    Counts,
    Finished,
    GatewayHello,
    Message,
    Query,
    ReplicaHello,
    Report,
    Retry,
    Submit,
    ToController,
    Withdraw,
)
from rungway.observe.metrics import Metrics
from rungway.outcomes import Code
from rungway.policies.quality import load_default
from rungway.settings import load_platform

T = TypeVar("T")

_log = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"  # gateways and replicas of a cell live on this node
QUERY_THREADS = 2
QUERIES_WAITING_MAX = 256
WRITTEN_S = 0.25
"""How long a query waits for rows that are on their way to the ledger."""
RELOAD_WRITTEN_S = 5.0
"""The same for a reload, which rests on them."""


def _now() -> Now:
    return Now(monotonic_ns(), wall_ns())


class ControllerService:
    """Owns the cell's Core, ledger and metrics. `address` is set once started."""

    def __init__(self, platform: Platform, config_path: Path | None, models_dir: Path) -> None:
        self.platform = platform
        self.config_path = config_path
        self.models_dir = models_dir
        self.address = ""
        self.failed = ""
        self.core = Core(platform, load_default(), _now())
        self.metrics = Metrics(platform)
        self.reader: LedgerReader
        self.writer: LedgerWriter
        self._held: deque[tuple[int, list[tuple[str, Message]]]] = deque()
        self._ticket = 0  # of the last turn that had something to write
        self._durable = 0  # highest ticket known to be committed
        self._readers: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._queries = 0
        self._reloading = asyncio.Lock()
        self._tasks: set[asyncio.Task[Answer]] = set()
        self._tick: asyncio.Task[None] | None = None
        self._pool = ThreadPoolExecutor(QUERY_THREADS, thread_name_prefix="rungway-query")
        self._handlers: dict[type[Message], Callable[[str, Any, Now], None]] = {
            Submit: lambda peer, m, now: self.core.submit(m.ask, now),
            Finished: lambda peer, m, now: self.core.finished(peer, m.finish, now),
            Report: lambda peer, m, now: self.core.report(m, now),
            AttemptEnded: lambda peer, m, now: self.core.attempt_ended(peer, m.end, now),
            Withdraw: lambda peer, m, now: self.core.withdraw(m.request_id, m.outcome, now),
            Retry: lambda peer, m, now: self.core.retry(peer, m, now),
            GatewayHello: lambda peer, m, now: self.core.gateway_hello(peer, m.flights, now),
            ReplicaHello: lambda peer, m, now: self.core.replica_hello(m.info, now, m.running),
            Counts: lambda peer, m, now: self.metrics.increments(m.increments),
            Query: lambda peer, m, now: self._query(peer, m),
        }

    async def start(self) -> None:
        """Open the ledger, rebuild quota state from it, listen. Raises LedgerError or ChannelError."""
        self._loop = asyncio.get_running_loop()
        url = database_url(self.platform)
        Path(self.platform.state_dir).mkdir(parents=True, exist_ok=True)
        self.writer = LedgerWriter(url, self._committed)
        self.reader = LedgerReader(url)
        self.core.cell.session_secret = await self.in_thread(lambda: load_secret(Path(self.platform.state_dir)))
        await self._loop.run_in_executor(self._pool, lambda: restore(self.core, self.reader, _now()))
        self.server = Server(
            LOOPBACK,
            self.platform.channel,
            ToController,
            self._message,
            self._lost,
            self._batch,
        )
        await self.server.start()
        self.address = self.server.address
        self._tick = asyncio.create_task(self._ticking())

    async def stop(self) -> None:
        """Write what is pending and let go of everything."""
        if self._tick is not None:
            self._tick.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._tick
        for task in self._tasks:
            task.cancel()
        self._flush()
        self.writer.close()
        await self.server.stop()
        self._pool.shutdown(wait=False)

    def healthy(self) -> bool:
        return not self.failed and self.writer.healthy

    # -- messages ---------------------------------------------------------------------------------------------

    def _message(self, peer: str, message: Message) -> None:
        self._handlers[type(message)](peer, message, _now())

    def _lost(self, peer: str) -> None:
        now = _now()
        if peer in self.core.cell.gateways:
            self.core.gateway_lost(peer, now)
        else:
            self.core.replica_lost(peer, now)
        self._batch()

    def _batch(self) -> None:
        self.core.settle_turn(_now())
        self._flush()

    async def _ticking(self) -> None:
        while True:
            await asyncio.sleep(self.platform.controller.tick_ms / 1000.0)
            self.core.tick(_now())
            self._flush()

    def _flush(self) -> None:
        """Carry out what the core decided in this turn."""
        effects = self.core.cell.effects.drain()
        for peer, message in effects.sends:
            self._send(peer, message)
        for row in effects.rows:
            self.metrics.row(row)
        for entry in effects.audit:
            if entry.kind == "eviction":
                self.metrics.count("evictions", (entry.tenant,))
        if effects.durable():
            try:
                self._ticket = self.writer.put(
                    rows=effects.rows, audit=effects.audit, attempts=effects.attempts, waste=effects.waste
                )
            except LedgerError as error:
                self.failed = str(error)
                return
        if effects.held and self._ticket > self._durable:
            # Also when this turn wrote nothing: what they speak of may be in an earlier turn's rows.
            self._held.append((self._ticket, effects.held))
        else:
            for peer, message in effects.held:
                self._send(peer, message)

    def _send(self, peer: str, message: Message) -> None:
        with contextlib.suppress(ChannelError):  # the peer is gone; its loss is reported by the channel
            self.server.send(peer, message)

    def _committed(self, ticket: int) -> None:
        """Called from the writer's thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: we are stopping
            self._loop.call_soon_threadsafe(self._release, ticket)

    def _release(self, ticket: int) -> None:
        self._durable = ticket
        while self._readers and self._readers[0][0] <= ticket:
            reader = self._readers.popleft()[1]
            if not reader.done():
                reader.set_result(None)
        while self._held and self._held[0][0] <= ticket:
            for peer, message in self._held.popleft()[1]:
                self._send(peer, message)

    # -- queries ----------------------------------------------------------------------------------------------

    def _query(self, peer: str, query: Query) -> None:
        if self._queries >= QUERIES_WAITING_MAX:
            self._send(
                peer, queries.error_answer(query.query_id, RequestError(Code.OVERLOADED, "Too many queries wait."))
            )
            return
        self._queries += 1
        task = asyncio.create_task(self._answer(query))
        self._tasks.add(task)
        task.add_done_callback(lambda done: self._answered(peer, query, done))

    async def _answer(self, query: Query) -> Answer:
        await self._written()
        return await queries.answer(self, query)

    def _answered(self, peer: str, query: Query, task: asyncio.Task[Answer]) -> None:
        """A bug or a lost database is one logged 500, not a caller that waits in vain."""
        self._tasks.discard(task)
        self._queries -= 1
        if task.cancelled():
            return
        error = task.exception()
        if error is not None:
            _log.error("the query %s failed", query.name, exc_info=error)
            answer = queries.error_answer(
                query.query_id, RequestError(Code.INTERNAL, "The controller could not answer.")
            )
        else:
            answer = task.result()
        self.core.cell.effects.held.append((peer, answer))  # a command is answered once its audit row is there
        self._flush()

    async def _written(self, within_s: float | None = None) -> None:
        """Let the ledger catch up with what was settled by now: who asks right after an answer finds it there."""
        ticket = self.writer.hurry()
        if ticket > self._durable:
            reader: asyncio.Future[None] = self._loop.create_future()
            self._readers.append((ticket, reader))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(reader, WRITTEN_S if within_s is None else within_s)

    async def in_thread(self, call: Callable[[], T]) -> T:
        """Run a ledger read off the loop."""
        return await self._loop.run_in_executor(self._pool, call)

    async def reload(self) -> Platform:
        """Read the files again and put them into force. Raises ConfigError and keeps the old ones when any is wrong."""
        if self.config_path is None:
            raise ConfigError([])
        path = self.config_path
        async with self._reloading:
            old = self.platform
            loaded = await self.in_thread(
                lambda: load_platform(path, state_dir=Path(old.state_dir), port=old.port, host=old.host)
            )
            await self.adopt(with_running_engines(loaded, old))
        return self.platform

    async def adopt(self, platform: Platform) -> None:
        """Put it into force. Whoever was a tenant before comes back with what he has used, as the ledger knows it."""
        now, found = _now(), newcomers(self.core.cell, platform)
        if found:
            self._flush()
            await self._written(RELOAD_WRITTEN_S)
        known = await self.in_thread(lambda: look_up(found, self.reader, now))
        self.platform = platform
        self.core.reload(platform, _now())
        recall(self.core.cell, known, _now())
        self.metrics.adopt(platform)
        self._flush()


def with_running_engines(loaded: Platform, running: Platform) -> Platform:
    """`loaded`, but with the versions that run: what an engine is made of changes with a restart, prices and weights at
    once. A tier that is new in the files stays without replicas until then."""
    before = {version.pool: version for version in running.versions()}

    def keep(tier: Tier) -> Tier:
        versions = [
            msgspec.structs.replace(before[version.pool], weight=version.weight)
            for version in tier.versions
            if version.pool in before
        ]
        return msgspec.structs.replace(tier, versions=tuple(versions) or tier.versions)

    return msgspec.structs.replace(loaded, tiers=tuple(keep(tier) for tier in loaded.tiers))
