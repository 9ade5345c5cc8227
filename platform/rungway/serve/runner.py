"""One run of `rungway serve`, from the parsed configuration to the last process gone.

This is the outer process: it holds the claim on the state directory, hears the signals, talks to the person, and clears
up. Ray runs in an inner process (`inside`). The order matters: claim the state directory (which also clears what a
killed run left), look at the port, fetch models, make keys, then start; nothing of ours runs before the checks that end
in exit code 2 have passed.
"""

from __future__ import annotations

import queue
import shutil
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing import resource_tracker
from pathlib import Path

import msgspec

from rungway.contracts import FakeSpec, Platform, Tier
from rungway.serve import processes
from rungway.serve.deadline import Deadline
from rungway.serve.environment import StartError, base_url, make_run_directory, prepare, run_directory
from rungway.serve.inner import Ended, Inner
from rungway.serve.inside import Command, Job, Kind
from rungway.serve.instance import Instance, check_port
from rungway.serve.models import fetch_all
from rungway.settings import load_platform
from rungway.settings.keys import make_demo_keys

_LOOK_S = 0.2
_STOP_S = 60.0
"""How long Serve and Ray may take to stop after the drain, before what is left is ended by process id."""
_STOPPING = (signal.SIGINT, signal.SIGTERM)


class Stopped(Exception):
    """A signal asked for the end while the platform was starting."""


@dataclass(frozen=True)
class Ready:
    """What a person needs to use the running platform. `keys` are texts by name, of keys made in this run only;
    `elapsed` tells the seconds since the start."""

    url: str
    keys: dict[str, str]
    fallback_proxy: bool
    model: str
    elapsed: Callable[[], float]

    @property
    def dashboard(self) -> str:
        return f"{self.url}/dashboard"


@dataclass(frozen=True)
class Reports:
    """How a run tells the person who started it: what is awaited and for how long already (s), what is fetched (step and
    source, done, total), that it is ready, and which mistakes a reload found (none = the new
    configuration is in force)."""

    waiting: Callable[[str, float], None]
    fetching: Callable[[str, int, int], None]
    ready: Callable[[Ready], None]
    reloaded: Callable[[list[str]], None]


@dataclass
class Runner:
    """`run` blocks until a signal ends the platform; a second one ends it without patience. `ready_timeout_s` bounds the start,
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
        sources = dict.fromkeys(
            source for version in platform.versions() if version.backend == "native" for source in version.sources
        )
        models_dir = Path(platform.state_dir) / "models"
        if sources and not fetch_all(tuple(sources), models_dir, self.reports.fetching, self._stop_wanted):
            raise Stopped

    def _serve(self, platform: Platform, instance: Instance, keys: dict[str, str], start: Deadline) -> None:
        """Run the platform in its own process until the end; whatever happens there, clear up here."""
        run_dir = run_directory(instance.state_dir)
        make_run_directory(run_dir)
        # Python's own helper of spawned processes ends with us; started later it would carry the mark and be ended.
        resource_tracker.ensure_running()
        surroundings = prepare(platform, run_dir)
        instance.record(surroundings.mark, run_dir)
        url = base_url(platform)
        ready = Ready(url, keys, surroundings.haproxy is None, _first_model(platform), lambda: start.elapsed_s)
        log = instance.state_dir / "ray.log"
        job = Job(platform, self.config_path, surroundings, self.ready_timeout_s, self.drain_s, log)
        inner = Inner(job)
        try:
            self._follow(inner, instance, ready)
        except StartError:
            _keep_logs(surroundings.ray_dir, instance.state_dir / "logs")
            raise
        finally:
            instance.unready()
            inner.end()
            left = processes.end(surroundings.mark)
            shutil.rmtree(run_dir, ignore_errors=True)
        if left:
            raise StartError(f"these processes could not be ended: {left}", code=1)

    def _follow(self, inner: Inner, instance: Instance, ready: Ready) -> None:
        """Pass signals in and reports out until the inner process has ended. Raises StartError when it failed."""
        stopping: Deadline | None = None
        while (report := inner.next_report(_LOOK_S)) is not Ended.YES:
            if report is not None:
                self._tell(report, instance, ready)
            while not self._signals.empty():
                received = self._signals.get()
                if received not in _STOPPING:
                    inner.command(Command.RELOAD)
                elif stopping is None:
                    stopping = Deadline(self.drain_s + _STOP_S)
                    instance.unready()
                    inner.command(Command.STOP)
                else:
                    return  # asked twice: no more patience
            if stopping is not None and stopping.passed:
                return
        if stopping is None:
            raise StartError("Ray ended unexpectedly", code=1)

    def _tell(self, report: tuple[Kind, list[str]], instance: Instance, ready: Ready) -> None:
        kind, lines = report
        if kind is Kind.FAILED:
            raise StartError(lines[0], code=1)
        if kind is Kind.WAITING:
            self.reports.waiting(lines[0], ready.elapsed())
        elif kind is Kind.READY:
            instance.announce(ready.url, ready.dashboard, ready.keys)
            self.reports.ready(ready)
        else:
            self.reports.reloaded(lines)


def with_fake_engines(platform: Platform) -> Platform:
    """`platform` with every version served by the fake engine, so that it starts without weights."""

    def faked(tier: Tier) -> Tier:
        versions = tuple(
            msgspec.structs.replace(version, backend="fake", fake=version.fake or FakeSpec(), num_gpus=0.0)
            for version in tier.versions
        )
        return msgspec.structs.replace(tier, versions=versions)

    return msgspec.structs.replace(platform, tiers=tuple(faked(tier) for tier in platform.tiers))


def _first_model(platform: Platform) -> str:
    """A name for the example request: the first alias, else the first tier."""
    names = [alias.name for alias in platform.models] + [tier.name for tier in platform.tiers]
    return "auto" if "auto" in names else names[0]


def _keep_logs(ray_dir: Path, target: Path) -> None:
    """Save Ray's logs of a failed run where they outlive the run directory; only the last such run is kept."""
    shutil.rmtree(target, ignore_errors=True)
    source = ray_dir / "session_latest" / "logs"
    if source.is_dir():
        shutil.copytree(source, target, symlinks=True, ignore_dangling_symlinks=True)
