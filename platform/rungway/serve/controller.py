"""The Serve deployment of the controller. Its process alone imports the ledger and the policies."""

from __future__ import annotations

import asyncio
from pathlib import Path

from rungway.contracts import Platform
from rungway.control.service import ControllerService
from rungway.errors import ConfigError
from rungway.serve.deadline import Deadline
from rungway.serve.loopback import keep_grpc_on_loopback

PEERS_GONE_S = 15.0
"""How long the end waits for gateways and replicas to hang up; longer than either may take to drain."""


class ControllerDeployment:
    """The cell's one decision maker. Exactly one runs; a new one rebuilds its state from the ledger and its peers."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, platform: Platform, config_path: str | None
    ) -> None:
        keep_grpc_on_loopback()
        path = None if config_path is None else Path(config_path)
        self._service = ControllerService(platform, path, Path(platform.state_dir) / "models")
        await self._service.start()

    async def address(self) -> str:
        """Where the channel server listens: `tcp://host:port`."""
        return self._service.address

    async def reload(self) -> list[str]:
        """Read the configuration again: every mistake found (then the old one stays in force), empty when it is in force."""
        try:
            await self._service.reload()
        except ConfigError as wrong:
            return [str(mistake) for mistake in wrong.mistakes] or ["there is no configuration file to read"]
        return []

    async def in_flight(self) -> int:
        """Requests that are queued or run."""
        return len(self._service.core.cell.flights)

    def check_health(self) -> None:
        """Serve's probe."""
        if not self._service.healthy():
            raise RuntimeError("the controller is not healthy")

    async def __del__(self) -> None:
        """Stop last: gateways and replicas still settle what they have in hand."""
        service = getattr(self, "_service", None)
        if service is not None:
            await _await_peers_gone(service)
            await service.stop()


async def _await_peers_gone(service: ControllerService) -> None:
    """Wait until every gateway and replica has hung up: they do so when all they had in hand is settled."""
    deadline = Deadline(PEERS_GONE_S)
    while service.server.peers() and not deadline.passed:  # noqa: ASYNC110  (the channel has no such event)
        await asyncio.sleep(0.1)
