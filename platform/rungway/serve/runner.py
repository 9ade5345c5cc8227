"""One run of `rungway serve`, from the parsed configuration to the last process gone.

The order matters: claim the state directory (which also clears what a killed run left), look at the port, fetch
models, make keys, then start; nothing of ours runs before the checks that end in exit code 2 have passed.
"""

from __future__ import annotations

import contextlib
import queue
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import msgspec

from rungway.contracts import FakeSpec, Platform, Tier
from rungway.serve.cluster import Cluster
from rungway.serve.deadline import Deadline
from rungway.serve.environment import StartError, make_run_directory, prepare, run_directory
from rungway.serve.instance import Instance, check_port
from rungway.serve.models import fetch_all
from rungway.settings import load_platform
from rungway.settings.keys import make_demo_keys

_LOOK_S = 0.25
_PROBE_S = 2.0
_WATCH_S = 1.0
_STOPPING = (signal.SIGINT, signal.SIGTERM)


class Stopped(Exception):
    """A signal asked for the end while the platform was starting."""


@dataclass(frozen=True)
class Ready:
    """What a person needs to use the running platform. `keys` are texts by name, of keys made in this run only."""

    url: str
    keys: dict[str, str]
    fallback_proxy: bool
    started_s: float
    model: str

    @property
    def dashboard(self) -> str:
        return f"{self.url}/dashboard"


@dataclass(frozen=True)
class Reports:
    """How a run tells the person who started it: what is awaited and for how long already (s), what
    is fetched (step and source, done, total), that it is ready,
    and which mistakes a reload found (none = the new
    configuration is in force)."""

    waiting: Callable[[str, float], None]
    fetching: Callable[[str, int, int], None]
    ready: Callable[[Ready], None]
    reloaded: Callable[[list[str]], None]


@dataclass
class Runner:
    """`run` blocks until a signal ends the platform. `ready_timeout_s` bounds the start,
    `drain_s` how long answers that run may go on once the end is asked for (a failed start drains nothing)."""

    config_path: Path
    state_dir: Path | None
    port: int | None
    host: str | None
    fake: bool
    ready_timeout_s: float
    drain_s: float
    reports: Reports
    _signals: queue.SimpleQueue[int] = field(default_factory=queue.SimpleQueue)

    def run(self) -> None:
        """Start, serve, stop. Raises ConfigError, StartError (its `code` is the exit code) or returns after a clean end."""
        start = Deadline(self.ready_timeout_s)
        platform = self._load()
        instance = Instance(Path(platform.state_dir))
        instance.claim()
        try:
            check_port(platform.host, platform.port)
            self._listen_to_signals()
            self._fetch_models(platform)
            keys = make_demo_keys(platform, Path(platform.state_dir))
            with _ray_remarks_to(instance.state_dir / "ray.log"):
                self._serve(self._load() if keys else platform, instance, keys, start)
        except Stopped:
            return
        finally:
            instance.release()

    def _load(self) -> Platform:
        platform = load_platform(self.config_path, state_dir=self.state_dir, port=self.port, host=self.host)
        return with_fake_engines(platform) if self.fake else platform

    def _listen_to_signals(self) -> None:
        for number in (*_STOPPING, signal.SIGHUP):
            signal.signal(number, lambda received, _frame: self._signals.put(received))

    def _stop_wanted(self) -> bool:
        """Whether a stop signal is waiting. A reload asked for before there is anything to reload is dropped."""
        while not self._signals.empty():
            if self._signals.get() in _STOPPING:
                return True
        return False

    def _fetch_models(self, platform: Platform) -> None:
        sources = dict.fromkeys(version.model for version in platform.versions() if version.backend == "native")
        models_dir = Path(platform.state_dir) / "models"
        if sources and not fetch_all(tuple(sources), models_dir, self.reports.fetching, self._stop_wanted):
            raise Stopped

    def _serve(self, platform: Platform, instance: Instance, keys: dict[str, str], start: Deadline) -> None:
        run_dir = run_directory(instance.state_dir)
        make_run_directory(run_dir)
        surroundings = prepare(platform, run_dir)
        instance.record(surroundings.mark, run_dir)
        cluster = Cluster(platform, self.config_path, surroundings)
        clean = False
        try:
            self.reports.waiting("Ray", 0.0)
            cluster.start()
            self._listen_to_signals()  # Ray put its own handlers in place
            url = _url(platform)
            self._await_ready(cluster, url, start)
            cluster.check_listeners()
            ready = Ready(url, keys, surroundings.haproxy is None, start.elapsed_s, _first_model(platform))
            instance.announce(ready.url, ready.dashboard, keys)
            self.reports.ready(ready)
            self._watch(cluster)
            clean = True
        except Stopped:
            clean = True
        finally:
            instance.unready()
            if not clean:
                _keep_logs(surroundings.ray_dir, instance.state_dir / "logs")
            left = cluster.stop(self.drain_s if clean else 0.0)
        if left:
            raise StartError(f"these processes could not be ended: {left}", code=1)

    def _await_ready(self, cluster: Cluster, url: str, start: Deadline) -> None:
        """Wait until /readyz answers 200, saying what is awaited whenever that changes."""
        deadline = Deadline(self.ready_timeout_s)
        said = ""
        while True:
            if self._stop_wanted():
                raise Stopped
            if not cluster.running():
                raise StartError("Ray ended while the platform was starting", code=1)
            awaited = cluster.awaited() or _not_ready(url)
            if not awaited:
                return
            if deadline.passed:
                raise StartError(f"not ready after {self.ready_timeout_s:.0f} s, still waiting for {awaited}", code=1)
            if awaited != said:
                self.reports.waiting(awaited, start.elapsed_s)
                said = awaited
            time.sleep(_LOOK_S)

    def _watch(self, cluster: Cluster) -> None:
        """Serve until a stop signal comes; reload on SIGHUP; fail when Ray's own servers end."""
        while True:
            try:
                received = self._signals.get(timeout=_WATCH_S)
            except queue.Empty:
                if not cluster.running():
                    raise StartError("Ray ended unexpectedly", code=1) from None
                continue
            if received in _STOPPING:
                return
            self.reports.reloaded(cluster.reload())


