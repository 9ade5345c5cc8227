"""Two hundred worlds in which everything breaks, and the proof that a broken promise would be seen.

A seed that ever failed is kept in `KEPT` with what it found.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from rungway.control.settle import close_if_settled
from rungway.messages import Granted
from rungway.simulate.faults import parse
from rungway.simulate.scenario import random_world
from rungway.simulate.summary import summary
from rungway.simulate.world import World

NINE = "away,clock,controller,cut,delay,gateway,partition,replica,slow"  # what `all` was for the first 10,000 seeds
STORMY = "delay:12,cut:10,replica:10,gateway:6,controller:8,clock:6,slow:6"
CUTS = "cut:40,delay:8,slow:10"
TEN = f"{NINE},disk"
SLOW_DISK = "disk:20,cut:10,controller:6,partition:4"
SECONDS = 5.0
BATCHES, BATCH = 20, 10

# seed, faults, seconds: what it found
KEPT = [
    (5, "replica:6", 10.0),  # late engine output counted twice as waste, once by progress and once by the log
    (8, "gateway:6", 10.0),  # a grant that died with its gateway held its place for ever
    (7, "controller:6", 10.0),  # a second crash forgot how an ended request had ended
    (0, NINE, 10.0),  # a refusal lost with the controller was judged anew, served, and never billed
    (1022, STORMY, 5.0),  # two tries of an unclaimed request became two rows
    (1079, STORMY, 5.0),  # the same with a restart between them
    (1809, NINE, 10.0),  # admitted from a lease, tried again, ended in a second outage: the second try had its own row
    (2160, NINE, 10.0),  # the same; the tenant's spent money was counted twice
    (37, CUTS, 8.0),  # a replica that was only cut off ran on without places, and got as much work again
    (4009, NINE, 10.0),  # rows decided and not on disk when the controller died were no slack of the budget's check
    (3165, TEN, 10.0),  # an end was given up as nobody's although its engine had just spoken up
    (3923, TEN, 10.0),  # a request whose row was not on disk at a crash came back and went on: its cost was no slack
    (9010, TEN, 10.0),  # a world was over while rows were still on their way to a slow disk
]


def broken(seed: int, faults: str, seconds: float) -> list[str]:
    return random_world(seed, parse(faults), seconds).watch.broken


@pytest.mark.parametrize("batch", range(BATCHES))
def test_every_invariant_holds_whatever_breaks(batch: int) -> None:
    found = {}
    for seed in range(batch * BATCH, (batch + 1) * BATCH):
        violations = broken(seed, STORMY, SECONDS)
        if violations:
            found[f"rungway simulate --seed {seed} --faults {STORMY} --duration {SECONDS:g}"] = violations[0]
    assert not found


@pytest.mark.parametrize("batch", range(2))
def test_nothing_is_promised_that_a_slow_disk_has_not_written(batch: int) -> None:
    found = {seed: broken(seed, SLOW_DISK, SECONDS) for seed in range(40 + batch * BATCH, 40 + (batch + 1) * BATCH)}
    assert not {seed: violations for seed, violations in found.items() if violations}


@pytest.mark.parametrize(("seed", "faults", "seconds"), KEPT)
def test_seeds_that_once_failed(seed: int, faults: str, seconds: float) -> None:
    assert broken(seed, faults, seconds) == []


def test_the_faults_are_really_injected() -> None:
    worlds = [random_world(seed, parse(STORMY), SECONDS) for seed in range(20)]
    assert sum(world.faults for world in worlds) > 60
    assert any(call.outcome == "gateway_died" for world in worlds for call in world.clients.calls)
    assert any(row.attempts > 1 for world in worlds for row in world.disk.rows.values())
    assert any(row.wasted_tokens for world in worlds for row in world.disk.rows.values())
    assert any(row.degraded for world in worlds for row in world.disk.rows.values())


def test_the_same_seed_is_the_same_world() -> None:
    first, second = (random_world(7, parse(STORMY), SECONDS) for _ in range(2))
    assert summary(first) == summary(second)
    assert first.loop.turns == second.loop.turns
    assert first.disk.rows == second.disk.rows


def test_another_seed_is_another_world() -> None:
    assert summary(random_world(7, {}, SECONDS)) != summary(random_world(8, {}, SECONDS))


# -- what the invariants would see: each mutation breaks one promise ------------------------------------------------


def any_broken(seeds: range, faults: str) -> list[str]:
    for seed in seeds:
        violations = broken(seed, faults, SECONDS)
        if violations:
            return violations
    return []


def test_a_lost_row_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def forgetful(cell: Any, flight: Any, now: Any) -> None:
        close_if_settled(cell, flight, now)
        if cell.effects.rows and len(cell.settled) % 5 == 0:
            cell.effects.rows.pop()

    monkeypatch.setattr("rungway.control.settle.close_if_settled", forgetful)
    assert any("there is no row" in what or "has no row" in what for what in any_broken(range(4), "none"))


def test_a_wrong_bill_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    from rungway.simulate import disk

    commit = disk.Disk.commit

    def generous(self: disk.Disk, effects: Any) -> None:
        effects.rows = [
            msgspec.structs.replace(row, output_tokens=row.output_tokens - 1) if row.output_tokens > 9 else row
            for row in effects.rows
        ]
        commit(self, effects)

    monkeypatch.setattr(disk.Disk, "commit", generous)
    assert any("engines emitted" in what for what in any_broken(range(4), "none"))


def test_a_leak_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    from rungway.control.pool import Pool

    release = Pool.release

    def leaky(self: Pool, attempt: Any, state: Any) -> None:
        if attempt.tokens % 3:
            release(self, attempt, state)
        attempt.released = True

    monkeypatch.setattr(Pool, "release", leaky)
    assert any_broken(range(4), "none")


@pytest.mark.parametrize("forgotten", ["lag", "unwait"])
def test_a_sum_of_the_queue_that_drifts_would_be_seen(forgotten: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from rungway.control.holdings import Holdings

    change = getattr(Holdings, forgotten)

    def drifting(self: Holdings, tokens: int, *rest: Any, **more: Any) -> None:
        change(self, max(0, tokens - 1), *rest, **more)

    monkeypatch.setattr(Holdings, forgotten, drifting)
    assert any("kept as" in what for what in any_broken(range(8, 14), "slow:20"))


def test_a_grant_before_its_audit_row_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that is held for the commit is sent at once instead."""
    from rungway.simulate.controller import SimController

    flush = SimController._flush

    def hasty(self: SimController) -> None:
        effects = self.core.cell.effects
        early = [pair for pair in effects.held if isinstance(pair[1], Granted)]
        effects.held = [pair for pair in effects.held if pair not in early]
        effects.sends += early
        flush(self)

    monkeypatch.setattr(SimController, "_flush", hasty)
    assert any("before the audit row" in what for what in any_broken(range(12), "none"))


