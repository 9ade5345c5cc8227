"""The fair server with a prefix cache: prompts begin with documents, and what is said to be cached is not always true."""

from __future__ import annotations

import random
from collections import OrderedDict
from dataclasses import dataclass, field

from policies.fair_server import ROOM, FairServer, Job, random_gap
from rungway.policies.fairness import Queued, Verdict
from rungway.policies.locality import Local


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

    def select(self) -> Queued | None:
        return self.queue.select(self.judge, Local(self.quantum, self.warmth))

    def computed(self, entry: Queued, job: Job) -> int:
        assert isinstance(job, Document)
        key = (job.tenant, job.name)
        job.expected, job.found = int(entry.cached), min(job.prefix, self.cache.get(key, 0))
        self.cache[key] = max(job.prefix, self.cache.get(key, 0))
        self.cache.move_to_end(key)
        while len(self.cache) > self.kept:
            self.cache.popitem(last=False)
        self.hits += job.found
        self.asked += job.input
        return job.input - job.found

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


def random_run(seed: int) -> tuple[float, float]:
    """Worst gap and quantum of one run with random tenants, weights, documents, sizes, bursts and pauses."""
    rng = random.Random(seed)
    server = LocalServer(ROOM, quantum=rng.choice((4.0, 32.0, 128.0)), kept=rng.randint(1, 12), news=rng.randint(1, 9))
    names = rng.randint(1, 6)

    def make(tenant: str, size: int, answer: int, weight: float) -> Document:
        about, prefix = rng.randrange(names), rng.randint(0, size)
        return Document(tenant, size, answer, weight=weight, name=about, prefix=prefix)

    return random_gap(server, rng, make), server.quantum
