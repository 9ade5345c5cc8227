"""Samples while a simulation runs, and the numbers that are reported at its end.

Service is weighted as in VTC: a prompt token counts 1 when its attempt enters an engine, an output token 2 when it is
emitted; both are read from the engines, not from the counters that the queue steers by.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING

from rungway.clock import NS_PER_S
from rungway.simulate.clients import Call

if TYPE_CHECKING:
    from rungway.simulate.replica import SimReplica
    from rungway.simulate.world import World

SAMPLE_NS = NS_PER_S
Key = tuple[str, str]  # (tier, tenant)


@dataclass(frozen=True, slots=True)
class Sample:
    """`served`: weighted tokens so far. `backlogged`: tenants that waited in the tier's queue at this moment."""

    at_s: float
    served: dict[Key, float]
    backlogged: frozenset[Key]
    rungs: dict[str, int]
    depth: dict[str, int]
    in_flight: dict[str, int]


class Sampler:
    """Looks once a second between `start` and `stop`."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.samples: list[Sample] = []
        self.started_ns = self.stopped_ns = 0
        self.replica_s = 0.0
        self._on = False
        self._closed: Counter[Key] = Counter()
        self._counted: dict[str, int] = {}

    def start(self) -> None:
        self._on = True
        self.started_ns = self.world.loop.now_ns
        self._look()

    def stop(self) -> None:
        self._on = False
        self.stopped_ns = self.world.loop.now_ns

    def _look(self) -> None:
        if not self._on:
            return
        world = self.world
        world.loop.after(SAMPLE_NS, self._look)
        self.replica_s += len(world.living())
        served = self.served()
        if not world.controller.alive:
            return
        backlogged: set[Key] = set()
        rungs: dict[str, int] = {}
        depth: dict[str, int] = {}
        in_flight: dict[str, int] = {}
        for pool in world.controller.core.cell.pools.values():
            depth[pool.name] = pool.queue.depth()
            in_flight[pool.name] = pool.in_flight()[0]
            if depth[pool.name]:
                backlogged.update((pool.name, entry.tenant) for entry in pool.queue.entries())
            for (tenant_class, side), state in pool.scopes.items():
                rungs[f"{pool.name} {tenant_class} {side}"] = state.in_force
        at_s = (world.loop.now_ns - self.started_ns) / NS_PER_S
        self.samples.append(Sample(at_s, served, frozenset(backlogged), rungs, depth, in_flight))

    def served(self) -> dict[Key, float]:
        """Weighted tokens per tier and tenant up to this moment."""
        total = Counter(self._closed)
        for replica in self.world.replicas.values():
            self._close(replica, total)
            steps, tier = replica.batch.steps_at(self.world.loop.now_ns), replica.version.tier
            for job in replica.batch.running.values():
                if job.state in ("prefill", "decode"):
                    emitted = min(steps - job.joined, job.target) if job.state == "decode" else job.finished
                    total[(tier, job.share)] += job.prompt - job.cached + 2 * emitted
        return dict(total)

    def _close(self, replica: SimReplica, total: Counter[Key]) -> None:
        done = self._counted.get(replica.name, 0)
        for end in replica.truth[done:]:
            usage = end.usage
            amount = usage.prompt_tokens - usage.cached_tokens + 2 * usage.output_tokens
            key = (replica.version.tier, end.billing.tenant)
            self._closed[key] += amount
            total[key] += amount
        self._counted[replica.name] = len(replica.truth)


def percentile(values: Sequence[float], share: float) -> float | None:
    """Nearest rank; None of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    return ordered[max(0, ceil(share * len(ordered)) - 1)]


def jain(values: Sequence[float]) -> float:
    """(sum x)^2 / (n sum x^2): 1 when all are equal, 1/n when one has everything."""
    squares = sum(value * value for value in values)
    return sum(values) ** 2 / (len(values) * squares) if squares else 1.0


@dataclass(frozen=True, slots=True)
class Fairness:
    """Over windows in which at least two tenants of one tier waited at every sample. `gap_max` is the largest difference
    of service / weight between two such tenants, `bound` = 2U with U = max(longest prompt, 2 x tokens in flight)."""

    windows: int
    jain_min: float | None
    jain_mean: float | None
    gap_max: float
    bound: float


def fairness(samples: Sequence[Sample], weights: dict[str, float], bound: float, window_s: int = 30) -> Fairness:
    """Jain's index and the gap over tumbling windows of `window_s` samples; the gap also over every longer stretch that
    two tenants wait together."""
    indices: list[float] = []
    for begin in range(0, len(samples) - window_s, window_s):
        inside = samples[begin : begin + window_s + 1]
        waiting = frozenset.intersection(*(sample.backlogged for sample in inside))
        for tier in sorted({key[0] for key in waiting}):
            gains = [_gain(inside[0], inside[-1], key, weights) for key in sorted(waiting) if key[0] == tier]
            if len(gains) >= 2:
                indices.append(jain(gains))
    mean = sum(indices) / len(indices) if indices else None
    return Fairness(len(indices), min(indices, default=None), mean, _gap(samples, weights), bound)


def _gain(first: Sample, last: Sample, key: Key, weights: dict[str, float]) -> float:
    return (last.served.get(key, 0.0) - first.served.get(key, 0.0)) / weights[key[1]]


def _gap(samples: Sequence[Sample], weights: dict[str, float]) -> float:
    """Per pair: since when both wait without a break, and how far apart they have come since at most. A pair waits together
    since the later of its two began, so its tenants are looked at by their beginnings, not pair by pair."""
    began: dict[Key, int] = {}
    worst = 0.0
    for number, sample in enumerate(samples):
        began = {key: began.get(key, number) for key in sample.backlogged}
        for tier in {key[0] for key in began}:
            starts: dict[int, list[Key]] = {}
            for key, start in began.items():
                if key[0] == tier:
                    starts.setdefault(start, []).append(key)
            before: list[Key] = []
            for start in sorted(starts):
                new = [_gain(samples[start], sample, key, weights) for key in starts[start]]
                old = [_gain(samples[start], sample, key, weights) for key in before]
                worst = max(worst, max(new) - min(new + old), max(new + old) - min(new))
                before += starts[start]
    return worst


def times_ms(calls: Iterable[Call]) -> list[float]:
    """Times to first token, from the moment at which the client first wanted the answer."""
    return [(call.first_ns - call.sent_ns) / 1e6 for call in calls if call.first_ns]


def grouped(calls: Iterable[Call]) -> dict[str, list[Call]]:
    found: defaultdict[str, list[Call]] = defaultdict(list)
    for call in calls:
        found[call.arrival.tenant].append(call)
    return dict(sorted(found.items()))
