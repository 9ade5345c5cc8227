"""A server started for a benchmark: its own process group, a log file, ready when its URL answers, ended by its id."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rungway.errors import RungwayError

TERM_S = 60.0
_LOOK_S = 0.1


class BenchError(RungwayError):
    """A benchmark cannot be run here; the message is one line for the person who asked for it."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Child:
    """One started program. `stop` ends it and whatever it left in its process group."""

    def __init__(self, command: Sequence[str], log: Path, env: dict[str, str] | None = None) -> None:
        self.log = log
        with log.open("wb") as out:
            self._process = subprocess.Popen(
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(env or {})},
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def await_ready(self, ready: Callable[[], bool], within_s: float) -> None:
        """Raises BenchError when the program ends first or the time is over."""
        until = time.monotonic() + within_s
        while not ready():
            if self._process.poll() is not None:
                raise BenchError(f"{self._name} ended with {self._process.returncode}: {self.tail()}")
            if time.monotonic() > until:
                raise BenchError(f"{self._name} was not ready within {within_s:.0f} s: {self.tail()}")
            time.sleep(_LOOK_S)

    @property
    def _name(self) -> str:
        return self.log.stem

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-600:].strip()

    def stop(self, chosen: signal.Signals = signal.SIGTERM) -> None:
        if self._process.poll() is None:
            self._process.send_signal(chosen)
        end_group(self._process, TERM_S)


def end_group(process: subprocess.Popen[Any], grace_s: float) -> None:
    """Waits for a process that was asked to end, then kills it and whatever it left in its group."""
    try:
        process.wait(grace_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(TERM_S)
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass  # nothing was left of its group


def answers(url: str, headers: dict[str, str] | None = None) -> bool:
    """Whether a GET of `url` is answered with 200."""
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers or {}), timeout=2.0) as answer:
            return bool(answer.status == 200)
    except (OSError, urllib.error.URLError, ValueError):
        return False
