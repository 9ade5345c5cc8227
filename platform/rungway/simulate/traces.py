"""Public traces as arrivals. A reader knows its format by the file's first line or name; lengths and times are kept as they
are, tenants where the trace has them.

    azure      TIMESTAMP,ContextTokens,GeneratedTokens                 one tenant, named after the file (code, conv)
    tenants    arrival_s,tenant,input_tokens,output_tokens             VTC Arena and other merged traces
    mooncake   {"timestamp" ms, "input_length", "output_length", "hash_ids"} per line; one tenant, prefix blocks
    servegen   a folder of chunk-N-trace.csv and chunk-N-dataset.json  one tenant per client; arrivals are drawn
    sharegpt   num_prefill_tokens,num_decode_tokens,...                lengths only: Poisson arrivals at one per second
"""

from __future__ import annotations

import csv
import json
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import accumulate
from pathlib import Path
from random import Random

from rungway.simulate.crowd import Crowd, copy_name, spread
from rungway.simulate.errors import SimulationError
from rungway.simulate.workload import Arrival, bound_for

SERVEGEN_WINDOW_S = 600.0
SHAREGPT_PER_S = 1.0


def read_trace(
    path: Path, rng: Random, *, start_s: float = 0.0, duration_s: float | None = None, crowd: Crowd | None = None
) -> list[Arrival]:
    """All arrivals in order of time, from 0. `start_s` and `duration_s` cut a piece of the trace's own time; `crowd` copies
    the clients of that piece. Raises SimulationError for a file that is missing or of no known format."""
    if not path.exists():
        raise SimulationError(f"there is no trace {path}")
    end_s = None if duration_s is None else start_s + duration_s
    if path.is_dir():
        found = list(_servegen(path, rng, start_s, end_s, crowd))
    else:
        try:
            with path.open() as file:
                first = file.readline().strip()
            reader = _mooncake if first.startswith("{") else _READERS.get(first.removeprefix("\ufeff"))
            if reader is None:
                raise SimulationError(f"{path}: no known trace format ({first[:60]!r})")
            found = list(reader(path, rng))
        except (OSError, UnicodeDecodeError, KeyError, ValueError) as error:
            raise SimulationError(f"{path} cannot be read as a trace: {error}") from None
    found.sort(key=lambda arrival: arrival.at_s)
    piece = [
        replace(item, at_s=item.at_s - start_s)
        for item in found
        if item.at_s >= start_s and (end_s is None or item.at_s < end_s)
    ]
    if crowd is None or path.is_dir() or not piece:
        return piece
    # Without a given end: the last gap after the last request, as if the trace went on.
    span_s = duration_s if duration_s is not None else piece[-1].at_s * (1 + 1 / len(piece)) or 1.0
    return spread(piece, crowd, span_s)


def _arrival(at_s: float, tenant: str, prompt: int, output: int, blocks: tuple[int, ...] = ()) -> Arrival:
    output = max(1, output)
    return Arrival(at_s, tenant, max(1, prompt), output, bound_for(output), blocks=blocks)


def _azure(path: Path, rng: Random) -> Iterator[Arrival]:
    tenant = path.stem.rsplit("_", 1)[-1].lower()
    start: datetime | None = None
    with path.open() as file:
        for row in csv.DictReader(file):
            at = datetime.fromisoformat(row["TIMESTAMP"][:26])  # seven digits of a second, one too many
            start = start or at
            yield _arrival((at - start).total_seconds(), tenant, int(row["ContextTokens"]), int(row["GeneratedTokens"]))


def _tenants(path: Path, rng: Random) -> Iterator[Arrival]:
    with path.open() as file:
        for row in csv.DictReader(file):
            at_s = float(row["arrival_s"])
            yield _arrival(at_s, row["tenant"], int(row["input_tokens"]), int(row["output_tokens"]))


def _mooncake(path: Path, rng: Random) -> Iterator[Arrival]:
    with path.open() as file:
        for line in file:
            row = json.loads(line)
            blocks = tuple(row["hash_ids"])
            yield _arrival(row["timestamp"] / 1000.0, "mooncake", row["input_length"], row["output_length"], blocks)


def _sharegpt(path: Path, rng: Random) -> Iterator[Arrival]:
    at_s = 0.0
    with path.open() as file:
        for row in csv.DictReader(file):
            at_s += rng.expovariate(SHAREGPT_PER_S)
            yield _arrival(at_s, "sharegpt", int(row["num_prefill_tokens"]), int(row["num_decode_tokens"]))


_READERS: dict[str, Callable[[Path, Random], Iterator[Arrival]]] = {
    "TIMESTAMP,ContextTokens,GeneratedTokens": _azure,
    "arrival_s,tenant,input_tokens,output_tokens": _tenants,
    "num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio": _sharegpt,
}


# -- ServeGen: rates and length distributions per client ----------------------------------------------------------


def _servegen(folder: Path, rng: Random, start_s: float, end_s: float | None, crowd: Crowd | None) -> Iterator[Arrival]:
    """Each client, and each copy of it, draws gamma-distributed gaps with its window's rate and coefficient of variation,
    and lengths from the distributions of its six-hour window. Clients that are silent in the piece are not there."""
    chunks = sorted(folder.glob("chunk-*-trace.csv"), key=lambda path: int(path.name.split("-")[1]))
    if not chunks:
        raise SimulationError(f"{folder} holds no chunk-N-trace.csv")
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
            yield _Window(float(row[0]), float(row[1]), float(row[2] or 1.0))


@dataclass(frozen=True, slots=True)
class _Window:
    """A client's rate per second and coefficient of variation for ten minutes."""

    start_s: float
    rate: float
    cv: float

    def within(self, start_s: float, end_s: float | None) -> bool:
        here = self.start_s + SERVEGEN_WINDOW_S > start_s and (end_s is None or self.start_s < end_s)
        return here and self.rate > 0

    def draw(self, tenant: str, share: float, lengths: _Lengths, rng: Random) -> Iterator[Arrival]:
        """A stationary process: the first gap is what is left of one under way (a random part of a length-biased gap), so
        that any window, however few its requests, has rate x time of them on average."""
        shape = 1.0 / max(self.cv, 0.05) ** 2
        scale = 1.0 / (shape * self.rate * share)
        at_s = self.start_s + rng.random() * rng.gammavariate(shape + 1.0, scale)
        while at_s < self.start_s + SERVEGEN_WINDOW_S:
            drawn = lengths.draw(at_s, rng)
            if drawn is not None:
                yield _arrival(at_s, tenant, *drawn)
            at_s += rng.gammavariate(shape, scale)


class _Lengths:
    """Inverse cumulative distributions of input and output tokens per window of a client's file."""

    def __init__(self, path: Path) -> None:
        self._windows: list[tuple[float, tuple[_Table, _Table]]] = []
        for start, entry in sorted(json.loads(path.read_text()).items(), key=lambda pair: float(pair[0])):
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
    return (values, list(accumulate(weights))) if values else None


def _inverse(table: _Table, rng: Random) -> int:
    values, heights = table
    return values[min(len(values) - 1, bisect_left(heights, rng.random() * heights[-1]))]
