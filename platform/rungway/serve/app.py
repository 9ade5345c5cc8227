"""The Serve application `rungway`: one controller, the replicas of every version, and the gateways as its ingress."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ray import serve

from rungway.contracts import Platform, Version
from rungway.replica.deployment import DRAIN_S, ReplicaDeployment
from rungway.serve.controller import PEERS_GONE_S, ControllerDeployment
from rungway.serve.gateway import GatewayDeployment
from rungway.serve.loopback import keep_grpc_on_loopback

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


def build(platform: Platform, config_path: Path | None) -> Any:
    """The application for `platform`, ready for `serve.run`. `config_path` is what a reload reads again."""
    controller = _deployment(
        ControllerDeployment, CONTROLLER, num_replicas=1, drain_s=PEERS_GONE_S + 10.0, cpus=0.1
    ).bind(platform, None if config_path is None else str(config_path))
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
