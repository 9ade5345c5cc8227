"""A small model of a serving pool on a virtual clock, for the properties of the fair queue.

Time is in steps. A request needs input + output tokens of room from dispatch to end; every step each running request
emits one token. Service counts input x 1 at dispatch and output x 2 as it streams.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from rungway.policies.fairness import FairQueue, Queued, Verdict

NEVER = 1 << 62
SHARES = {"interactive": 0.6, "standard": 0.3, "batch": 0.1}


@dataclass
class Job:
    tenant: str
    input: int
    output: int
    band: int = 0
    weight: float = 1.0
    emitted: int = 0


@dataclass
class FairServer:
    """`charging`: "streaming" is the real rule; "completion" charges nothing until the settlement arrives, which is one
    step after the place was given away. `skipping` lets others overtake a request that does not fit."""

    room: int
    queue: FairQueue = field(default_factory=lambda: FairQueue(SHARES))
    charging: str = "streaming"
    skipping: bool = False
    in_flight_max: dict[str, int] = field(default_factory=dict)
    used: int = 0
    serial: int = 0
    running: list[Job] = field(default_factory=list)
    late: list[tuple[str, int, float]] = field(default_factory=list)
    service: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    band_service: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    taken: list[Job] = field(default_factory=list)

    def submit(self, job: Job) -> None:
        self.serial += 1
        cost = float(job.input) if self.charging == "streaming" else 0.0
        self.queue.push(Queued(f"r{self.serial}", job.tenant, job.band, job.weight, cost, NEVER, 0, job))

    def judge(self, entry: Queued) -> Verdict:
        job = entry.payload
        assert isinstance(job, Job)
        cap = self.in_flight_max.get(job.tenant)
        if cap is not None and sum(r.input + r.output for r in self.running if r.tenant == job.tenant) >= cap:
            return Verdict.SKIP_TENANT
        if self.used + job.input + job.output <= self.room:
            return Verdict.TAKE
        return Verdict.SKIP_TENANT if self.skipping else Verdict.STOP

    def dispatch(self) -> None:
        while (entry := self.queue.select(self.judge)) is not None:
            job = entry.payload
            assert isinstance(job, Job)
            self.used += job.input + job.output
            self.running.append(job)
            self.taken.append(job)
            self._serve(job, job.input)

    def decode(self) -> None:
        for tenant, band, tokens in self.late:
            self.queue.charge(tenant, band, tokens)
        self.late.clear()
        for job in self.running:
            job.emitted += 1
            self._serve(job, 2.0)
            if self.charging == "streaming":
                self.queue.charge(job.tenant, job.band, 2.0)
        for job in [job for job in self.running if job.emitted >= job.output]:
            self.running.remove(job)
            self.used -= job.input + job.output
            if self.charging == "completion":
                self.late.append((job.tenant, job.band, job.input + 2.0 * job.output))

    def _serve(self, job: Job, tokens: float) -> None:
        self.service[job.tenant] += tokens
        self.band_service[job.band] += tokens


class GapMeter:
    """Largest |W_f / w_f - W_g / w_g| over any interval in which both of a pair waited all the time."""

    def __init__(self, weights: dict[str, float]) -> None:
        self.weights = weights
        self.names = sorted(weights)
        self.low: dict[tuple[str, str], float] = {}
        self.high: dict[tuple[str, str], float] = {}
        self.worst = 0.0

    def sample(self, server: FairServer) -> None:
        waits = [name for name in self.names if server.queue.depth(name)]
        level = {name: server.service[name] / self.weights[name] for name in waits}
        low: dict[tuple[str, str], float] = {}
        high: dict[tuple[str, str], float] = {}
        for i, f in enumerate(waits):
            for g in waits[i + 1 :]:
                gap = level[f] - level[g]
                low[f, g] = min(self.low.get((f, g), gap), gap)
                high[f, g] = max(self.high.get((f, g), gap), gap)
                self.worst = max(self.worst, high[f, g] - low[f, g])
        self.low, self.high = low, high
