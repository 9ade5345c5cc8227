"""Faults: ending one process of a running platform as a crash would. Processes are found by the platform's own mark in
their environment and their role in the command line, never by name alone, so no stranger can be hit.
"""

from __future__ import annotations

import contextlib
import json
import time
from enum import StrEnum
from pathlib import Path

from rungway.errors import RungwayError
from rungway.serve import processes


class Role(StrEnum):
    """What can be killed; the value is how Ray names the process."""

    GATEWAY = "rungway:Gateway"
    CONTROLLER = "rungway:Controller"
    REPLICA = "rungway:Replica"


class FaultError(RungwayError):
    """The process to hit is not there, or nothing came in its place."""


def mark_of(state_dir: Path) -> str:
    """The mark of the platform that runs on `state_dir`."""
    try:
        return str(json.loads((state_dir / "serve.json").read_text())["mark"])
    except (OSError, ValueError, KeyError):
        raise FaultError(f"no platform runs on {state_dir}") from None


def pids(mark: str, role: Role, name: str = "") -> list[int]:
    """Process ids of that role whose command line also holds `name` (a tier, say)."""
    found = ((pid, processes.name_of(pid)) for pid in processes.find(mark))
    return [pid for pid, line in found if role in line and name in line]


def holds(pid: int, text: str) -> bool:
    """Whether process `pid` has a file open whose path holds `text`: a replica's id is in the names of its own files."""
    folder = Path("/proc") / str(pid) / "fd"
    try:
        links = list(folder.iterdir())
    except OSError:
        return False
    for link in links:
        with contextlib.suppress(OSError):
            if text in str(link.readlink()):
                return True
    return False


def kill(mark: str, role: Role, name: str = "") -> int:
    """SIGKILL one process of that role and return its id."""
    found = pids(mark, role, name)
    if not found:
        raise FaultError(f"no process {role} {name}")
    processes.kill(found[0])
    return found[0]


def await_successor(mark: str, role: Role, killed: int, name: str = "", *, limit_s: float = 60.0) -> int:
    """Wait until another process of that role runs; its id."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        others = [pid for pid in pids(mark, role, name) if pid != killed]
        if others:
            return others[0]
        time.sleep(0.1)
    raise FaultError(f"nothing came in the place of {role} {name} within {limit_s:.0f} s")
