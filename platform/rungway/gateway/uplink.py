"""The channel to the controller, and what must survive its absence: settlements until they are acknowledged, counts
until they are sent, queries until they are answered.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable

import msgspec

from rungway.channel import Client
from rungway.clock import monotonic_ns
from rungway.contracts import ChannelSpec
from rungway.errors import ChannelError, RequestError
from rungway.messages import Answer, Counts, FinishAck, Finished, Message, Query, ToGateway
from rungway.outcomes import Code
from rungway.types import Finish

QUERY_S = 15.0
QUERIES_MAX = 256

_log = logging.getLogger(__name__)


class Uplink:
    """`on_up` runs first at every new session (its place to send the hello); settlements follow. `on_lost`: it ended. `lost_ns` is since when
    the controller is away (monotonic), None while it is there."""

    def __init__(
        self,
        name: str,
        resolve: Callable[[], Awaitable[str]],
        spec: ChannelSpec,
        on_message: Callable[[Message], None],
        on_up: Callable[[], None],
        on_lost: Callable[[], None],
    ) -> None:
        self.lost_ns: int | None = monotonic_ns()
        self.unacked_max = 40_000
        self._on_message = on_message
        self._on_up = on_up
        self._on_lost = on_lost
        self._client = Client(name, resolve, spec, ToGateway, self._message, self._up, self._down)
        self._unacked: dict[str, tuple[Finish, int]] = {}
        self._counts: dict[tuple[str, tuple[str, ...]], float] = {}
        self._queries: dict[int, asyncio.Future[Answer]] = {}
        self._query_ids = itertools.count(1)

    @property
    def connected(self) -> bool:
        return self._client.connected

    async def start(self) -> None:
        self.lost_ns = monotonic_ns()
        await self._client.start()

    async def stop(self) -> None:
        self.flush_counts()
        await self._client.stop()

    def tell(self, message: Message) -> bool:
        """Send; False when the controller is away (the next hello makes up for it)."""
        try:
            self._client.send(message)
        except ChannelError:
            return False
        return True

    def settle(self, finish: Finish) -> None:
        """Send a settlement, and keep it until it is acknowledged."""
        if len(self._unacked) >= self.unacked_max:
            oldest = next(iter(self._unacked))
            _log.error("the settlement of %s was never acknowledged and is given up", oldest)
            del self._unacked[oldest]
        self._unacked[finish.request_id] = (finish, monotonic_ns())
        self.tell(Finished(finish))

    def owes(self, request_id: str) -> bool:
        """Whether a settlement of this request waits for its acknowledgement."""
        return request_id in self._unacked

    def resend(self, now_ns: int, older_than_ns: int) -> None:
        """Send settlements again that have waited for longer than this."""
        for request_id, (finish, sent_ns) in list(self._unacked.items()):
            if now_ns - sent_ns < older_than_ns or not self.tell(Finished(finish)):
                break
            del self._unacked[request_id]
            self._unacked[request_id] = (finish, now_ns)

    def count(self, metric: str, labels: tuple[str, ...]) -> None:
        """One event that the controller does not see. Labels come from configuration only, which bounds their number."""
        key = (metric, labels)
        self._counts[key] = self._counts.get(key, 0.0) + 1.0

    def flush_counts(self) -> None:
        if self._counts and self.tell(Counts([(name, labels, n) for (name, labels), n in self._counts.items()])):
            self._counts.clear()

    async def query(self, name: str, args: dict[str, object], tenant: str, admin: bool) -> Answer:
        """Ask the controller. Raises RequestError `starting`, `overloaded` or `timeout`."""
        if len(self._queries) >= QUERIES_MAX:
            raise RequestError(Code.OVERLOADED, "too many queries at once", retry_after_s=1)
        query_id = next(self._query_ids)
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._queries[query_id] = future
        try:
            if not self.tell(Query(query_id, name, msgspec.json.encode(args), tenant, admin)):
                raise RequestError(Code.STARTING, "the controller cannot be reached", retry_after_s=1)
            return await asyncio.wait_for(future, QUERY_S)
        except TimeoutError:
            raise RequestError(Code.TIMEOUT, "the controller did not answer in time") from None
        finally:
            del self._queries[query_id]

    def _message(self, message: Message) -> None:
        if isinstance(message, FinishAck):
            for request_id in message.request_ids:
                self._unacked.pop(request_id, None)
        elif isinstance(message, Answer):
            future = self._queries.get(message.query_id)
            if future is not None and not future.done():
                future.set_result(message)
        else:
            self._on_message(message)

    def _up(self) -> None:
        self.lost_ns = None
        self._on_up()
        self.resend(monotonic_ns(), 0)

    def _down(self) -> None:
        self.lost_ns = monotonic_ns()
        _log.warning("channel to the controller lost")
        self._on_lost()
        for future in self._queries.values():
            if not future.done():
                future.set_exception(RequestError(Code.STARTING, "the controller was lost", retry_after_s=1))
