"""What the processes of a platform inherit: Ray Serve's switches, loopback, thread counts, and where their files lie.

All of it must be in `os.environ` before ray is imported for the first time, because Ray Serve reads its switches at
import. `prepare` is the one place that writes them.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
import socket
import tempfile
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path

from rungway.contracts import Platform, TierKind
from rungway.errors import RequestError, RungwayError
from rungway.outcomes import Code
from rungway.serve import haproxy, processes

# A Unix socket's path may be 107 bytes long; below the run directory Ray and HAProxy need up to 83 of them.
RUN_DIR_BYTES_MAX = 24
_NICENESS = "RAY_worker_niceness"
DRAIN_S = 1.0
"""How long a leaving gateway stays reachable so that HAProxy, which hears of it at once, can turn to others."""


class StartError(RungwayError):
    """The platform cannot be started, or ended by itself; the message is one line for the person who tried.

    `code` is the exit code: 2 when what was asked for cannot be (a taken port, a second server), 1 when it failed.
    """

    def __init__(self, message: str, *, code: int = 2) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True)
class Surroundings:
    """Where one instance runs. `haproxy` is the real binary, or None when Serve's own proxy stands in for it."""

    mark: str
    run_dir: Path
    haproxy: str | None

    @property
    def ray_dir(self) -> Path:
        """Ray opens its own directory to every user of the machine, so it lies inside the run directory, which is not."""
        return self.run_dir / "r"

    @property
    def haproxy_dir(self) -> Path:
        """HAProxy's configuration, sockets and launcher."""
        return self.run_dir / "h"


def run_directory(state_dir: Path) -> Path:
    """The short directory for sockets and Ray's session files of `state_dir`; the same one at every start."""
    name = "rw-" + hashlib.sha256(str(state_dir.resolve()).encode()).hexdigest()[:8]
    for base in (Path(tempfile.gettempdir()), Path(os.sep, "tmp")):
        if base.is_dir() and len(str(base / name)) <= RUN_DIR_BYTES_MAX:
            return base / name
    raise StartError(f"no temporary directory with a path short enough for sockets (tried {tempfile.gettempdir()})")


def make_run_directory(path: Path) -> None:
    """Create `path` anew, readable by this user alone. Raises StartError when somebody else owns it."""
    if os.path.lexists(path):
        status = os.lstat(path)
        if status.st_uid != os.getuid() or path.is_symlink():
            raise StartError(f"{path} belongs to another user")
        shutil.rmtree(path, ignore_errors=True)
    path.mkdir(mode=0o700, exist_ok=True)


def base_url(platform: Platform) -> str:
    """Where this machine reaches the platform over HTTP."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(platform.host, platform.host)
    return f"http://[{host}]:{platform.port}" if ":" in host else f"http://{host}:{platform.port}"


def free_port(host: str = "127.0.0.1") -> int:
    """A TCP port that is free on `host` now."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def prepare(platform: Platform, run_dir: Path) -> Surroundings:
    """Fill `os.environ` and `run_dir` for one start of `platform`."""
    mark = secrets.token_hex(16)
    wanted = os.environ.get("RAY_SERVE_ENABLE_HA_PROXY", "1") == "1"
    binary = haproxy.find_binary() if wanted else None
    os.environ[processes.MARK] = mark
    os.environ.update(_common(run_dir))
    os.environ.update(_compute(platform))
    surroundings = Surroundings(mark=mark, run_dir=run_dir, haproxy=binary)
    if binary is None:
        os.environ.update({"RAY_SERVE_ENABLE_HA_PROXY": "0", "RAY_SERVE_ENABLE_DIRECT_INGRESS": "0"})
    else:
        os.environ.update(_haproxy(platform, surroundings.haproxy_dir, binary))
    return surroundings


