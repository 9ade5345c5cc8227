"""Longest cached prefix first: more is found, nobody starves, and no tenant gets further ahead than without it."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from engine.native_kit import Heard, drain, work
from engine.test_in_batch import OUTPUT, served
from engine.test_scheduler import ScriptedRunner, rig
from rungway.engine import lpm
from rungway.engine.core import Core
from rungway.engine.rules import Rules, Schedule
from rungway.engine.scheduler import Scheduler

LPM, FCFS = Rules(schedule=Schedule.LPM), Rules(schedule=Schedule.FCFS)


def computed(runner: ScriptedRunner, name: str) -> int:
    return sum(size for step in runner.steps for who, _, size in step if who == name)


def topic(number: int, length: int = 24) -> list[int]:
    return [(number * 40 + at) % 250 for at in range(length)]


def asked_in_turn(rules: Rules, topics: int = 6, rounds: int = 8) -> tuple[float, Scheduler]:
    """One tenant asks about several topics in turn, with a pool that holds few of them. (Part of prompt tokens that were
    found, scheduler)."""
    core, scheduler, _ = rig(blocks=24, seqs=2, batched=16, rules=rules)
    heard = Heard()
    for at in range(topics * rounds):
        core.add(work(f"r{at}", [*topic(at % topics), at], max_tokens=2))
    drain(core, heard)
    usages = [heard.usage(f"r{at}") for at in range(topics * rounds)]
    return sum(usage.cached_tokens for usage in usages) / sum(usage.prompt_tokens for usage in usages), scheduler


def test_more_is_found_than_in_order_of_age() -> None:
    by_age, _ = asked_in_turn(FCFS)
    longest_first, scheduler = asked_in_turn(LPM)
    assert longest_first > 0.6 and longest_first > 2 * by_age
    assert scheduler.check() == [] and scheduler.pool.free == scheduler.pool.total


@pytest.mark.parametrize("rules", [LPM, FCFS])
def test_what_another_is_about_to_compute_is_waited_for_and_not_computed_twice(rules: Rules) -> None:
    core, _, runner = rig(blocks=200, seqs=4, batched=16, context=200, rules=rules)
    heard = Heard()
    for at in range(4):
        heard.take(core.add(work(f"r{at}", [*topic(1, 100), at], max_tokens=4)))
    drain(core, heard)
    first = [computed(runner, f"r{at}") for at in range(4)]
    assert first[0] == 101 + 3
    if rules is LPM:
        assert first[1:] == [1 + 3] * 3, "each computes its own last token and what it says"
    else:
        assert max(first[1:]) > 50
    assert all(heard.tokens(f"r{at}") == [(at + 1 + more) % 250 for more in range(4)] for at in range(4))


def test_a_request_that_is_held_does_not_hold_up_other_tenants() -> None:
    core, scheduler, _ = rig(blocks=200, seqs=4, batched=16, context=200, rules=LPM)
    core.add(work("first", topic(1, 120), max_tokens=4, share="a"))
    core.step()
    core.add(work("second", [*topic(1, 120), 9], max_tokens=4, share="a"))
    core.add(work("other", topic(3, 8), max_tokens=4, share="b", weight=0.01))
    core.step()
    assert {seq.group.work.request_id for seq in scheduler.running} == {"first", "other"}


def test_the_hold_ends_when_the_one_that_was_waited_for_is_gone_or_takes_too_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lpm, "HOLD_STEPS_MAX", 3)
    for cancelled in (True, False):
        core, scheduler, _ = rig(blocks=200, seqs=4, batched=8, context=300, rules=LPM)
        core.add(work("first", topic(1, 250), max_tokens=4))
        core.step()
        core.add(work("second", [*topic(1, 250), 9], max_tokens=4))
        core.step()
        assert len(scheduler.running) == 1
        if cancelled:
            core.cancel("first")
            core.step()
        for _ in range(0 if cancelled else 4):
            core.step()
        assert "second" in {seq.group.work.request_id for seq in scheduler.running}


def test_the_oldest_is_passed_over_a_bounded_number_of_times() -> None:
    core, _, runner = rig(blocks=60, seqs=1, batched=32, rules=LPM)
    core.add(work("warm", [*topic(1), 1], max_tokens=1))
    core.step()
    core.add(work("cold", topic(4), max_tokens=1))
    for at in range(100):
        core.add(work(f"hot{at}", [*topic(1), at], max_tokens=1))
    while core.busy:
        core.step()
    order = list(dict.fromkeys(name for step in runner.steps for name, _, _ in step))
    assert order.index("cold") == 1 + lpm.SKIPS_MAX


def test_no_tenant_gets_further_ahead_than_the_bound_of_the_counters() -> None:
    """The same bound as in order of age: 2 max(L_input, w_out M), checked after every step while both wait, though the
    tenant with the long common beginnings is held again and again."""
    rng = random.Random(4)
    for weight in (1.0, 3.0):
        core, scheduler, runner = rig(blocks=60, seqs=4, batched=16, rules=LPM)
        works: dict[str, Any] = {}
        for at in range(150):
            items = [
                work(f"alike{at}", [*topic(at // 10, 28), at], max_tokens=8, share="alike"),
                work(f"mixed{at}", [rng.randrange(250) for _ in range(9)], max_tokens=8, share="mixed", weight=weight),
            ]
            for item in items:
                works[item.request_id] = item
                core.add(item)
        bound = 2 * (29 + OUTPUT * 4 * 8)
        assert bound <= 2 * max(29, OUTPUT * 60 * 4)
        found: Counter[str] = Counter()
        for _ in range(400):
            core.step()
            if {seq.share for seq in scheduler.waiting} < {"alike", "mixed"}:
                break
            got = charged(runner, works, scheduler, found)
            assert abs(got["alike"] - got["mixed"] / weight) <= bound
        assert min(got.values()) > 300 and scheduler.preemptions == 0


def charged(runner: ScriptedRunner, works: dict[str, Any], scheduler: Scheduler, found: Counter[str]) -> Counter[str]:
    """`served`, where what was found in the cache is no input that was computed."""
    for name, group in scheduler.groups.items():
        if group.cached:
            found[name] = group.cached
    shorter = {
        name: work(name, item.prompt_ids[found[name] :], max_tokens=8, share=item.share) for name, item in works.items()
    }
    return served(runner, shorter)


@pytest.mark.parametrize("seed", range(3))
def test_random_load_ends_with_every_token_and_finds_no_less(seed: int) -> None:
    cached = {}
    for rules in (FCFS, LPM):
        rng = random.Random(seed)
        core, _, _ = rig(blocks=30, seqs=3, batched=12, rules=rules)
        heard = Heard()
        works = {}
        for tick in range(500):
            if len(works) < 80 and rng.random() < 0.4:
                prompt = [*topic(rng.randrange(4))[: rng.choice([8, 16, 24])], rng.randrange(250)]
                item = work(f"r{tick}", prompt, max_tokens=rng.randint(1, 12), share=rng.choice("ab"))
                works[item.request_id] = item
                heard.take(core.add(item))
            if core.busy:
                heard.take(core.step())
            assert core.check() == []
        drain(core, heard)
        for name, item in works.items():
            last = item.prompt_ids[-1]
            assert heard.tokens(name) == [(last + 1 + at) % 250 for at in range(item.sampling.max_tokens)]
        cached[rules.schedule] = sum(heard.usage(name).cached_tokens for name in works)
    assert cached[Schedule.LPM] >= 0.9 * cached[Schedule.FCFS] > 0


def test_without_a_prefix_cache_the_order_is_that_of_age() -> None:
    scheduler = Scheduler(
        rig(blocks=4)[1].pool, max_num_seqs=1, max_num_batched_tokens=4, prefix_cache=False, rules=LPM
    )
    assert scheduler._order is None and isinstance(rig(blocks=4, rules=LPM)[0], Core)


def test_others_go_past_a_held_request_only_as_far_as_if_it_had_been_admitted() -> None:
    core, scheduler, _ = rig(blocks=200, seqs=4, batched=16, context=200, rules=LPM)
    core.add(work("stay", [3], max_tokens=150, share="a"))
    core.add(work("much", topic(4, 100), max_tokens=1, share="b", weight=0.05))
    for _ in range(20):
        core.step()
    core.add(work("first", topic(1, 120), max_tokens=4, share="a"))
    core.step()
    core.add(work("second", [*topic(1, 120), 9], max_tokens=4, share="a"))
    core.add(work("other", topic(3, 8), max_tokens=4, share="b"))
    core.step()
    assert scheduler.waiting.got("b") > scheduler.waiting.got("a") + 121
    assert {seq.group.work.request_id for seq in scheduler.running} == {"stay", "first"}
