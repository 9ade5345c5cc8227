"""The drills by name: what each shows, on which platform, and the function that runs it against a stage."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rungway.chaos.course import Report, Say
from rungway.chaos.isolation import long_prompt_bully, noisy_neighbour
from rungway.chaos.peak_load import peak_load
from rungway.chaos.stage import Stage

LADDER = Path("config/drill.yaml")
FAIRNESS = Path("config/drill-fairness.yaml")


@dataclass(frozen=True)
class Drill:
    """`seconds`: about how long it takes with its own platform, which `config` describes."""

    summary: str
    seconds: int
    run: Callable[[Stage, Say], Report]
    config: Path = LADDER


DRILLS: dict[str, Drill] = {
    "peak-load": Drill(
        "A tenant inside its quota beside one at 10x its fair share: who is degraded first, and is every bill right?",
        120,
        peak_load,
    ),
    "noisy-neighbour": Drill(
        "A neighbour that sends ten times its quota: does a tenant inside its quota feel it?",
        135,
        noisy_neighbour,
        FAIRNESS,
    ),
    "long-prompt-bully": Drill(
        "The same with the longest prompts that the context allows.",
        150,
        long_prompt_bully,
        FAIRNESS,
    ),
}
