"""The outer process's side of the inner one: start it, command it, hear it, end it."""

from __future__ import annotations

import multiprocessing
from enum import Enum

from rungway.serve.inside import Command, Job, Kind, run_inside

_END_S = 5.0


class Ended(Enum):
    """Told apart from `no report yet`."""

    YES = "yes"


class Inner:
    """The process that runs Ray. It starts when this is made."""

    def __init__(self, job: Job) -> None:
        spawning = multiprocessing.get_context("spawn")
        self._pipe, theirs = spawning.Pipe()
        self._process = spawning.Process(target=run_inside, args=(job, theirs), name="rungway-inner")
        self._process.start()
        theirs.close()  # so that the end of the process is the end of the pipe

    def next_report(self, patience_s: float) -> tuple[Kind, list[str]] | Ended | None:
        """The next report, None when there is none within `patience_s`, or that the process has ended."""
        try:
            if not self._pipe.poll(patience_s):
                return None
            kind, lines = self._pipe.recv()
        except (EOFError, OSError):
            return Ended.YES
        return Kind(kind), lines

    def command(self, command: Command) -> None:
        """Ask for something; a process that has ended cannot be asked, which the next report tells."""
        try:
            self._pipe.send(str(command))
        except OSError:
            return

    def end(self) -> None:
        """Wait shortly for the process, which is expected to have ended, and kill it otherwise."""
        self._process.join(_END_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join(_END_S)
        self._pipe.close()
