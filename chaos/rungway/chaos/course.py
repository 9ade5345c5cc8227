"""What every drill is made of: a course to run on one platform, arms of load, verdicts, and the books at the end.

    with Course(stage, say) as course:
        samples = course.send("both tenants", streams)        # as many arms as it takes
        verdicts = [...]
        return course.report("name", verdicts, control)       # adds what must hold after any load

Every request of every arm counts in the books, the control arm's too.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import NamedTuple, Self

import msgspec

from rungway.chaos import invariants
from rungway.chaos.invariants import Admin, Verdict
from rungway.chaos.load import GAVE_UP, Sample, Stream, percentile, send
from rungway.chaos.stage import Stage

Say = Callable[[str], None]
LAG_MS_MAX = 100.0


class Report(msgspec.Struct, frozen=True):
    """A drill's result. It holds when every verdict does and the control arm broke as it must."""

    name: str
    verdicts: list[Verdict]
    control: list[Verdict]

    @property
    def ok(self) -> bool:
        return all(verdict.ok for verdict in [*self.verdicts, *self.control])


class Target(NamedTuple):
    """A later or slower answer is no good answer."""

    ttft_ms: float
    tpot_ms: float

    def met(self, sample: Sample) -> bool:
        """A whole, undegraded answer in time. Time counts from the planned moment, retries included."""
        if not sample.done or sample.ttft_ms is None or sample.degraded != "none":
            return False
        tpot_ms = (sample.e2e_ms - sample.ttft_ms) / max(1, sample.tokens - 1)
        return sample.ttft_ms <= self.ttft_ms and tpot_ms <= self.tpot_ms


class Course:
    """One drill's run against a platform: its arms, everything that was sent, and its admin."""

    def __init__(self, stage: Stage, say: Say) -> None:
        self.stage = stage
        self.say = say
        self.admin = Admin(stage.url, stage.key("admin"))
        self.since_s = int(time.time()) - 1
        self.samples: list[Sample] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.admin.close()

    def send(self, what: str, streams: Sequence[Stream]) -> list[Sample]:
        """One arm of load, to its end; one sample per planned request."""
        self.say(what)
        found = send(self.stage.url, tuple(streams), self.stage.ledger)
        self.samples += found
        return found

    def attempts(self) -> list[dict[str, object]]:
        """What the engines did since the start of the course: one row per attempt, newest first."""
        rows: list[dict[str, object]] = self.admin.get("/admin/engine-truth", since=self.since_s, limit=100_000)[
            "attempts"
        ]
        return rows

    def at_rest(self, within_s: float = 30.0) -> bool:
        """Wait until nothing runs or waits, so that one arm does not reach into the next."""
        return invariants.wait_until(lambda: not invariants.held(self.admin.live()), within_s)

    def report(self, name: str, verdicts: Sequence[Verdict], control: Sequence[Verdict]) -> Report:
        """The verdicts and what must hold after any load."""
        tenants = [tenant for tenant in self.stage.keys if tenant not in ("admin", "platform")]
        books = [
            invariants.nothing_held(self.admin),
            invariants.bills_equal_engines(self.admin),
            invariants.one_row_each(self.admin, self.samples, tenants, self.since_s),
            invariants.chain_holds(self.admin),
            as_planned(self.samples),
        ]
        return Report(name, [*verdicts, *books], list(control))


def of(samples: Sequence[Sample], stream: str, *phases: str) -> list[Sample]:
    """Samples of a stream in any of the phases."""
    return [sample for sample in samples if sample.stream == stream and sample.phase in phases]


def ttft_p99_ms(samples: Sequence[Sample]) -> float:
    """Over the answered ones, from the planned moment. Who gave up waiting counts with the time that he waited; who was
    refused does not count, goodput has him."""
    waited = [s.ttft_ms if s.ttft_ms is not None else s.e2e_ms for s in samples if s.ttft_ms is not None or gave_up(s)]
    return percentile(waited, 99)


def gave_up(sample: Sample) -> bool:
    return sample.code == GAVE_UP


def goodput(samples: Sequence[Sample], target: Target) -> float:
    """Share of planned requests that were answered within the target."""
    return sum(target.met(sample) for sample in samples) / len(samples) if samples else math.nan


def median(values: Sequence[float]) -> float:
    """NaN of none, and where one of them is none: a round that measured nothing does not vanish."""
    return statistics.median(values) if values and not any(math.isnan(value) for value in values) else math.nan


def as_planned(samples: Sequence[Sample]) -> Verdict:
    """A load generator that falls behind measures itself."""
    unsent = sum(1 for sample in samples if not sample.status and not gave_up(sample))
    lag_ms = percentile([sample.lag_ms for sample in samples], 99)
    text = f"{len(samples) - unsent:,} of {len(samples):,} answered, sent late by p99 {lag_ms:.0f} ms"
    return Verdict("load sent as planned", text, f"all, <= {LAG_MS_MAX:.0f} ms", not unsent and lag_ms <= LAG_MS_MAX)
