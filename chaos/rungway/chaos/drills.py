"""The drills by name: what each shows and the function that runs it against a stage."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rungway.chaos.peak_load import Report, Say, peak_load
from rungway.chaos.stage import Stage


@dataclass(frozen=True)
class Drill:
    """`seconds`: about how long it takes with its own platform."""

    summary: str
    seconds: int
    run: Callable[[Stage, Say], Report]


DRILLS: dict[str, Drill] = {
    "peak-load": Drill(
        "A tenant inside its quota beside one at 10x its fair share: who is degraded first, and is every bill right?",
        120,
        peak_load,
    ),
}
