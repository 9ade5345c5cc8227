"""Channels to the replicas: one client each, made and dropped as the controller's list of peers says."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from rungway.channel import Client
from rungway.clock import NS_PER_MS, monotonic_ns
from rungway.contracts import ChannelSpec
from rungway.errors import ChannelError
from rungway.messages import Cancel, Deltas, Message, ReplicaInfo, Start

PENDING_MAX = 1024
"""Starts that may wait for a channel that is being opened; more than that is a replica that cannot be reached."""

_log = logging.getLogger(__name__)


class Link:
    """One replica. Starts given before the channel is up wait for it, at most `lost_after_ms`."""

    def __init__(self, info: ReplicaInfo, client: Client) -> None:
        self.info = info
        self.client = client
        self.pending: dict[str, Start] = {}
        self.pending_since_ns = 0
        self.was_up = False
        self.listed = True


class Links:
    """`on_deltas` gets each message of a replica; `on_lost(replica_id, None)` says that everything running there is
    gone, `on_lost(replica_id, ids)` that these requests never got there."""

    def __init__(
        self,
        name: str,
        spec: ChannelSpec,
        on_deltas: Callable[[Deltas], None],
        on_lost: Callable[[str, list[str] | None], None],
    ) -> None:
        self._name = name
        self._spec = spec
        self._on_deltas = on_deltas
        self._on_lost = on_lost
        self._links: dict[str, Link] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopped = False

    def update(self, replicas: list[ReplicaInfo]) -> None:
        """Follow the complete list: open new channels, close those of replicas that are gone or lost. A channel that is up
        stays until it breaks: a controller that has just been replaced knows of no replica yet, and answers stream."""
        if self._stopped:
            return  # a list that came while the gateway says goodbye to the controller
        wanted = {info.replica_id: info for info in replicas if info.state != "lost"}
        for replica_id, link in list(self._links.items()):
            info = wanted.get(replica_id)
            link.listed = info is not None
            if info is not None and info.address == link.info.address:
                link.info = info
            elif info is not None or not link.client.connected:
                self._drop(replica_id)
        for replica_id, info in wanted.items():
            if replica_id not in self._links:
                self._open(info)

    def start(self, replica_id: str, start: Start) -> bool:
        """Send, or keep until the channel is up. False when that replica cannot take it."""
        link = self._links.get(replica_id)
        if link is None:
            return False
        if link.client.connected:
            return self._send(link, start)
        if len(link.pending) >= PENDING_MAX:
            return False
        if not link.pending:
            link.pending_since_ns = monotonic_ns()
        link.pending[start.work.request_id] = start
        return True

    def cancel(self, replica_id: str, request_id: str) -> None:
        link = self._links.get(replica_id)
        if link is not None and link.pending.pop(request_id, None) is None and link.client.connected:
            self._send(link, Cancel(request_id))

    def tick(self, now_ns: int) -> None:
        """Give up on Starts whose channel did not come up in time."""
        for replica_id, link in self._links.items():
            if link.pending and now_ns - link.pending_since_ns > self._spec.lost_after_ms * NS_PER_MS:
                waiting, link.pending = list(link.pending), {}
                self._on_lost(replica_id, waiting)

    def tiers_up(self) -> set[str]:
        """Tiers with at least one replica of the list that can be reached now."""
        return {link.info.tier for link in self._links.values() if link.client.connected and link.listed}

    def reachable(self) -> set[str]:
        """Replicas whose channel is up."""
        return {replica_id for replica_id, link in self._links.items() if link.client.connected}

    async def stop(self) -> None:
        self._stopped = True
        for replica_id in list(self._links):
            self._drop(replica_id)
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=self._spec.lost_after_ms / 1000)

    def _open(self, info: ReplicaInfo) -> None:
        async def resolve() -> str:
            return info.address

        replica_id = info.replica_id
        client = Client(
            self._name,
            resolve,
            self._spec,
            Deltas,
            self._on_message,
            partial(self._up, replica_id),
            partial(self._down, replica_id),
        )
        self._links[replica_id] = Link(info, client)
        self._spawn(client.start())

    def _drop(self, replica_id: str) -> None:
        link = self._links.pop(replica_id)
        self._spawn(link.client.stop())
        self._on_lost(replica_id, None)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _on_message(self, message: Message) -> None:
        if isinstance(message, Deltas):
            self._on_deltas(message)

    def _up(self, replica_id: str) -> None:
        link = self._links.get(replica_id)
        if link is None:
            return
        waiting, link.pending = link.pending, {}
        failed = [request_id for request_id, start in waiting.items() if not self._send(link, start)]
        if failed:
            self._on_lost(replica_id, failed)

    def _down(self, replica_id: str) -> None:
        link = self._links.get(replica_id)
        if link is None:
            return
        _log.warning("channel to replica %s lost", replica_id)
        if link.listed:
            self._on_lost(replica_id, None)
        else:
            self._drop(replica_id)

    @staticmethod
    def _send(link: Link, message: Message) -> bool:
        try:
            link.client.send(message)
        except ChannelError:
            return False
        return True
