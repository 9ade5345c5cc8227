"""The first step of a graceful end: HAProxy takes no new connection and the answers that run may finish.

Serve's own shutdown ends HAProxy at once and with it every stream, so this comes before it. HAProxy alone does not know
all that runs: after a reload the old worker carries its streams to their end and answers no questions, so the controller
is asked as well. Serve's own proxy has no way to be told; there the requests are only waited for.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from pathlib import Path

from rungway.serve.deadline import Deadline
from rungway.serve.haproxy import FRONTEND

_ANSWER_S = 2.0
_LOOK_S = 0.1
_LAST_BYTES_S = 0.3
"""From the end of a request as the controller sees it to its last byte at the client."""


def drain(haproxy_home: Path, in_flight: Callable[[], int], limit_s: float) -> None:
    """Close the front door of the HAProxy below `haproxy_home` and wait at most `limit_s` for the requests inside:
    those it counts and those that the controller holds (`in_flight`)."""
    deadline = Deadline(limit_s)
    sockets = list(haproxy_home.glob("*/admin.sock"))
    for admin in sockets:
        _ask(admin, f"disable {FRONTEND}")
    while not deadline.passed:
        if not in_flight() and not any(ongoing(_ask(admin, "show stat")) for admin in sockets):
            time.sleep(min(_LAST_BYTES_S, limit_s))
            return
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
