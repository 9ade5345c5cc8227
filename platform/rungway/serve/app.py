"""The Serve application `rungway`: one controller, the replicas of every version, and the gateways as its ingress."""

from __future__ import annotations

import asyncio
import uuid
from pathlib import Path
from typing import Any

from ray import serve

from rungway.contracts import Platform, Version
from rungway.control.service import ControllerService
from rungway.dashboard.app import create_dashboard
from rungway.errors import ConfigError
from rungway.gateway.app import App, create_app
from rungway.gateway.core import Gateway
from rungway.replica.deployment import DRAIN_S, ReplicaDeployment, controller_resolver
from rungway.serve.deadline import Deadline
from rungway.serve.loopback import keep_grpc_on_loopback
from rungway.serve.request_id import answer_with_own_request_id

APP = "rungway"
CONTROLLER = "Controller"
GATEWAY = "Gateway"

# A process that dies is seen by Serve at its next probe, at once; only a process that hangs costs the timeout, which is
# long because a busy machine must not look like a dead one.
_PROBE = {"health_check_period_s": 1.0, "health_check_timeout_s": 15.0}
_LOGGING = {"enable_access_log": False, "log_level": "WARNING"}
_CALLS_MAX = 100_000
"""Serve's own bound on requests inside one process; ours (queues, credits, body size) are far below it."""
_CONSTRUCTOR_TRIES_MAX = 3
_GATEWAY_DRAIN_S = 10.0


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


class GatewayDeployment:
    """One HTTP front end. Serve's direct ingress calls the ASGI app; this class only holds it and its life."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, controller: Any, platform: Platform, *_replicas: Any
    ) -> None:
        """`_replicas` are the handles that make the replicas part of the application; gateways use channels instead."""
        keep_grpc_on_loopback()
        answer_with_own_request_id()
        self._gateway = Gateway(
            gateway_id=f"gateway/{uuid.uuid4().hex[:12]}",
            resolve_controller=controller_resolver(controller),
            channel=platform.channel,
            models_dir=Path(platform.state_dir) / "models",
        )

    def __serve_build_asgi_app__(self) -> App:
        """The ASGI app that Serve mounts. Serve runs its lifespan, which starts the gateway after the constructor and
        stops it when the requests that run have ended."""
        return create_app(self._gateway, {"/dashboard": create_dashboard(self._gateway)})

    def check_health(self) -> None:
        """Serve's probe."""
        if not self._gateway.healthy():
            raise RuntimeError("the gateway is not healthy")


async def _await_peers_gone(service: ControllerService) -> None:
    """Wait until every gateway and replica has hung up: they do so when all they had in hand is settled."""
    deadline = Deadline(max(DRAIN_S, _GATEWAY_DRAIN_S) + 5.0)
    while service.server.peers() and not deadline.passed:  # noqa: ASYNC110  (the channel has no such event)
        await asyncio.sleep(0.1)


def build(platform: Platform, config_path: Path | None) -> Any:
    """The application for `platform`, ready for `serve.run`. `config_path` is what a reload reads again."""
    controller = _deployment(ControllerDeployment, CONTROLLER, num_replicas=1, drain_s=25.0, cpus=0.1).bind(
        platform, None if config_path is None else str(config_path)
    )
    replicas = [
        _replica(version).bind(controller, version, platform.channel, platform.state_dir, keep_grpc_on_loopback)
        for version in platform.versions()
        if version.replicas_min > 0
    ]
    # serve.ingress mixes the ASGI calling convention into the class.
    gateway = _deployment(
        serve.ingress()(GatewayDeployment),
        GATEWAY,
        num_replicas=platform.gateway.replicas,
        drain_s=_GATEWAY_DRAIN_S,
        cpus=0.1,
    )
    return gateway.bind(controller, platform, *replicas)


def replica_name(version: Version) -> str:
    """The deployment's name of a version's pool."""
    return f"Replica {version.pool}"


def _replica(version: Version) -> Any:
    options = {"num_gpus": version.num_gpus, **version.ray_actor_options}
    return _deployment(
        ReplicaDeployment,
        replica_name(version),
        num_replicas=version.replicas_min,
        drain_s=DRAIN_S + 5.0,
        cpus=version.num_cpus,
        actor_options=options,
    )


def _deployment(
    kind: Any,
    name: str,
    *,
    num_replicas: int,
    drain_s: float,
    cpus: float,
    actor_options: dict[str, object] | None = None,
) -> Any:
    return serve.deployment(
        kind,
        name=name,
        num_replicas=num_replicas,
        ray_actor_options={"num_cpus": cpus, **(actor_options or {})},
        max_ongoing_requests=_CALLS_MAX,
        max_constructor_retry_count=_CONSTRUCTOR_TRIES_MAX,
        graceful_shutdown_timeout_s=drain_s,
        graceful_shutdown_wait_loop_s=0.1,
        logging_config=_LOGGING,
        **_PROBE,
    )
