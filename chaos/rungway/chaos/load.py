"""Open-loop load: what to send when, and what came of it. Requests leave at planned times whatever happens to earlier
ones, and latency counts from the planned time, so a stalled server (or a stalled client) cannot hide its own delay.

The sending itself is Locust's, in a process of its own (`locustfile.py`): gevent patches the standard library, which no
other code of ours should live with. Plan and samples travel as files.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec

from rungway.errors import RungwayError

PLAN_VARIABLE = "RUNGWAY_LOAD_PLAN"
GAVE_UP = "gave_up"  # code of a request whose client lost patience
SETTLE_S = 30.0  # what a load process may take beyond its plan: start, last answers, writing


class LoadError(RungwayError):
    """The load generator failed, so nothing was measured."""


class Phase(msgspec.Struct, frozen=True):
    """`rate` requests a second for `seconds`, starting `start_s` after the start of the load."""

    name: str
    start_s: float
    seconds: float
    rate: float


class Stream(msgspec.Struct, frozen=True, kw_only=True):
    """One source of requests. `poisson`: random gaps as of many independent callers, else even ones. `in_flight_max`
    bounds the client's memory; a request beyond it is recorded as not sent, never silently delayed. `deadline_ms`: asked
    for by header, 0 = none. `patience_s`: when the client gives up a try that is not whole, 0 = never. `retries`: tries
    after one that was refused, cut or given up, each at once, whatever Retry-After says."""

    name: str
    key: str
    model: str
    max_tokens: int
    phases: tuple[Phase, ...]
    poisson: bool = False
    prompt: str = "Explain how a lock on a canal works."
    timeout_s: float = 30.0
    in_flight_max: int = 1000
    seed: int = 1
    deadline_ms: float = 0.0
    patience_s: float = 0.0
    retries: int = 0

    def longest_s(self) -> float:
        """The longest that one planned request may take with all its tries."""
        return (self.retries + 1) * (self.patience_s or self.timeout_s)


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """`ledger`: path of the SQLite ledger where the client may look, at the first byte of a degraded answer, whether its
    audit row is committed; empty = do not look."""

    url: str
    streams: tuple[Stream, ...]
    samples: str
    ledger: str = ""

    def seconds(self) -> float:
        """How long the plan sends."""
        return max(phase.start_s + phase.seconds for stream in self.streams for phase in stream.phases)


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One planned request. Times in ms count from the planned moment; `lag_ms` is how late it left. `done`: the answer
    ended with [DONE]. `committed`: whether the audit row of a degraded answer was durable at its first byte (None = not
    degraded, or not looked). `status` 0 = no answer; `code` then says why: "client_full" = not sent, "gave_up" = the
    client's patience ended. `tries` were sent, of which all but the last failed; the rest is about the last one, and
    `request_ids` are those that the platform told."""

    stream: str
    phase: str
    planned_wall_ns: int
    lag_ms: float
    status: int
    code: str = ""
    retry_after: str = ""
    request_id: str = ""
    rung: int = 0
    degraded: str = "none"
    served: str = ""
    first_wall_ns: int = 0
    ttft_ms: float | None = None
    e2e_ms: float = 0.0
    tokens: int = 0
    done: bool = False
    committed: bool | None = None
    tries: int = 1
    request_ids: tuple[str, ...] = ()


def arrivals(stream: Stream) -> list[tuple[float, str]]:
    """Planned (seconds after the start, phase name), in order. The same stream gives the same plan."""
    source = random.Random(stream.seed)
    planned: list[tuple[float, str]] = []
    for phase in stream.phases:
        at = phase.start_s
        while True:
            gap = 1.0 / phase.rate
            at += source.expovariate(phase.rate) if stream.poisson else gap
            if at >= phase.start_s + phase.seconds:
                break
            planned.append((at, phase.name))
    return sorted(planned)


def percentile(values: list[float], percent: float) -> float:
    """Nearest rank: the smallest value that at least `percent` of the values do not exceed. NaN of none."""
    if not values:
        return float("nan")
    ordered = sorted(values)
    rank = -(-len(ordered) * percent // 100)
    return ordered[max(0, int(rank) - 1)]


def send(url: str, streams: tuple[Stream, ...], ledger: Path | None = None) -> list[Sample]:
    """Send the plan from one Locust process and return one sample per planned request. Raises LoadError when it ends
    badly or takes longer than the plan, the longest answer and SETTLE_S together."""
    with tempfile.TemporaryDirectory(prefix="rungway-load-") as folder:
        samples = Path(folder) / "samples.json"
        plan = Plan(url=url, streams=streams, samples=str(samples), ledger=str(ledger or ""))
        plan_file = Path(folder) / "plan.json"
        plan_file.touch(mode=0o600)
        plan_file.write_bytes(msgspec.json.encode(plan))
        limit_s = plan.seconds() + max(stream.longest_s() for stream in streams) + SETTLE_S
        options = ["--headless", "--only-summary", "--exit-code-on-error", "0", "--loglevel", "WARNING"]
        users = ["--users", str(len(streams)), "--spawn-rate", str(len(streams)), "--host", url]
        command = [sys.executable, "-m", "locust", "-f", str(Path(__file__).with_name("locustfile.py"))]
        try:
            ran = subprocess.run(
                [*command, *options, *users],
                env={**os.environ, PLAN_VARIABLE: str(plan_file)},
                capture_output=True,
                text=True,
                check=False,
                timeout=limit_s,
                cwd=folder,
            )
        except subprocess.TimeoutExpired:
            raise LoadError(f"the load did not end within {limit_s:.0f} s") from None
        if ran.returncode != 0 or not samples.exists():
            raise LoadError(f"the load process ended with {ran.returncode}: {ran.stderr.strip()[-500:]}")
        found = msgspec.json.decode(samples.read_bytes(), type=list[Sample])
        planned = sum(len(arrivals(stream)) for stream in streams)
        if len(found) != planned:
            raise LoadError(f"{planned} requests were planned, {len(found)} recorded: {ran.stderr.strip()[-500:]}")
        return found
