"""What a benchmark says in the end: verdicts against bars, and the rows that they were made from."""

from __future__ import annotations

import math
import os
import platform as machine
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

Say = Callable[[str], None]


@dataclass(frozen=True)
class Verdict:
    """`bar` is what `measured` had to reach, in words for people; `ok` whether it did."""

    what: str
    measured: float
    bar: str
    ok: bool


@dataclass
class Report:
    """`control` holds the measured rows, `notes` what a reader has to know about them."""

    name: str
    verdicts: list[Verdict] = field(default_factory=list)
    control: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def at_least(self, what: str, measured: float, bar: float, unit: str = "x") -> None:
        ok = not math.isnan(measured) and measured >= bar
        self.verdicts.append(Verdict(what, round(measured, 3), f">= {bar:g} {unit}".strip(), ok))

    def at_most(self, what: str, measured: float, bar: float, unit: str = "x") -> None:
        ok = not math.isnan(measured) and measured <= bar
        self.verdicts.append(Verdict(what, round(measured, 3), f"<= {bar:g} {unit}".strip(), ok))

    @property
    def ok(self) -> bool:
        return bool(self.verdicts) and all(verdict.ok for verdict in self.verdicts)

    def to_dict(self) -> dict[str, Any]:
        verdicts = [
            {
                "what": verdict.what,
                "measured": None if math.isnan(verdict.measured) else verdict.measured,
                "bar": verdict.bar,
                "ok": verdict.ok,
            }
            for verdict in self.verdicts
        ]
        return {"name": self.name, "verdicts": verdicts, "control": self.control, "notes": self.notes}


def surroundings() -> str:
    """Machine, load and date, for the notes of a report."""
    model = ""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        model = next(
            (
                line.partition(":")[2].strip()
                for line in cpuinfo.read_text().splitlines()
                if line.startswith("model name")
            ),
            "",
        )
    date = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    return (
        f"{os.cpu_count()} CPUs ({model or machine.machine()}), Python {machine.python_version()}, "
        f"load average {os.getloadavg()[0]:.1f} at the start, {date}"
    )