def test_words_that_overtake_the_disk_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is held goes at once in a turn that writes nothing itself, although earlier turns are not written yet."""
    from rungway.simulate.controller import SimController

    flush = SimController._flush

    def hasty(self: SimController) -> None:
        effects = self.core.cell.effects
        if not effects.durable():
            effects.sends += effects.held
            effects.held = []
        flush(self)

    monkeypatch.setattr(SimController, "_flush", hasty)
    found = [what for seed in (42, 43) for what in broken(seed, SLOW_DISK, SECONDS)]
    assert any("is acknowledged before" in what for what in found)
    assert any("before the audit row" in what for what in found)


def test_tries_without_a_place_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rungway.control.returns.runs_on", lambda *_: None)
    assert any("holds no place there" in what for what in broken(37, CUTS, 8.0))


def test_a_double_refill_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    from rungway.policies.bucket import TokenBucket

    refill = TokenBucket._refill

    def twice(self: TokenBucket, limit: int, now_ns: int) -> None:
        last = self._last_ns
        refill(self, limit, now_ns)
        if now_ns > last:
            self._last_ns = now_ns - (now_ns - last) // 2

    monkeypatch.setattr(TokenBucket, "_refill", twice)
    assert any("request bucket gained" in what for what in any_broken(range(12), "none"))


def test_steps_of_the_wall_clock_refill_nothing() -> None:
    for seed in range(6):
        world = random_world(seed, parse("clock:60"), SECONDS)
        assert world.watch.broken == [] and world.faults > 0


def at_rest_again(world: World) -> bool:
    return world.at_rest() and not world.controller.core.cell.strays


def test_nothing_is_left_over_after_a_storm() -> None:
    assert all(at_rest_again(random_world(seed, parse(STORMY), SECONDS)) for seed in range(5))