def _common(run_dir: Path) -> dict[str, str]:
    token = run_dir / "ray-token"
    token.touch(mode=0o600)
    token.write_text(secrets.token_hex(32))
    return {
        # Ray gives a node its outward address on Linux; told that this is no cluster it stays on 127.0.0.1, and so do
        # the ports of its servers and workers. (The variable's name speaks of the systems where that is the default.)
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token),
        "RAY_USAGE_STATS_ENABLED": "0",
        # Ray's workers give way (nice 15) to everything else on the machine, as suits batch work; ours serve, and whatever
        # computes beside them would get thirty times their share of a core.
        _NICENESS: os.environ.get(_NICENESS, "0"),
        "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": str(DRAIN_S),
        "RAY_SERVE_PROXY_MIN_DRAINING_PERIOD_S": str(DRAIN_S),
        # Metrics are our own (/metrics); Ray's collection costs CPU on every process and has no reader here.
        "RAY_enable_metrics_collection": "0",
        "RAY_SERVE_HAPROXY_METRICS_ENABLED": "0",
        "RAY_task_events_report_interval_ms": "0",
        "RAY_ROTATION_MAX_BYTES": "20000000",
        "RAY_ROTATION_BACKUP_COUNT": "2",
        "AUTOSCALER_METRIC_PORT": str(free_port()),
        "DASHBOARD_METRIC_PORT": str(free_port()),
    }


def threads_per_engine(platform: Platform, cores: int) -> int:
    """The cores shared out among the native engines of this machine. An engine with more threads than cores to itself
    is slower than with one: each of its small steps waits for a thread that another engine holds. Engines for embeddings
    count only where there are no others: their models are small and work now and then."""
    native = [version for version in platform.versions() if version.backend == "native"]
    texts = [version for version in native if version.kind is TierKind.TEXT]
    engines = sum(version.replicas_min for version in texts or native)
    return max(1, cores // max(1, engines))


def _compute(platform: Platform) -> dict[str, str]:
    """Threads of the native engine: what the operator set stays. Waiting threads must sleep: all share few cores."""
    threads = threads_per_engine(platform, os.cpu_count() or 1)
    return {
        "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "PASSIVE"),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads)),
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def _haproxy(platform: Platform, home: Path, binary: str) -> dict[str, str]:
    home.mkdir(mode=0o700, exist_ok=True)
    for name, error in _ERRORS.items():
        (home / name).write_bytes(_raw_answer(error))
    longest_stream_s = int(platform.gateway.request_timeout_s) + 30
    return {
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        haproxy.OVERRIDE: str(haproxy.write_launcher(home)),
        haproxy.BINARY: binary,
        haproxy.LISTEN_HOST: platform.host,
        haproxy.ERROR_FILES: str(home),
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(home / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(home / "admin.sock"),
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(home / "metrics.sock"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(home),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(home / "state"),
        "RAY_SERVE_HAPROXY_NBTHREAD": str(max(1, min(4, (os.cpu_count() or 1) // 2))),
        # A reload keeps the old worker for the streams it carries, as long as a request may last.
        "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": str(longest_stream_s),
        "RAY_SERVE_HAPROXY_HEALTH_CHECK_INTER": "2s",
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(free_port()),
    }


_ERRORS = {
    haproxy.UNREADABLE: RequestError(
        Code.INVALID_REQUEST, "The request cannot be read, or the connection closed before its answer."
    ),
    haproxy.SLOW: RequestError(Code.INVALID_REQUEST, "The head of the request did not come in time."),
    haproxy.STARTING: RequestError(
        Code.STARTING, "No gateway is running yet. Please try again shortly.", retry_after_s=1
    ),
}


def _raw_answer(error: RequestError) -> bytes:
    """The API's own error as the bytes that HAProxy sends."""
    body = json.dumps(error.body()).encode()
    retry = "" if error.retry_after_s is None else f"retry-after: {error.retry_after_s}\r\n"
    head = (
        f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
        f"{retry}cache-control: no-store\r\nconnection: close\r\n\r\n"
    )
    return head.encode() + body
