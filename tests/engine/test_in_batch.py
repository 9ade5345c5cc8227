"""Fairness and priority inside the batch, with a scripted runner: who runs, who waits, who gives way, and how often."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from engine.native_kit import Heard, drain, work
from engine.test_scheduler import ScriptedRunner, rig
from rungway.engine.core import Core
from rungway.engine.rules import Rules
from rungway.engine.runner import Step
from rungway.engine.scheduler import Scheduler, Slice
from rungway.engine.victims import PREEMPTIONS_MAX

INPUT, OUTPUT = 1.0, 2.0


def running(scheduler: Scheduler) -> set[str]:
    return {seq.group.work.request_id for seq in scheduler.running}


def served(runner: ScriptedRunner, works: dict[str, Any], since: int = 0) -> Counter[str]:
    """Weighted tokens computed by share, from the steps themselves; recomputation never happens in these tests."""
    got: Counter[str] = Counter()
    done: Counter[str] = Counter()
    for at, step in enumerate(runner.steps):
        for name, _, size in step:
            inputs = max(0, min(size, len(works[name].prompt_ids) - done[name]))
            done[name] += size
            if at >= since:
                got[works[name].share] += int(INPUT * inputs + OUTPUT * (size - inputs))
    return got


def backlog(core: Core, asks: dict[str, tuple[int, int, float]]) -> dict[str, Any]:
    """share -> (requests, prompt length, weight); all arrive at once. Different prompts, so that nothing is cached."""
    works = {}
    rng = random.Random(1)
    for share, (count, length, weight) in asks.items():
        for at in range(count):
            prompt = [rng.randrange(250) for _ in range(length)]
            item = work(f"{share}{at}", prompt, max_tokens=8, share=share, weight=weight)
            works[item.request_id] = item
            core.add(item)
    return works


@pytest.mark.parametrize("weight", [1.0, 4.0])
@pytest.mark.parametrize("length", [4, 30])
def test_two_backlogged_tenants_differ_by_no_more_than_the_bound(weight: float, length: int) -> None:
    """One asks ten times as often, and longer. The bound of virtual token counters: 2 max(L_input, w_out * M), M = tokens
    that fit into the batch; checked after every step as long as both wait."""
    core, scheduler, runner = rig(blocks=60, seqs=4, batched=16)
    works = backlog(core, {"loud": (300, length, 1.0), "small": (120, 4, weight)})
    bound = 2 * max(length * INPUT, OUTPUT * 60 * 4)
    tight = 2 * (
        length + OUTPUT * 4 * 8
    )  # what four rows of this size can be ahead: the counters see admissions at once
    for _ in range(250):
        core.step()
        if {seq.group.work.share for seq in scheduler.waiting} < {"loud", "small"}:
            break
        got = served(runner, works)
        assert abs(got["loud"] - got["small"] / weight) <= min(bound, tight)
    assert min(got.values()) > 200 and scheduler.preemptions == 0


def test_one_free_moment_is_shared_and_not_taken_by_who_is_first() -> None:
    """All rows are free at once: the counters move with admission, not only with computation."""
    core, scheduler, _ = rig(blocks=60, seqs=4)
    backlog(core, {"loud": (20, 4, 1.0), "small": (2, 4, 1.0)})
    core.step()
    assert Counter(seq.group.work.share for seq in scheduler.running) == {"loud": 2, "small": 2}


def test_a_tenant_that_was_away_gets_no_credit() -> None:
    core, _, runner = rig(blocks=60, seqs=2)
    works = backlog(core, {"busy": (150, 6, 1.0), "away": (1, 6, 1.0)})
    for _ in range(120):
        core.step()
    works |= {f"back{at}": work(f"back{at}", [at, 7, 9, 1, 2, 3], max_tokens=8, share="away") for at in range(60)}
    for at in range(60):
        core.add(works[f"back{at}"])
    mark = len(runner.steps)
    for _ in range(60):
        core.step()
    got = served(runner, works, since=mark)
    assert abs(got["busy"] - got["away"]) <= 2 * (6 + OUTPUT * 2 * 8)


def test_a_more_urgent_request_starts_in_the_next_step_though_all_rows_and_blocks_are_taken() -> None:
    """And with a prefill of the less urgent band under way that could use the whole budget."""
    core, scheduler, runner = rig(blocks=16, seqs=4, batched=8, context=64)
    for at in range(3):
        core.add(work(f"low{at}", [at + 1] * 3, max_tokens=40, priority=2))
    core.add(work("low-long", list(range(40)), max_tokens=2, priority=2))
    for _ in range(3):
        core.step()
    assert len(scheduler.running) == 4
    core.add(work("high", [9] * 12, max_tokens=3, priority=0))
    core.step()
    assert "high" in running(scheduler) and any(name == "high" and size > 0 for name, _, size in runner.steps[-1])


def test_just_enough_gives_way_newest_of_the_tenant_that_is_ahead_of_the_lowest_band() -> None:
    core, scheduler, _ = rig(blocks=60, seqs=4, batched=64)
    for name, share, priority in (("mid", "m", 1), ("ahead-old", "a", 2), ("ahead-new", "a", 2), ("behind", "b", 2)):
        core.add(work(name, [1] * 4, max_tokens=40, share=share, priority=priority))
    for _ in range(6):
        core.step()
    assert len(scheduler.running) == 4
    core.add(work("high", [9] * 4, max_tokens=3, priority=0))
    core.step()
    assert running(scheduler) == {"mid", "ahead-old", "behind", "high"}
    assert scheduler.preemptions == 1


def test_nobody_gives_way_where_it_would_not_help() -> None:
    core, scheduler, _ = rig(blocks=10, seqs=4, batched=64, context=40)
    core.add(work("peer", [1] * 28, max_tokens=9, priority=0))
    core.add(work("low", [2] * 2, max_tokens=4, priority=2))
    core.step()
    core.add(work("high", [3] * 20, max_tokens=4, priority=0))
    core.step()
    assert running(scheduler) == {"peer", "low"} and scheduler.preemptions == 0


@pytest.mark.parametrize("priority", [1, 2])
def test_equal_or_lower_priority_never_preempts(priority: int) -> None:
    core, scheduler, _ = rig(blocks=60, seqs=2)
    for at in range(2):
        core.add(work(f"first{at}", [at], max_tokens=20, priority=1))
    core.step()
    for at in range(6):
        core.add(work(f"later{at}", [at], max_tokens=2, priority=priority, share="other", weight=9.0))
    for _ in range(15):
        core.step()
        assert running(scheduler) == {"first0", "first1"}
    assert scheduler.preemptions == 0


def test_who_gave_way_often_enough_is_pinned_and_keeps_output_and_place() -> None:
    core, scheduler, _ = rig(blocks=60, seqs=1)
    heard = Heard()
    heard.take(core.add(work("low", [1], max_tokens=30, priority=2)))
    heard.take(core.add(work("low-next", [1], max_tokens=2, priority=2)))
    for at in range(8):
        heard.take(core.step())
        heard.take(core.step())
        heard.take(core.add(work(f"high{at}", [at], max_tokens=1, priority=0)))
    drain(core, heard)
    assert scheduler.preemptions == PREEMPTIONS_MAX
    assert heard.tokens("low") == list(range(2, 32)), "nothing lost, nothing twice"


def test_who_gave_way_comes_back_before_younger_ones_of_its_share() -> None:
    core, scheduler, _ = rig(blocks=60, seqs=2)
    for name in ("one", "two", "three", "four"):
        core.add(work(name, [1], max_tokens=6, priority=1))
    core.step()
    for at in range(2):
        core.add(work(f"high{at}", [at], max_tokens=2, priority=0))
    core.step()
    assert running(scheduler) == {"high0", "high1"}
    assert [seq.group.work.request_id for seq in scheduler.waiting] == ["one", "two", "three", "four"]
    while running(scheduler) & {"high0", "high1"} or not scheduler.running:
        core.step()
    assert running(scheduler) == {"one", "two"}


@pytest.mark.parametrize("seed", range(4))
def test_random_bands_conserve_tokens_and_starve_nobody(seed: int) -> None:
    """Every request ends with all its tokens, in order; the most urgent band ends each of its requests within the steps
    that all work ahead of it takes, whatever the others do."""
    rng = random.Random(seed)
    core, scheduler, _ = rig(blocks=rng.choice([14, 20, 30]), seqs=3, batched=12, context=48)
    heard = Heard()
    works: dict[str, Any] = {}
    since: dict[str, int] = {}
    outstanding: dict[str, int] = {}  # of the most urgent band: tokens
    for tick in range(1500):
        if len(works) < 150 and rng.random() < 0.3:
            item = work(
                f"r{tick}",
                [rng.randrange(250) for _ in range(rng.randint(1, 20))],
                max_tokens=rng.randint(1, 20),
                priority=rng.randrange(3),
                share=rng.choice("ab"),
                weight=rng.choice([1.0, 2.0]),
            )
            works[item.request_id] = item
            heard.take(core.add(item))
            if item.priority == 0:
                ahead = sum(outstanding.values())
                outstanding[item.request_id] = len(item.prompt_ids) + item.sampling.max_tokens
                since[item.request_id] = tick + ahead + outstanding[item.request_id]  # one token a step is the least
        if core.busy:
            heard.take(core.step())
        for name in [name for name in outstanding if (got := heard.deltas.get((name, 0))) and got[-1].finish]:
            del outstanding[name]
            assert tick <= since[name]
        assert all(tick <= since[name] for name in outstanding)
        assert core.check() == []
    drain(core, heard)
    assert scheduler.preemptions > 0
    for name, item in works.items():
        last = item.prompt_ids[-1]
        count = min(item.sampling.max_tokens, 48 - len(item.prompt_ids))
        assert heard.tokens(name) == [(last + 1 + at) % 250 for at in range(count)]


@pytest.mark.parametrize("seed", range(3))
def test_the_batch_is_never_left_short_while_something_waits_and_fits(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(seed)
    fixed = Rules(long_prefill_tokens=16)  # no step without prefills to measure decodes
    core, scheduler, runner = rig(blocks=24, seqs=4, batched=16, context=48, rules=fixed)
    for at in range(60):
        prompt = [rng.randrange(250) for _ in range(rng.randint(1, 30))]
        core.add(work(f"r{at}", prompt, max_tokens=rng.randint(1, 12), share=rng.choice("abc")))
    run, before = runner.run, 0

    def checked(step: list[Slice]) -> Step:
        head = scheduler.waiting.head()
        room = scheduler.max_num_seqs > len(scheduler.running) and sum(size for _, size in step) < 16
        if head is not None and room and scheduler.preemptions == before:
            missing = scheduler.pool.needed(len(head.tokens)) - len(head.blocks)
            assert missing + len(scheduler.running) > scheduler.pool.free, "a request that fits was left waiting"
        return run(step)

    monkeypatch.setattr(runner, "run", checked)
    while core.busy:
        before = scheduler.preemptions
        core.step()
    assert scheduler.pool.free == scheduler.pool.total


@pytest.mark.parametrize("call", range(1, 30))
def test_a_failed_allocation_at_any_call_leaks_nothing(call: int, monkeypatch: pytest.MonkeyPatch) -> None:
    core, scheduler, _ = rig(blocks=40, seqs=3, batched=8)
    take, calls = scheduler.pool.take, 0

    def sometimes(count: int, share: str = "", weight: float = 1.0) -> list[int] | None:
        nonlocal calls
        calls += 1
        return None if calls == call and count == 1 and len(scheduler.running) > 1 else take(count, share, weight)

    monkeypatch.setattr(scheduler.pool, "take", sometimes)
    heard = Heard()
    for at in range(5):
        heard.take(core.add(work(f"r{at}", [at] * 5, max_tokens=12, sequences=1 + at % 2)))
    drain(core, heard)
    assert all(heard.last(f"r{at}").finish == "length" for at in range(5)) and scheduler.pool.free == 40


@pytest.mark.parametrize("steps", range(12))
@pytest.mark.parametrize("victim", ["running", "siblings", "prefill", "waiting", "preempted"])
def test_an_abort_in_any_state_at_any_step_frees_everything(steps: int, victim: str) -> None:
    core, scheduler, _ = rig(blocks=24, seqs=3, batched=8)
    heard = Heard()
    heard.take(core.add(work("running", [1] * 5, max_tokens=30, priority=1)))
    heard.take(core.add(work("siblings", [2] * 9, max_tokens=20, sequences=3)))
    heard.take(core.add(work("prefill", [3] * 30, max_tokens=2)))
    heard.take(core.add(work("preempted", [4] * 5, max_tokens=20, priority=2)))
    heard.take(core.add(work("waiting", [5] * 5, max_tokens=2, priority=2)))
    for _ in range(steps):
        heard.take(core.step())
    ends = core.cancel(victim)
    heard.take(ends)
    assert core.check() == [] and victim not in scheduler.groups
    assert not ends or ends[-1].usage is not None
    drain(core, heard)
    assert scheduler.pool.free == scheduler.pool.total


def test_if_anything_waits_and_nothing_runs_the_next_step_schedules_something() -> None:
    core, scheduler, runner = rig(blocks=12, seqs=2, batched=4, context=48)
    core.add(work("n", [1] * 40, sequences=4, max_tokens=4))
    core.add(work("other", [2] * 40, max_tokens=4, share="b"))
    while core.busy:
        waits = bool(len(scheduler.waiting)) and not scheduler.running
        before = len(runner.steps)
        core.step()
        assert len(runner.steps) == before + 1 and (not waits or scheduler.running or runner.steps[-1])
    assert core.check() == []
