"""A small model of a serving pool on a virtual clock, for the properties of the fair queue.

Time is in steps. A request needs input + output tokens of room from dispatch to end; every step each running request
emits one token. Service counts input x 1 at dispatch and output x 2 as it streams.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

from rungway.policies.bands import Band
from rungway.policies.fairness import FairQueue, Queued, Verdict
from rungway.policies.flow import Flow

NEVER = 1 << 62
ROOM, INPUT_MAX, OUTPUT_MAX = 64, 24, 24
U = max(INPUT_MAX, 2 * ROOM)  # of the bound, for servers of this room and jobs of these sizes
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
        while (entry := self.select()) is not None:
            job = entry.payload
            assert isinstance(job, Job)
            self.used += job.input + job.output
            self.running.append(job)
            self.taken.append(job)
            self._serve(job, self.computed(entry, job))

    def select(self) -> Queued | None:
        return self.queue.select(self.judge)

    def computed(self, entry: Queued, job: Job) -> int:
        """Tokens of the job's input that are computed."""
        return job.input

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


def take_all(entry: Queued) -> Verdict:
    return Verdict.TAKE


def entry(
    name: str, tenant: str, band: int = 0, weight: float = 1.0, cost: float = 1.0, deadline: int = NEVER
) -> Queued:
    return Queued(name, tenant, band, weight, cost, deadline, 0)


def enter_unlifted(self: Band, flow: Flow) -> None:
    """Instead of Band.enter: a tenant that comes back has credit for all the time that it was away."""
    self.ready.append((flow.counter, flow.order, flow))
    self.ready.sort()


# -- scenarios: the worst gap of a server, whose jobs `make` makes ---------------------------------------------------


def worst_gap(server: FairServer, weights: dict[str, float], steps: int, offer: Callable[[int], None]) -> float:
    """`offer` submits what comes before each step."""
    meter = GapMeter(weights)
    for step in range(steps):
        offer(step)
        server.dispatch()
        meter.sample(server)
        server.decode()
    return meter.worst


def random_gap(
    server: FairServer, rng: random.Random, make: Callable[[str, int, int, float], Job], steps: int = 120
) -> float:
    """Random tenants, weights, sizes, bursts and pauses. `make`: from tenant, input, output and weight."""
    weights = {f"t{k}": rng.choice([1.0, 1.0, 2.0, 3.5, 8.0]) for k in range(rng.randint(2, 6))}
    sizes = {name: (rng.randint(1, INPUT_MAX), rng.randint(1, OUTPUT_MAX)) for name in weights}

    def offer(step: int) -> None:
        for name, weight in weights.items():
            if rng.random() < 0.15:
                for _ in range(rng.randint(1, 12)):
                    high_in, high_out = sizes[name]
                    server.submit(make(name, rng.randint(1, high_in), rng.randint(1, high_out), weight))

    return worst_gap(server, weights, steps, offer)


def returning_tenant(server: FairServer, make: Callable[[str], Job]) -> float:
    """One tenant is idle while another works, then both want everything."""

    def offer(step: int) -> None:
        for name in ("busy", "late") if step >= 300 else ("busy",):
            while server.queue.depth(name) < 20:
                server.submit(make(name))

    return worst_gap(server, {"busy": 1.0, "late": 1.0}, 600, offer)


def big_and_small_requests(server: FairServer, small: Callable[[int], Job], big: Callable[[], Job]) -> float:
    """The small ones would fit into every gap. `small`: from the step."""

    def offer(step: int) -> None:
        while server.queue.depth("small") < 10:
            server.submit(small(step))
        while step >= 5 and server.queue.depth("big") < 3:
            server.submit(big())

    return worst_gap(server, {"big": 1.0, "small": 1.0}, 600, offer)
