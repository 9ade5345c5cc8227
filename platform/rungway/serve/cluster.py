"""Ray and Serve for one platform on this machine: start, watch, reload, stop. It lives in the inner process.

The stop is bounded at every step: the front door closes, Serve is asked, then Ray.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rungway.contracts import Platform
from rungway.serve import listeners, processes
from rungway.serve.drain import drain
from rungway.serve.environment import StartError, Surroundings

# Prompts and answers travel over channels, not through Ray's object store, so the store is Ray's smallest.
_OBJECT_STORE_BYTES = 100_000_000
_SERVE_STOP_S = 35.0
_RAY_STOP_S = 15.0
_RELOAD_S = 30.0
_ANSWER_S = 2.0
_CPUS_MIN = 4
"""Ray counts shares of CPUs when it places processes; a small machine must still hold them all."""


class Cluster:
    """Ray with the Serve application on it. `start` must run in the main thread: Ray's servers live and die with it."""

    def __init__(self, platform: Platform, config_path: Path | None, surroundings: Surroundings) -> None:
        self._platform = platform
        self._config_path = config_path
        self._surroundings = surroundings
        self._servers: list[int] = []
        self._controller: Any = None

    def start(self) -> None:
        """Start Ray and hand the application to Serve; returns before the application is ready."""
        import ray  # after `prepare`: Ray reads its switches at import
        from ray import serve
        from ray.serve.config import HTTPOptions

        from rungway.serve import app

        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        before = set(processes.children())
        ray.init(
            address="local",
            num_cpus=max(_CPUS_MIN, *(int(version.num_cpus) + 1 for version in self._platform.versions())),
            include_dashboard=False,
            object_store_memory=_OBJECT_STORE_BYTES,
            log_to_driver=False,
            logging_level="ERROR",
            _temp_dir=str(self._surroundings.ray_dir),
        )
        self._servers = sorted(set(processes.children()) - before)
        # HAProxy's public bind is put in place by its launcher; everything else of Serve's stays on loopback.
        host = self._platform.host if self._surroundings.haproxy is None else "127.0.0.1"
        serve.start(
            proxy_location="HeadOnly",
            http_options=HTTPOptions(host=host, port=self._platform.port, keep_alive_timeout_s=300),
            logging_config={"log_level": "WARNING", "enable_access_log": False},
        )
        target = serve.RunTarget(app.build(self._platform, self._config_path), name=app.APP, route_prefix="/")
        serve.run_many([target], wait_for_applications_running=False, wait_for_ingress_deployment_creation=False)

    def awaited(self) -> str:
        """What is not running yet, in words; empty when Serve says all is. Raises StartError when Serve gave up."""
        from ray import serve

        from rungway.serve import app

        application = serve.status().applications.get(app.APP)
        if application is None:
            return "Serve"
        if application.status == "DEPLOY_FAILED":
            raise StartError(_last_line(application.message, application.deployments), code=1)
        waiting = [name for name, one in application.deployments.items() if one.status != "HEALTHY"]
        return ", ".join(sorted(waiting)) if application.deployments else "Serve"

    def check_listeners(self) -> None:
        """Raise StartError when a process of ours can be reached from another machine without being meant to."""
        meant = listeners.addresses(self._platform.host)
        open_ = [
            listener
            for listener in listeners.beyond_loopback(processes.find(self._surroundings.mark))
            if listener.port != self._platform.port or listener.address not in meant
        ]
        if open_:
            places = ", ".join(f"{one.address}:{one.port} ({processes.name_of(one.pid)[:40]})" for one in open_)
            raise StartError(f"would listen beyond loopback, so it does not start: {places}", code=1)

    def running(self) -> bool:
        """Whether Ray's own servers still live."""
        return all(processes.alive(pid) for pid in self._servers)

    def reload(self) -> list[str]:
        """Have the controller read the configuration again; the mistakes it found (none = it is in force)."""
        try:
            return list(self._handle().reload.remote().result(timeout_s=_RELOAD_S))
        except Exception as failed:  # noqa: BLE001  (whatever a reload runs into, the platform goes on serving)
            return [f"the controller failed: {type(failed).__name__}: {failed}"]

    def _handle(self) -> Any:
        """The controller's handle. The router of a replica shares its event loop; this process has none, so the router
        brings its own."""
        from ray import serve

        from rungway.serve import app

        if self._controller is None:
            self._controller = serve.get_deployment_handle(app.CONTROLLER, app.APP)
            self._controller._init(_run_router_in_separate_loop=True)
        return self._controller

    def _in_flight(self) -> int:
        try:
            return int(self._handle().in_flight.remote().result(timeout_s=_ANSWER_S))
        except Exception:  # noqa: BLE001  (a controller that cannot be asked has nothing that could be waited for)
            return 0

    def stop(self, drain_s: float) -> None:
        """Let running answers finish within `drain_s`, then stop Serve and Ray. What resists is ended
        by process id by the outer process."""
        if drain_s > 0:
            drain(self._surroundings.haproxy_dir, self._in_flight, drain_s)
        _bounded(_stop_serve, _SERVE_STOP_S)
        _bounded(_stop_ray, _RAY_STOP_S)


def _stop_serve() -> None:
    import ray
    from ray import serve

    if ray.is_initialized():  # asked without one, Serve would start a Ray of its own to stop
        serve.shutdown()


def _stop_ray() -> None:
    import ray

    ray.shutdown()


def _bounded(step: Callable[[], None], limit_s: float) -> None:
    """Run `step`, but wait no longer than `limit_s`: what it did not end is ended by process id afterwards."""
    thread = threading.Thread(target=step, daemon=True)
    thread.start()
    thread.join(limit_s)


def _last_line(message: str, deployments: Any) -> str:
    """The cause in a deployment's message: the last line of the traceback that Serve relays."""
    texts = [one.message for one in deployments.values() if one.status == "DEPLOY_FAILED"] or [message]
    lines = [line.strip() for line in "\n".join(texts).splitlines() if line.strip()]
    causes = [line for line in lines if "Error" in line and not line.startswith(("File", "ray."))]
    return (causes or lines or ["Serve could not start the application"])[-1]
