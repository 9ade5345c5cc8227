"""The drills by name: what each shows, on which platform, and the function that runs it against a stage."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rungway.chaos.controller_loss import controller_loss
from rungway.chaos.course import Report, Say
from rungway.chaos.fair_shares import fair_shares
from rungway.chaos.isolation import long_prompt_bully, noisy_neighbour
from rungway.chaos.overload_curve import overload_curve
from rungway.chaos.peak_load import peak_load
from rungway.chaos.retry_storm import retry_storm
from rungway.chaos.stage import Stage

LADDER = Path("config/drill.yaml")
FAIRNESS = Path("config/drill-fairness.yaml")
LEASE = Path("config/drill-lease.yaml")


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
    "overload-curve": Drill(
        "From one to ten times what the platform can serve: does goodput hold, and who is refused first?",
        150,
        overload_curve,
        FAIRNESS,
    ),
    "retry-storm": Drill(
        "Ten times the capacity from clients who try again at once, then a normal day: does it end with its cause?",
        210,
        retry_storm,
        FAIRNESS,
    ),
    "fair-shares": Drill(
        "Four tenants of weights 1 to 4 who always ask for more: is each served by its weight?",
        110,
        fair_shares,
        FAIRNESS,
    ),
    "controller-loss": Drill(
        "The controller is killed under load: do streams go on, are new requests answered, does every bill add up?",
        240,
        controller_loss,
        LEASE,
    ),
}
