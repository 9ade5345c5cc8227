"""ServeGen's format: rates and length distributions per client, from which arrivals are drawn."""

from __future__ import annotations

import csv
import json
import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from random import Random

from rungway.simulate.crowd import Crowd, copy_name
from rungway.simulate.errors import SimulationError
from rungway.simulate.workload import Arrival, arrival

WINDOW_S = 600.0
RATE_MAX = 100_000.0
CV_MAX = 100.0  # beyond it almost all gaps are 0 and time does not go on


def servegen(folder: Path, rng: Random, start_s: float, end_s: float | None, crowd: Crowd | None) -> Iterator[Arrival]:
    """Each client, and each copy of it, draws gamma-distributed gaps with its window's rate and coefficient of variation,
    and lengths from the distributions of its six-hour window. Clients that are silent in the piece are not there."""
    chunks = [path for path in folder.glob("chunk-*-trace.csv") if path.name.split("-")[1].isdecimal()]
    if not chunks:
        raise SimulationError(f"{folder} holds no chunk-N-trace.csv")
    chunks.sort(key=lambda path: int(path.name.split("-")[1]))
    clients: list[tuple[Path, list[_Window]]] = []
    for trace in chunks:
        windows = [window for window in _windows(trace) if window.within(start_s, end_s)]
        if windows:
            clients.append((trace, windows))
    crowd = crowd or Crowd()
    for (trace, windows), copies in zip(clients, crowd.copies(len(clients)), strict=True):
        client = trace.name.split("-")[1]
        lengths = _Lengths(trace.with_name(f"chunk-{client}-dataset.json"))
        for copy in range(copies):
            name = copy_name(f"client-{client}", copy, copies)
            for window in windows:
                yield from window.draw(name, crowd.load / copies, lengths, rng)


def _windows(trace: Path) -> Iterator[_Window]:
    with trace.open() as file:
        for row in csv.reader(file):
            if len(row) < 3:
                raise ValueError(
                    f"{trace.name}: a window begins with its start, rate and variation, not {','.join(row)[:60]!r}"
                )
            window = _Window(float(row[0]), float(row[1]), float(row[2] or 1.0))
            if not (math.isfinite(window.start_s) and 0 <= window.rate <= RATE_MAX and 0 <= window.cv <= CV_MAX):
                raise ValueError(
                    f"{trace.name}: {','.join(row)[:60]!r} is no window (rate at most {RATE_MAX:g}, "
                    f"variation at most {CV_MAX:g})"
                )
            yield window


@dataclass(frozen=True, slots=True)
class _Window:
    """A client's rate per second and coefficient of variation for ten minutes."""

    start_s: float
    rate: float
    cv: float

    def within(self, start_s: float, end_s: float | None) -> bool:
        here = self.start_s + WINDOW_S > start_s and (end_s is None or self.start_s < end_s)
        return here and self.rate > 0

    def draw(self, tenant: str, share: float, lengths: _Lengths, rng: Random) -> Iterator[Arrival]:
        """A stationary process: the first gap is what is left of one under way (a random part of a length-biased gap), so
        that any window, however few its requests, has rate x time of them on average."""
        shape = 1.0 / max(self.cv, 0.05) ** 2
        scale = 1.0 / (shape * self.rate * share)
        at_s = self.start_s + rng.random() * rng.gammavariate(shape + 1.0, scale)
        while at_s < self.start_s + WINDOW_S:
            drawn = lengths.draw(at_s, rng)
            if drawn is not None:
                yield arrival(at_s, tenant, *drawn)
            at_s += rng.gammavariate(shape, scale)


class _Lengths:
    """Inverse cumulative distributions of input and output tokens per window of a client's file."""

    def __init__(self, path: Path) -> None:
        self._windows: list[tuple[float, tuple[_Table, _Table]]] = []
        found = json.loads(path.read_text())
        if not isinstance(found, dict):
            raise ValueError(f"{path.name} is no object of windows")
        for start, entry in sorted(found.items(), key=lambda pair: float(pair[0])):
            tables = _table(entry["input_tokens"]), _table(entry["output_tokens"])
            if tables[0] is not None and tables[1] is not None:
                self._windows.append((float(start), (tables[0], tables[1])))
        self._starts = [start for start, _ in self._windows]

    def draw(self, at_s: float, rng: Random) -> tuple[int, int] | None:
        if not self._windows:
            return None
        prompt, output = self._windows[max(0, bisect_right(self._starts, at_s) - 1)][1]
        return _inverse(prompt, rng), _inverse(output, rng)


_Table = tuple[list[int], list[float]]


def _table(text: str) -> _Table | None:
    """`{tokens: probability, ...}` as the file writes it: JSON but for its bare keys."""
    values, weights = [], []
    for part in text.strip("{} ").split(","):
        tokens, _, probability = part.partition(":")
        if probability:
            values.append(int(float(tokens)))
            weights.append(float(probability))
    if values and not (min(weights) >= 0 and 0 < sum(weights) < math.inf):
        raise ValueError("the probabilities of lengths are not above 0")
    return (values, list(accumulate(weights))) if values else None


def _inverse(table: _Table, rng: Random) -> int:
    values, heights = table
    return values[min(len(values) - 1, bisect_left(heights, rng.random() * heights[-1]))]
