"""The first step of a graceful end: HAProxy takes no new connection and the answers that run may finish.

Serve's own shutdown ends HAProxy at once and with it every stream, so this comes before it. Without HAProxy nothing is
drained here; Serve's proxy has no way to be told.
"""

from __future__ import annotations

import socket
import time
from pathlib import Path

from rungway.serve.deadline import Deadline
from rungway.serve.haproxy import FRONTEND

_ANSWER_S = 2.0
_LOOK_S = 0.1


def drain(haproxy_home: Path, limit_s: float) -> None:
    """Close the front door of the HAProxy below `haproxy_home` and wait at most `limit_s` for the requests inside."""
    deadline = Deadline(limit_s)
    for admin in haproxy_home.glob("*/admin.sock"):
        _ask(admin, f"disable {FRONTEND}")
        while ongoing(_ask(admin, "show stat")) and not deadline.passed:
            time.sleep(_LOOK_S)


def ongoing(statistics: str) -> int:
    """Requests that run, from HAProxy's CSV statistics: the current sessions of every backend."""
    total = 0
    for line in statistics.splitlines():
        fields = line.split(",")
        if len(fields) > 4 and fields[1] == "BACKEND" and fields[4].isdigit():
            total += int(fields[4])
    return total


def _ask(admin: Path, command: str) -> str:
    """HAProxy's answer on its administration socket; empty when it is gone."""
    answer = b""
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(_ANSWER_S)
            connection.connect(str(admin))
            connection.sendall(command.encode() + b"\n")
            while part := connection.recv(65536):
                answer += part
    except OSError:
        return ""
    return answer.decode(errors="replace")