@contextlib.contextmanager
def _ray_remarks_to(path: Path) -> Iterator[None]:
    """What Ray prints into this process about dead workers and retried tasks goes to a file, not to the terminal."""
    with path.open("w", buffering=1) as log, contextlib.redirect_stderr(log), contextlib.redirect_stdout(log):
        yield


def with_fake_engines(platform: Platform) -> Platform:
    """`platform` with every version served by the fake engine, so that it starts without weights."""

    def faked(tier: Tier) -> Tier:
        versions = tuple(
            msgspec.structs.replace(version, backend="fake", fake=version.fake or FakeSpec(), num_gpus=0.0)
            for version in tier.versions
        )
        return msgspec.structs.replace(tier, versions=versions)

    return msgspec.structs.replace(platform, tiers=tuple(faked(tier) for tier in platform.tiers))


def _url(platform: Platform) -> str:
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(platform.host, platform.host)
    return f"http://[{host}]:{platform.port}" if ":" in host.strip("[]") else f"http://{host}:{platform.port}"


def _first_model(platform: Platform) -> str:
    """A name for the example request: the first alias, else the first tier."""
    names = [alias.name for alias in platform.models] + [tier.name for tier in platform.tiers]
    return "auto" if "auto" in names else names[0]


def _not_ready(url: str) -> str:
    """Empty when /readyz says 200; else what it says is missing."""
    try:
        answer = httpx.get(f"{url}/readyz", timeout=_PROBE_S)
    except httpx.HTTPError:
        return "the HTTP port"
    return "" if answer.status_code == 200 else "the gateway to be ready"


def _keep_logs(ray_dir: Path, target: Path) -> None:
    """Save Ray's logs of a failed run where they outlive the run directory; only the last such run is kept."""
    shutil.rmtree(target, ignore_errors=True)
    source = ray_dir / "session_latest" / "logs"
    if source.is_dir():
        shutil.copytree(source, target, symlinks=True, ignore_dangling_symlinks=True)
