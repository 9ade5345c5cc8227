"""The parent's end of the lines that wire.py describes: starts an engine's process, hands it jobs, ends it."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import threading
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rungway.chaos.bench.child import TERM_S, BenchError, end_group
from rungway.chaos.bench.engines.timeline import Event, Job, Timeline

START_S = 300.0
JOB_S = 240.0


class LineChild:
    """An engine behind JSON lines. Raises BenchError where it ends early, says nothing in time, or reports a problem."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        log: Path,
        env: dict[str, str],
        drop: Sequence[str] = (),
        within_s: float = START_S,
    ) -> None:
        """`env` comes on top of this process's environment, less the names in `drop`. Its first line is due `within_s`."""
        self._name = name
        self._log = log
        inherited = {key: value for key, value in os.environ.items() if key not in drop}
        with log.open("wb") as err:
            self._process = subprocess.Popen(
                list(command),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=err,
                text=True,
                env={**inherited, **env},
                start_new_session=True,
            )
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()
        self.cpu_before_s = 0.0
        try:
            self.facts: dict[str, Any] = self._answer(within_s)["ready"]
        except BenchError:
            self.stop()
            raise

    def run(self, job: Job) -> Timeline:
        answer = self.ask({"job": asdict(job)})
        if answer["problems"]:
            raise BenchError(f"{self._name}: {answer['problems'][0]}")
        self.cpu_before_s = answer["cpu_before_s"]
        late = answer["late_at_s"]
        return Timeline([Event(*event) for event in answer["events"]], float("nan") if late is None else late)

    def ask(self, command: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(command) + "\n")
            self._process.stdin.flush()
        except OSError as error:
            raise BenchError(f"{self._name} has ended: {self._tail()}") from error
        return self._answer(JOB_S)

    def stop(self) -> None:
        """Ends the process and whatever it left in its group."""
        if self._process.poll() is None:
            assert self._process.stdin is not None
            self._process.stdin.close()  # the end of its commands is the end of its work
        end_group(self._process, TERM_S / 6)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def _answer(self, within_s: float) -> dict[str, Any]:
        try:
            line = self._lines.get(timeout=within_s)
        except queue.Empty:
            raise BenchError(f"{self._name} did not answer within {within_s:.0f} s: {self._tail()}") from None
        if not line:
            raise BenchError(f"{self._name} has ended: {self._tail()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _tail(self) -> str:
        return " ".join(self._log.read_text(errors="replace")[-400:].split())
