"""The processes of one running platform: found by a mark in their environment, ended by process id.

Every process that `rungway serve` starts (Ray's own, the Serve replicas, HAProxy) inherits one environment variable
with a random value. A process belongs to an instance if and only if it carries that instance's value, so nothing is
ever ended by its name. Needs /proc; where there is none (macOS), Ray's own reaper is all there is and `find` is empty.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path

from rungway.serve.deadline import Deadline

MARK = "RUNGWAY_INSTANCE"
_PROC = Path("/proc")


def find(mark: str) -> list[int]:
    """Process ids of living processes that carry `mark`, this process excluded, in ascending order."""
    if not _PROC.is_dir():
        return []
    wanted = f"{MARK}={mark}".encode()
    found = []
    for entry in _PROC.iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid() and carries(int(entry.name), wanted):
            found.append(int(entry.name))
    return sorted(found)


def carries(pid: int, wanted: bytes) -> bool:
    """Whether process `pid` lives and has the line `wanted` in the environment it was started with."""
    try:
        environment = (_PROC / str(pid) / "environ").read_bytes()
    except OSError:
        return False
    return wanted in environment.split(b"\0") and alive(pid)


def alive(pid: int) -> bool:
    """Whether `pid` runs: a zombie has ended and only waits to be reaped."""
    try:
        status = (_PROC / str(pid) / "stat").read_text()
    except OSError:
        return not _PROC.is_dir() and _signalable(pid)
    return status.rpartition(")")[2].split()[0] not in "ZX"


def _signalable(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except ProcessLookupError:
        return False
    return True


def name_of(pid: int) -> str:
    """The command line of `pid`, for messages; empty when it is gone."""
    try:
        return (_PROC / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


def children() -> list[int]:
    """Direct children of this process that still run (Ray's servers are started as such)."""
    listing = _PROC / "self" / "task" / str(os.getpid()) / "children"
    try:
        pids = [int(word) for word in listing.read_text().split()]
    except OSError:
        return []
    return [pid for pid in pids if alive(pid)]


def end(mark: str, *, term_s: float = 3.0, kill_s: float = 5.0) -> list[int]:
    """End every process that carries `mark`: SIGTERM, then SIGKILL after `term_s`.

    Returns the process ids that still live `kill_s` later (empty = all are gone). The mark is read again before
    each signal, so a process id that was given to a stranger meanwhile is left alone.
    """
    for chosen, patience_s in ((signal.SIGTERM, term_s), (signal.SIGKILL, kill_s)):
        _signal_all(find(mark), chosen)
        if not _wait_gone(mark, patience_s):
            return []
    return find(mark)


def kill(pid: int) -> None:
    """End `pid` at once, as a crash would; nothing happens when it is gone."""
    _signal_all([pid], signal.SIGKILL)


def _signal_all(pids: Iterable[int], chosen: signal.Signals) -> None:
    for pid in pids:
        try:
            os.kill(pid, chosen)
        except ProcessLookupError:
            continue


def _wait_gone(mark: str, patience_s: float) -> bool:
    """Wait until no process carries `mark`; True when some still do after `patience_s`."""
    deadline = Deadline(patience_s)
    while find(mark):
        if deadline.passed:
            return True
        time.sleep(0.05)
    return False
