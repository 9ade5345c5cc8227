"""A real `rungway serve` in a process of its own, for tests and drills: started, awaited, ended by process id."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rungway.serve import processes

ROOT = Path(__file__).resolve().parents[2]
FAKE_CONFIG = ROOT / "config" / "fake.yaml"
START_S = 180.0
STOP_S = 90.0
_OFFLINE = {"HF_HUB_OFFLINE": "1", "RAY_USAGE_STATS_ENABLED": "0"}


def free_port() -> int:
    """A port on loopback that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class PlatformProcess:
    """One `rungway serve`. Its output goes to `output`, beside the state directory."""

    def __init__(
        self, state_dir: Path, *, config: Path = FAKE_CONFIG, port: int | None = None, own_group: bool = False
    ) -> None:
        self.state_dir = state_dir
        self.config = config
        self.port = port or free_port()
        self.output = state_dir.with_suffix(".out")
        self.own_group = own_group
        self.mark = ""
        self.keys: dict[str, str] = {}
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def ready_file(self) -> Path:
        return self.state_dir / "ready.json"

    def command(self, *more: str) -> list[str]:
        """The command line, run by this interpreter."""
        options = ["--config", str(self.config), "--state", str(self.state_dir), "--port", str(self.port)]
        return [sys.executable, "-m", "rungway.cli", "serve", *options, *more]

    def start(self, *more: str, env: dict[str, str] | None = None) -> PlatformProcess:
        """Start it and wait until `ready.json` is there. AssertionError with the output when it ends or takes too long."""
        self.launch(*more, env=env)
        deadline = time.monotonic() + START_S
        while not self.ready_file.exists():
            assert self.running(), f"it ended early:\n{self.text()}"
            assert time.monotonic() < deadline, f"it was not ready in time:\n{self.text()}"
            time.sleep(0.1)
        self.keys = self.ready()["keys"] or self.keys
        self.mark = json.loads((self.state_dir / "serve.json").read_text())["mark"]
        return self

    def launch(self, *more: str, env: dict[str, str] | None = None) -> None:
        """Start it and return at once."""
        with self.output.open("wb") as out:
            self._process = subprocess.Popen(
                self.command(*more),
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**os.environ, **_OFFLINE, **(env or {})},
                start_new_session=self.own_group,
            )

    def run(self, *more: str) -> subprocess.CompletedProcess[str]:
        """Run it to its end: for starts that are refused."""
        return subprocess.run(
            self.command(*more),
            capture_output=True,
            text=True,
            timeout=START_S,
            check=False,
            env={**os.environ, **_OFFLINE},
        )

    def ready(self) -> dict[str, Any]:
        content: dict[str, Any] = json.loads(self.ready_file.read_text())
        return content

    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def text(self) -> str:
        """What it has printed."""
        return self.output.read_text(errors="replace") if self.output.exists() else ""

    def members(self, name: str = "") -> list[int]:
        """Process ids of the processes it started whose command line contains `name`."""
        return [pid for pid in processes.find(self.mark) if name in processes.name_of(pid)]

    def signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def signal_group(self, number: signal.Signals) -> None:
        """To every process of its group, as a terminal or a service manager does; needs `own_group=True`."""
        os.killpg(self.pid, number)

    def wait(self, limit_s: float = STOP_S) -> int:
        """Its exit code."""
        assert self._process is not None
        return self._process.wait(limit_s)

    def stop(self) -> int:
        """End it the way a person would, and by force when that does not work in time. Returns the exit code."""
        if self.running():
            self.signal(signal.SIGTERM)
            try:
                self.wait()
            except subprocess.TimeoutExpired:
                self.signal(signal.SIGKILL)
        code = self.wait()
        if self.mark:
            processes.end(self.mark)
        return code


@contextlib.contextmanager
def running_platform(state_dir: Path, *more: str, config: Path = FAKE_CONFIG) -> Iterator[PlatformProcess]:
    """A ready platform that is stopped at the end, also when the start fails half-way."""
    platform = PlatformProcess(state_dir, config=config)
    try:
        yield platform.start(*more)
    finally:
        platform.stop()
