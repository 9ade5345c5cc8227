"""The platform that a drill or a demo runs against: its own, started here and ended by process id, or one that runs."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from rungway.chaos.faults import mark_of
from rungway.errors import RungwayError
from rungway.serve import processes

START_S = 240.0
STOP_S = 90.0


class StageError(RungwayError):
    """The platform of a drill did not start, or the given one cannot be used."""


@dataclass(frozen=True)
class Stage:
    """Where to send and with which keys. `ledger`: the SQLite file, where it can be looked into; `state_dir` None for a
    platform that somebody else runs."""

    url: str
    keys: dict[str, str]
    state_dir: Path | None = None

    @property
    def ledger(self) -> Path | None:
        path = self.state_dir / "ledger.db" if self.state_dir is not None else None
        return path if path is not None and path.exists() else None

    def key(self, name: str) -> str:
        """Raises StageError when there is no key of that tenant."""
        if name not in self.keys:
            raise StageError(f"no key for {name!r}: start from an empty state folder, or give the keys")
        return self.keys[name]


def given(url: str, keys_file: Path) -> Stage:
    """A running platform. `keys_file`: ready.json of its first start, or {"keys": {tenant: key}} in the same shape."""
    try:
        content = json.loads(keys_file.read_text())
        keys = {str(name): str(key) for name, key in content["keys"].items()}
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise StageError(f"{keys_file} holds no keys ({type(error).__name__})") from None
    return Stage(url.rstrip("/"), keys)


@contextlib.contextmanager
def own(
    config: Path,
    state: Path | None = None,
    say: Callable[[str], None] = lambda _: None,
    *,
    models: Path | None = None,
    start_s: float = START_S,
) -> Iterator[Stage]:
    """Start `rungway serve` on a free port, yield it ready, and end every process of it. Without `state` the state
    folder is a temporary one and goes, too; its models then lie in the folder `models`, which stays."""
    with contextlib.ExitStack() as exits:
        if state is None:
            state = Path(exits.enter_context(tempfile.TemporaryDirectory(prefix="rungway-drill-"))) / "state"
            if models is not None and models.is_dir():
                state.mkdir(mode=0o700)
                (state / "models").symlink_to(models.resolve())
        output = exits.enter_context(tempfile.TemporaryFile("w+"))
        command = [sys.executable, "-m", "rungway.cli", "serve", "--config", str(config)]
        command += ["--state", str(state), "--port", str(_free_port())]
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        exits.callback(_end, process, state)
        say(f"starting a platform with {config} (process {process.pid})")
        deadline = time.monotonic() + start_s
        while not (state / "ready.json").exists():
            if process.poll() is not None or time.monotonic() > deadline:
                output.seek(0)
                raise StageError(f"the platform did not start: {output.read().strip()[-1000:]}")
            time.sleep(0.1)
        ready = json.loads((state / "ready.json").read_text())
        say(f"ready at {ready['url']}")
        yield Stage(str(ready["url"]), {str(k): str(v) for k, v in ready["keys"].items()}, state)


def _end(process: subprocess.Popen[bytes], state: Path) -> None:
    """SIGTERM, then by force; whatever of it still lives is ended by its mark."""
    mark = ""
    with contextlib.suppress(RungwayError):
        mark = mark_of(state)
    if process.poll() is None:
        os.kill(process.pid, signal.SIGTERM)
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    if mark:
        processes.end(mark)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
