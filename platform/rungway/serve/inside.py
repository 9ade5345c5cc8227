"""The process that runs Ray and Serve for one `rungway serve`, apart from the process that the person started.

It has a session of its own, so a signal to the whole group of the terminal or of a service manager reaches only the
outer process, which then has the end done in order. When Ray takes this process down with it, the outer one is
still there to clear up; when the outer one dies, the pipe between them ends and this one stops by itself.
"""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from multiprocessing.connection import Connection
from pathlib import Path

import httpx

from rungway.contracts import Platform
from rungway.serve.cluster import Cluster
from rungway.serve.deadline import Deadline
from rungway.serve.environment import StartError, Surroundings, base_url

_LOOK_S = 0.25
_PROBE_S = 2.0
_WATCH_S = 1.0


class Command(StrEnum):
    """What the outer process asks for."""

    STOP = "stop"
    RELOAD = "reload"


class Kind(StrEnum):
    """What this process reports, as (kind, lines of text)."""

    WAITING = "waiting"
    READY = "ready"
    RELOADED = "reloaded"
    FAILED = "failed"


class _Stop(Exception):
    """The end is asked for; `drain` is False when there is nobody left who asks."""

    def __init__(self, *, drain: bool) -> None:
        self.drain = drain


@dataclass(frozen=True)
class Job:
    """What to run. `log` takes everything that Ray prints into this process."""

    platform: Platform
    config_path: Path
    surroundings: Surroundings
    ready_timeout_s: float
    drain_s: float
    log: Path


def run_inside(job: Job, outer: Connection) -> None:
    """The main function of the process: runs until a STOP, the end of the pipe, or a failure, which it reports."""
    os.setsid()
    log = os.open(job.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    inside = _Inside(job, outer)
    drain_s = 0.0
    try:
        inside.start()
        inside.watch()
    except _Stop as stop:
        drain_s = job.drain_s if stop.drain and inside.ready else 0.0
    except StartError as failed:
        inside.report(Kind.FAILED, [str(failed)])
    except Exception as failed:  # noqa: BLE001  (Ray raises plain Exception; one line for the person, the rest in the log)
        traceback.print_exc()
        inside.report(Kind.FAILED, [f"{type(failed).__name__}: {str(failed).partition(chr(10))[0]}"])
    finally:
        inside.cluster.stop(drain_s)


class _Inside:
    def __init__(self, job: Job, outer: Connection) -> None:
        self.cluster = Cluster(job.platform, job.config_path, job.surroundings)
        self.ready = False
        self._job = job
        self._outer = outer
        self._url = base_url(job.platform)

    def report(self, kind: Kind, lines: Sequence[str] = ()) -> None:
        """Tell the outer process, if it still lives."""
        try:
            self._outer.send((kind, list(lines)))
        except OSError:
            return

    def start(self) -> None:
        """Start everything and wait until /readyz answers 200, saying what is awaited whenever that changes."""
        self.report(Kind.WAITING, ["Ray"])
        self.cluster.start()
        deadline = Deadline(self._job.ready_timeout_s)
        said = ""
        while awaited := self.cluster.awaited() or self._not_ready():
            if self._command(0.0) is Command.STOP:
                raise _Stop(drain=False)
            if not self.cluster.running():
                raise StartError("Ray ended while the platform was starting")
            if deadline.passed:
                raise StartError(f"not ready after {deadline.limit_s:.0f} s, still waiting for {awaited}")
            if awaited != said:
                self.report(Kind.WAITING, [awaited])
                said = awaited
            time.sleep(_LOOK_S)
        self.cluster.check_listeners()
        self.ready = True
        self.report(Kind.READY)

    def watch(self) -> None:
        """Do what is asked until the end is; fail when Ray's own servers end."""
        while True:
            command = self._command(_WATCH_S)
            if command is Command.STOP:
                raise _Stop(drain=True)
            if command is Command.RELOAD:
                self.report(Kind.RELOADED, self.cluster.reload())
            if not self.cluster.running():
                raise StartError("Ray ended unexpectedly")

    def _command(self, patience_s: float) -> Command | None:
        """The next command, or None after `patience_s`. Raises _Stop when the outer process is gone."""
        try:
            return Command(self._outer.recv()) if self._outer.poll(patience_s) else None
        except (EOFError, OSError):
            raise _Stop(drain=False) from None

    def _not_ready(self) -> str:
        """Empty when /readyz says 200; else what is missing."""
        try:
            answer = httpx.get(f"{self._url}/readyz", timeout=_PROBE_S)
        except httpx.HTTPError:
            return "the HTTP port"
        return "" if answer.status_code == 200 else "the gateway to be ready"
