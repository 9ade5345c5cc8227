"""The fair server with a prefix cache: prompts begin with documents, and what is said to be cached is not always true."""

from __future__ import annotations

import random
from collections import OrderedDict
from dataclasses import dataclass, field

from policies.fair_server import FairServer, GapMeter, Job
from rungway.policies.fairness import Queued, Verdict
from rungway.policies.locality import Local

INPUT_MAX, OUTPUT_MAX = 24, 24


@dataclass
class Document(Job):
    """A request about a document: the first `prefix` tokens of its input are the document's."""

    name: int = 0
    prefix: int = 0
    expected: int = 0
    found: int = 0


@dataclass
class LocalServer(FairServer):
    """Holds the `kept` documents used last, per tenant. `told` is what the queue knows of it: renewed every `news` steps,
    so that it is wrong in both directions. Corrections come with the end of a request."""

    quantum: float = 32.0
    kept: int = 6
    news: int = 3
    step: int = 0
    cache: OrderedDict[tuple[str, int], int] = field(default_factory=OrderedDict)
    told: dict[tuple[str, int], int] = field(default_factory=dict)
    hits: int = 0
    asked: int = 0

    def warmth(self, entry: Queued) -> int:
        job = entry.payload
        assert isinstance(job, Document)
        return min(job.prefix, self.told.get((job.tenant, job.name), 0))

    def judge(self, entry: Queued) -> Verdict:
        verdict = super().judge(entry)
        if verdict is Verdict.TAKE:
            entry.cached = float(self.warmth(entry))
        return verdict

    def dispatch(self) -> None:
        local = Local(self.quantum, self.warmth)
        while (entry := self.queue.select(self.judge, local)) is not None:
            job = entry.payload
            assert isinstance(job, Document)
            self.used += job.input + job.output
            self.running.append(job)
            self.taken.append(job)
            key = (job.tenant, job.name)
            job.expected, job.found = int(entry.cached), min(job.prefix, self.cache.get(key, 0))
            self.cache[key] = max(job.prefix, self.cache.get(key, 0))
            self.cache.move_to_end(key)
            while len(self.cache) > self.kept:
                self.cache.popitem(last=False)
            self.hits += job.found
            self.asked += job.input
            self._serve(job, job.input - job.found)

    def decode(self) -> None:
        before = list(self.running)
        super().decode()
        still = {id(job) for job in self.running}
        for job in before:
            if id(job) not in still:
                assert isinstance(job, Document)
                self.queue.charge(job.tenant, job.band, float(job.expected - job.found))
        self.step += 1
        if self.step % self.news == 0:
            self.told = dict(self.cache)


def random_run(seed: int, steps: int = 120, room: int = 64) -> tuple[float, float]:
    """Worst gap and quantum of one run with random tenants, weights, documents, sizes, bursts and pauses."""
    rng = random.Random(seed)
    weights = {f"t{k}": rng.choice([1.0, 1.0, 2.0, 3.5, 8.0]) for k in range(rng.randint(2, 6))}
    sizes = {name: (rng.randint(1, INPUT_MAX), rng.randint(1, OUTPUT_MAX)) for name in weights}
    server = LocalServer(room, quantum=rng.choice((4.0, 32.0, 128.0)), kept=rng.randint(1, 12), news=rng.randint(1, 9))
    meter, names = GapMeter(weights), rng.randint(1, 6)
    for _ in range(steps):
        for tenant, weight in weights.items():
            if rng.random() < 0.15:
                for _ in range(rng.randint(1, 12)):
                    high_in, high_out = sizes[tenant]
                    size = rng.randint(1, high_in)
                    about, prefix = rng.randrange(names), rng.randint(0, size)
                    answer = rng.randint(1, high_out)
                    server.submit(Document(tenant, size, answer, weight=weight, name=about, prefix=prefix))
        server.dispatch()
        meter.sample(server)
        server.decode()
    return meter.worst, server.quantum
