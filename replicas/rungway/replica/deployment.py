"""The Serve deployment around one engine, and how any deployment finds the controller.

Ray Serve places, health-checks and replaces the process; requests come over the replica's own channel server, so Serve
is told what it cannot see: that the engine is unwell (`check_health`) and that work must end first (the drain below).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from rungway.contracts import ChannelSpec, Version
from rungway.errors import ChannelError
from rungway.replica.build import build_engine
from rungway.replica.server import ReplicaServer

CONTROLLER_ANSWER_S = 5.0
"""How long one question for the controller's address may take; channels ask again with a back-off of their own."""
DRAIN_S = 10.0
"""How long running work may take to end when Serve stops a replica; what is left then is given back."""


def controller_resolver(controller: Any) -> Callable[[], Awaitable[str]]:
    """A `resolve_controller` over the controller's Serve handle: its present address, wherever Serve has put it.

    The returned function raises ChannelError when no controller answers in time.
    """

    async def resolve() -> str:
        try:
            return str(await asyncio.wait_for(_ask(controller), CONTROLLER_ANSWER_S))
        except (TimeoutError, RayError, RayServeException) as lost:
            raise ChannelError(f"the controller does not answer: {type(lost).__name__}") from lost

    return resolve


async def _ask(controller: Any) -> Any:
    return await controller.address.remote()


class ReplicaDeployment:
    """One engine of one version. Serve builds it in a process of its own with the version's resources."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self,
        controller: Any,
        version: Version,
        channel: ChannelSpec,
        state_dir: str,
        on_process_start: Callable[[], None],
    ) -> None:
        """`on_process_start` runs first, before Serve opens this process's servers."""
        on_process_start()
        engine = await asyncio.to_thread(build_engine, version, Path(state_dir) / "models")
        self._server = ReplicaServer(
            engine=engine,
            replica_id=f"{version.pool}/{serve.get_replica_context().replica_id.unique_id}",
            version=version,
            resolve_controller=controller_resolver(controller),
            channel=channel,
            state_dir=Path(state_dir),
        )
        await self._server.start()

    def check_health(self) -> None:
        """Serve's probe: raises when the engine no longer works, so that the replica is replaced."""
        if not self._server.healthy():
            raise RuntimeError("the engine is not healthy")

    async def __del__(self) -> None:
        """Serve's shutdown hook: takes no new work, lets running work end, reports it, and stops."""
        server = getattr(self, "_server", None)
        if server is not None:
            await server.drain(DRAIN_S)
