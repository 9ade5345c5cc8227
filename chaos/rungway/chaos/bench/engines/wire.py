"""What engines' processes have in common: lines of JSON, and the book of one job. Needs nothing but the standard library,
since processes of other engines run it in their own environments.

A parent writes one command a line to stdin and reads one answer a line: first {"ready": facts}, then for {"job": ...} the
events of the job, as timeline.py has both.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

Write = Callable[[dict[str, Any]], None]


def claim_stdout() -> Write:
    """A function that writes a line to what was stdout; from here on, what libraries print goes to stderr."""
    stream = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def write(message: dict[str, Any]) -> None:
        stream.write(json.dumps(message) + "\n")
        stream.flush()

    return write


def commands() -> Iterator[dict[str, Any]]:
    for line in sys.stdin:
        yield json.loads(line)


class Book:
    """The events of a job under way, and when its late prompt is due."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.job = job
        self.streams = len(job["prompts"])
        self.events: list[tuple[int, float, int, float]] = []
        self.late_at_s = math.nan
        self._counts = [0] * self.streams
        self._cpu_before_s = time.process_time()
        self._started_s = time.perf_counter()

    def got(self, stream: int, tokens: int) -> None:
        if tokens:
            self.events.append((stream, time.perf_counter() - self._started_s, tokens, time.process_time()))
            if stream < self.streams:
                self._counts[stream] += tokens

    def late_due(self) -> bool:
        """True once, when it is time to hand over the late prompt; its time is noted."""
        due = bool(self.job["late"]) and math.isnan(self.late_at_s) and min(self._counts) >= self.job["late_after"]
        if due:
            self.late_at_s = time.perf_counter() - self._started_s
        return due

    @property
    def over(self) -> bool:
        """Whether the late prompt has its first token."""
        return bool(self.events) and self.events[-1][0] == self.streams

    def answer(self, problems: list[str]) -> dict[str, Any]:
        return {
            "events": self.events,
            "late_at_s": None if math.isnan(self.late_at_s) else self.late_at_s,
            "cpu_before_s": self._cpu_before_s,
            "problems": problems,
        }
