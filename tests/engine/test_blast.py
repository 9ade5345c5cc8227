"""20,000 random steps over everything that the scheduler can be asked for, in pools that are too small: nothing leaks,
nothing stalls, nobody starves, every request ends once and with all its tokens."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import pytest

from engine.native_kit import Heard, work
from engine.test_scheduler import ScriptedRunner, rig
from rungway.engine.protocol import Work
from rungway.engine.rules import Rules, Schedule
from rungway.engine.scheduler import Scheduler
from rungway.engine.victims import PREEMPTIONS_MAX

STEPS = 5000  # for each of the four kinds
RECOUNT = 8  # steps between two full recounts
LIVE_MAX = 40
PROGRESS_STEPS = 100
KINDS = {
    "plain": Rules(),
    "lpm": Rules(schedule=Schedule.LPM),
    "quotas": Rules(kv_soft_quota=0.2, kv_watermark=0.1),
    "all": Rules(schedule=Schedule.LPM, kv_soft_quota=0.15, kv_watermark=0.05, long_prefill_tokens=5),
}


def random_ask(rng: random.Random, name: str) -> Work:
    start = rng.randrange(5) * 50
    beginning = list(range(start, start + 24))[: rng.choice([0, 8, 16, 24])]
    prompt = [*beginning, *(rng.randrange(250) for _ in range(rng.randint(1, 14)))]
    sequences = rng.choice([1, 1, 1, 2, 4])
    resumed = [
        [(prompt[-1] + 1 + at) % 250 for at in range(rng.choice([0, 0, 5]))] for _ in range(rng.choice([0, sequences]))
    ]
    return work(
        name,
        prompt,
        sequences=sequences,
        resume=resumed,
        max_tokens=rng.randint(6, 24),
        share=rng.choice(["a", "a", "a", "b", "c"]),
        weight=rng.choice([1.0, 1.0, 4.0]),
        priority=rng.randrange(3),
    )


class Blast:
    """A core under random load, and what has to hold after each of its steps."""

    def __init__(self, rules: Rules, seed: int) -> None:
        self.rng = random.Random(seed)
        self.core, self.scheduler, self.runner = rig(blocks=self.rng.choice([18, 26, 40]), batched=14, rules=rules)
        self.heard = Heard()
        self.asks: dict[str, Work] = {}
        self.live: list[str] = []
        self.cancelled: set[str] = set()
        self.ticks = self.steps = self.forced = 0
        self.preempted_most = 0

    def tick(self, *, arrivals: bool) -> None:
        rng, core = self.rng, self.core
        self.ticks += 1
        if arrivals and rng.random() < 0.25 and len(self.live) < LIVE_MAX:
            name = f"r{self.ticks}"
            self.asks[name] = random_ask(rng, name)
            self.live.append(name)
            self.heard.take(core.add(self.asks[name]))
        if self.live and rng.random() < 0.03:
            name = rng.choice(self.live)
            ends = core.cancel(name)
            self.cancelled |= {name} if ends else set()
            self.heard.take(ends)
            assert name not in self.scheduler.groups and core.cancel(name) == []
        running = list(self.scheduler.running)
        if running and rng.random() < 0.02:
            self.scheduler.preempt(rng.choice(running))
            self.forced += 1
        self._step()
        self.live = [name for name in self.live if name in self.scheduler.groups]

    def _step(self) -> None:
        if not self.core.busy:
            return
        had = len(self.runner.steps)
        self.heard.take(self.core.step())
        self.steps += 1
        assert len(self.runner.steps) == had + 1, "something waits or runs, and nothing was scheduled"
        step = self.runner.steps[-1]
        assert 0 < sum(size for _, _, size in step) <= 14 and len(step) <= 4
        if self.steps % RECOUNT == 0:
            assert self.core.check() == []
        self.preempted_most = max(
            [self.preempted_most, *(seq.preemptions for seq in self.scheduler.running)], default=0
        )

    def drain(self) -> None:
        for _ in range(20_000):
            if not self.core.busy:
                return
            self._step()
        raise AssertionError("the engine did not come to an end")


def tokens_expected(item: Work, index: int, context: int) -> list[int]:
    resumed = item.resume[index] if item.resume else []
    last = [*item.prompt_ids, *resumed][-1]
    count = min(item.sampling.max_tokens, context - len(item.prompt_ids)) - len(resumed)
    return [(last + 1 + at) % 250 for at in range(count)]


@pytest.mark.parametrize("kind", KINDS)
def test_20000_random_steps_leak_stall_and_starve_never(kind: str) -> None:
    blast = Blast(KINDS[kind], seed=list(KINDS).index(kind))
    while blast.steps < STEPS:
        blast.tick(arrivals=True)
    blast.drain()
    scheduler: Scheduler = blast.scheduler
    assert blast.core.check() == [] and scheduler.pool.free == scheduler.pool.total
    assert not scheduler.groups and not len(scheduler.waiting) and not len(scheduler.running)
    assert len(blast.asks) > 150 and len(blast.cancelled) > 10 and scheduler.preemptions > blast.forced > 20
    context = min(64, scheduler.pool.total * 4)
    cached = 0
    for name, item in blast.asks.items():
        usages = [d.usage for i in range(item.sequences) for d in blast.heard.deltas[name, i] if d.usage is not None]
        assert len(usages) == 1, "each request ends once"
        cached += usages[0].cached_tokens
        for index in range(item.sequences):
            said, last = blast.heard.tokens(name, index), blast.heard.last(name, index)
            expected = tokens_expected(item, index, context)
            assert last.finish == ("length" if name not in blast.cancelled else last.finish)
            assert said == (expected if last.finish == "length" else expected[: len(said)])
    assert cached > 100


@pytest.mark.parametrize("kind", KINDS)
def test_every_request_gets_on_and_gives_way_a_bounded_number_of_times(kind: str) -> None:
    """A closed load of one band: whoever waits longest is served. Each request that lives gets at least a token computed
    in every PROGRESS_STEPS steps once it has begun, and nobody gives way without end."""
    rng = random.Random(7)
    core, scheduler, runner = rig(blocks=24, seqs=4, batched=14, rules=KINDS[kind])
    began: dict[str, int] = {}
    for at in range(60):
        item = work(f"r{at}", [rng.randrange(250) for _ in range(10)], max_tokens=20, share=rng.choice("abc"))
        core.add(item)
    done = 0
    while core.busy:
        core.step()
        done += 1
        assert done < 5000
        for name, _, _ in runner.steps[-1]:
            began[name] = done
        stuck = [name for name, at in began.items() if name in scheduler.groups and done - at > PROGRESS_STEPS]
        assert not stuck
        worst = max((seq.preemptions for seq in scheduler.running), default=0)
        assert worst <= 3 * PREEMPTIONS_MAX
    assert len(began) == 60 and scheduler.preemptions > 0


class Refusing:
    """Stands in for `pool.take`: the `at`-th call with a count finds nothing."""

    def __init__(self, take: Any, at: int) -> None:
        self.take, self.at, self.calls = take, at, 0

    def __call__(self, count: int, *owner: Any) -> list[int] | None:
        self.calls += count > 0
        refused = count > 0 and self.calls == self.at
        return None if refused else self.take(count, *owner)


def load_with_refusal(at: int, rules: Rules) -> tuple[Refusing, Heard, Scheduler, ScriptedRunner]:
    core, scheduler, runner = rig(blocks=20, seqs=3, batched=8, rules=rules)
    refusing = Refusing(scheduler.pool.take, at)
    scheduler.pool.take = refusing  # type: ignore[method-assign]
    heard = Heard()
    for number in range(6):
        item = work(
            f"r{number}",
            [7] * 6 + [number],
            max_tokens=14,
            sequences=1 + number % 2,
            priority=number % 2,
            share="ab"[number % 2],
        )
        heard.take(core.add(item))
    for _ in range(2000):
        if not core.busy:
            break
        heard.take(core.step())
        assert core.check() == []
    assert not core.busy
    return refusing, heard, scheduler, runner


@pytest.mark.parametrize("kind", ["plain", "all"])
def test_a_refused_allocation_at_each_call_in_turn_leaks_no_block_row_or_request(kind: str) -> None:
    total = load_with_refusal(0, KINDS[kind])[0].calls
    assert total > 30
    for at in range(1, total + 1):
        refusing, heard, scheduler, _ = load_with_refusal(at, KINDS[kind])
        assert refusing.calls >= at
        assert scheduler.pool.free == 20 and not scheduler.groups and scheduler.running.rows_free == 3
        for number in range(6):
            for index in range(1 + number % 2):
                said = heard.tokens(f"r{number}", index)
                assert len(said) == 14
                assert all(after == (before + 1) % 250 for before, after in pairwise([number, *said]))
