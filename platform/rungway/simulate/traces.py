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
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from random import Random

from rungway.simulate.crowd import Crowd, spread
from rungway.simulate.errors import SimulationError
from rungway.simulate.servegen import servegen
from rungway.simulate.workload import Arrival, arrival, tokens

SHAREGPT_PER_S = 1.0
SPAN_MAX_S = 31 * 86_400.0
REQUESTS_MAX = 5_000_000


def read_trace(
    path: Path, rng: Random, *, start_s: float = 0.0, duration_s: float | None = None, crowd: Crowd | None = None
) -> list[Arrival]:
    """All arrivals in order of time, from 0. `start_s` and `duration_s` cut a piece of the trace's own time; `crowd` copies
    the clients of that piece. Raises SimulationError for a file that is missing or of no known format."""
    if not path.exists():
        raise SimulationError(f"there is no trace {path}")
    end_s = None if duration_s is None else start_s + duration_s
    found = _collect(path, _open(path, rng, start_s, end_s, crowd))
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


def _open(path: Path, rng: Random, start_s: float, end_s: float | None, crowd: Crowd | None) -> Iterator[Arrival]:
    """Its arrivals by the reader of its format; what is wrong shows as they are drawn."""
    if path.is_dir():
        yield from servegen(path, rng, start_s, end_s, crowd)
        return
    with path.open() as file:
        first = file.readline().strip()
    reader = _mooncake if first.startswith("{") else _READERS.get(first.removeprefix("\ufeff"))
    if reader is None:
        raise SimulationError(f"{path}: no known trace format ({first[:60]!r})")
    yield from reader(path, rng)


def _collect(path: Path, arrivals: Iterator[Arrival]) -> list[Arrival]:
    """All of them. Raises SimulationError, with one line on what is wrong and after how many good ones."""
    found: list[Arrival] = []
    try:
        for item in arrivals:
            if not (0.0 <= item.at_s <= SPAN_MAX_S):
                raise ValueError(f"{item.at_s:g} is no second of the {SPAN_MAX_S / 86_400:.0f} days from its beginning")
            if len(found) == REQUESTS_MAX:
                raise ValueError(f"it has more than {REQUESTS_MAX:,} requests")
            found.append(item)
    except KeyError as error:
        raise SimulationError(f"{path} cannot be read as a trace: request {len(found) + 1} has no {error}") from None
    except (OSError, UnicodeDecodeError, csv.Error, ArithmeticError, TypeError, ValueError) as error:
        where = f"after {len(found):,} requests: {error}"
        raise SimulationError(f"{path} cannot be read as a trace, {where}") from None
    return found


def _azure(path: Path, rng: Random) -> Iterator[Arrival]:
    tenant = path.stem.rsplit("_", 1)[-1].lower()
    start: datetime | None = None
    with path.open() as file:
        for row in csv.DictReader(file):
            at = datetime.fromisoformat(str(row["TIMESTAMP"])[:26])  # seven digits of a second, one too many
            start = start or at
            at_s = (at - start).total_seconds()
            yield arrival(at_s, tenant, tokens(row["ContextTokens"]), tokens(row["GeneratedTokens"]))


def _tenants(path: Path, rng: Random) -> Iterator[Arrival]:
    with path.open() as file:
        for row in csv.DictReader(file):
            at_s, lengths = float(row["arrival_s"]), (tokens(row["input_tokens"]), tokens(row["output_tokens"]))
            if not row["tenant"]:
                raise ValueError("a request has no tenant")
            yield arrival(at_s, row["tenant"], *lengths)


def _mooncake(path: Path, rng: Random) -> Iterator[Arrival]:
    with path.open() as file:
        for line in file:
            if not line.strip():
                continue
            row = json.loads(line)
            blocks = tuple(int(block) for block in row["hash_ids"])
            lengths = tokens(row["input_length"]), tokens(row["output_length"])
            yield arrival(float(row["timestamp"]) / 1000.0, "mooncake", *lengths, blocks)


def _sharegpt(path: Path, rng: Random) -> Iterator[Arrival]:
    at_s = 0.0
    with path.open() as file:
        for row in csv.DictReader(file):
            at_s += rng.expovariate(SHAREGPT_PER_S)
            lengths = tokens(row["num_prefill_tokens"]), tokens(row["num_decode_tokens"])
            yield arrival(at_s, "sharegpt", *lengths)


_READERS: dict[str, Callable[[Path, Random], Iterator[Arrival]]] = {
    "TIMESTAMP,ContextTokens,GeneratedTokens": _azure,
    "arrival_s,tenant,input_tokens,output_tokens": _tenants,
    "num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio": _sharegpt,
}
