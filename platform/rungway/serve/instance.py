"""One instance per state directory: its lock, its record on disk, and `ready.json`.

The lock is a flock that the kernel drops with the process, so a killed server leaves nothing to clean by hand. The
record (`serve.json`) outlives a kill: the next start reads the mark in it and ends what the killed one left running.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
from pathlib import Path
from typing import IO, Any

from rungway.serve import processes
from rungway.serve.environment import StartError

LOCK = "serve.lock"
RECORD = "serve.json"
READY = "ready.json"


class Instance:
    """The claim on one state directory, from `claim` to `release`."""

    def __init__(self, state_dir: Path) -> None:
        self.state_dir = state_dir
        self._lock: IO[str] | None = None

    def claim(self) -> None:
        """Take the lock and clear what a killed predecessor left. Raises StartError when a server runs here."""
        self.state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = (self.state_dir / LOCK).open("a+")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            pid = self._recorded().get("pid", "unknown")
            raise StartError(f"a server is already running on {self.state_dir} (process {pid})") from None
        self._lock = lock
        self._clear_leftovers()

    def _clear_leftovers(self) -> None:
        mark = self._recorded().get("mark")
        if isinstance(mark, str) and mark and (stuck := processes.end(mark)):
            raise StartError(f"processes of an earlier server cannot be ended: {stuck}")
        self._forget()

    def record(self, mark: str, run_dir: Path) -> None:
        """Write down how to find this instance's processes; done before the first of them starts."""
        _write_private(self.state_dir / RECORD, {"pid": os.getpid(), "mark": mark, "run_dir": str(run_dir)})

    def announce(self, url: str, dashboard: str, keys: dict[str, str]) -> None:
        """Write `ready.json` (mode 600): the server can be used. `keys` are texts, only of keys made in this run."""
        _write_private(self.state_dir / READY, {"url": url, "dashboard": dashboard, "pid": os.getpid(), "keys": keys})

    def release(self) -> None:
        """Remove the record and `ready.json`, and give the lock back. Call when every process is gone."""
        self._forget()
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def unready(self) -> None:
        """Remove `ready.json`: the server is about to stop."""
        (self.state_dir / READY).unlink(missing_ok=True)

    def _forget(self) -> None:
        self.unready()
        (self.state_dir / RECORD).unlink(missing_ok=True)

    def _recorded(self) -> dict[str, Any]:
        try:
            content = json.loads((self.state_dir / RECORD).read_text())
        except (OSError, ValueError):
            return {}
        return content if isinstance(content, dict) else {}


def check_port(host: str, port: int) -> None:
    """Raise StartError when `host:port` cannot be listened on."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as taken:
            why = "the port is taken" if taken.errno == errno.EADDRINUSE else str(taken.strerror)
            raise StartError(f"cannot listen on {host}:{port}: {why}") from None


def _write_private(path: Path, content: dict[str, Any]) -> None:
    """Write JSON that only this user can read, whole or not at all."""
    draft = path.with_suffix(".new")
    draft.unlink(missing_ok=True)
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        json.dump(content, file, indent=2)
        file.write("\n")
    draft.replace(path)
