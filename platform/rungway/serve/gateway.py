"""The Serve deployment of a gateway: the ingress of the application."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

from rungway.contracts import Platform
from rungway.dashboard.app import create_dashboard
from rungway.gateway.app import App, create_app
from rungway.gateway.core import Gateway
from rungway.replica.deployment import controller_resolver
from rungway.serve.front import answer_directly
from rungway.serve.loopback import keep_grpc_on_loopback


class GatewayDeployment:
    """One HTTP front end. Serve's direct ingress calls the ASGI app; this class only holds it and its life."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, controller: Any, platform: Platform, *_replicas: Any
    ) -> None:
        """`_replicas` are the handles that make the replicas part of the application; gateways use channels instead."""
        keep_grpc_on_loopback()
        self._gateway = Gateway(
            gateway_id=f"gateway/{uuid.uuid4().hex[:12]}",
            resolve_controller=controller_resolver(controller),
            channel=platform.channel,
            models_dir=Path(platform.state_dir) / "models",
        )

    def __serve_build_asgi_app__(self) -> App:
        """The ASGI app that Serve mounts. Serve runs its lifespan, which starts the gateway after the constructor and
        stops it when the requests that run have ended."""
        app = create_app(self._gateway, {"/dashboard": create_dashboard(self._gateway)})
        answer_directly(app)
        return app

    def check_health(self) -> None:
        """Serve's probe."""
        if not self._gateway.healthy():
            raise RuntimeError("the gateway is not healthy")
