"""A replica's line to its controller: hello on every connect, a report every 100 ms, ends until acknowledged."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import msgspec

from rungway.channel import Client
from rungway.clock import monotonic_ns
from rungway.contracts import ChannelSpec
from rungway.engine.protocol import HoldsPrefixes
from rungway.errors import ChannelError
from rungway.messages import AttemptAck, AttemptEnded, Evict, Message, ReplicaHello, Report
from rungway.replica.ends import Ends
from rungway.types import AttemptEnd

REPORT_S = 0.1
ACK_WAIT_S = 1.0


class ControllerLink:
    """`hello` and `report` are asked for the present state whenever one is due; `on_evict` gets a request id and an attempt. `prefixes`:
    the engine, where it says what its prefix cache holds."""

    def __init__(
        self,
        replica_id: str,
        resolve: Callable[[], Awaitable[str]],
        channel: ChannelSpec,
        hello: Callable[[], ReplicaHello],
        report: Callable[[], Report],
        on_evict: Callable[[str, int], None],
        prefixes: HoldsPrefixes | None = None,
    ) -> None:
        self._hello = hello
        self._make_report = report
        self._on_evict = on_evict
        self._prefixes = prefixes
        self._all_prefixes = True  # this session's controller has heard of none
        self._client = Client(
            replica_id, resolve, channel, AttemptAck | Evict, self._on_message, self._on_up, lambda: None
        )
        self._settled = asyncio.Event()
        self._reporter: asyncio.Task[None] | None = None

    async def start(self, ends: Ends) -> None:
        """Start connecting; `ends` may already hold what dead replicas owe."""
        self._ends = ends
        await self._client.start()
        self._reporter = asyncio.get_running_loop().create_task(self._report_forever(), name="replica-report")

    @property
    def alive(self) -> bool:
        """The reports go on (a controller that cannot be reached at the moment is no fault of the replica)."""
        return self._reporter is not None and not self._reporter.done()

    async def stop(self) -> None:
        """Give the controller a bounded time to acknowledge every end; what it does not stays in the token log."""
        reporter, self._reporter = self._reporter, None
        if reporter is None:
            return
        self._settled.clear()
        if len(self._ends) and self._client.connected:
            try:
                await asyncio.wait_for(self._settled.wait(), ACK_WAIT_S)
            except TimeoutError:
                pass
        reporter.cancel()
        await asyncio.wait({reporter})
        await self._client.stop()
        self._ends.close()

    def settle(self, end: AttemptEnd, slot: int | None) -> None:
        """An attempt is over: keep its end and send it. `slot` is its place in the token log, None if it never ran."""
        self._ends.add(end, slot, monotonic_ns())
        self._send(AttemptEnded(end))

    def report(self) -> None:
        """Send the present state, and the ends that are due again."""
        report = self._make_report()
        if not self._client.connected:
            return
        if self._prefixes is not None:
            news = self._prefixes.prefix_news(full=self._all_prefixes)
            self._all_prefixes = False
            if news.full or news.added or news.removed:
                report = msgspec.structs.replace(report, prefixes=news)
        self._send(report)
        for end in self._ends.take_due(monotonic_ns()):
            self._send(AttemptEnded(end))

    def _on_up(self) -> None:
        self._send(self._hello())
        self._all_prefixes = True
        self._ends.all_due()
        self.report()

    def _on_message(self, message: Message) -> None:
        if isinstance(message, AttemptAck):
            self._ends.acknowledge(message.attempts)
            if not len(self._ends):
                self._settled.set()
        elif isinstance(message, Evict):
            self._on_evict(message.request_id, message.attempt)

    def _send(self, message: Message) -> None:
        try:
            self._client.send(message)
        except ChannelError:
            pass  # not connected: the next session begins with everything that still matters

    async def _report_forever(self) -> None:
        while True:
            await asyncio.sleep(REPORT_S)
            self.report()
