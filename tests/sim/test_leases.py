"""Worlds whose controller goes away: leases are used, never overdrawn, and every history fits its interval. Then each promise is
broken on purpose and has to be noticed."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from rungway.clock import NS_PER_S
from rungway.contracts import Budget, GatewaySpec, Quotas
from rungway.control.orphans import write_orphan
from rungway.leases import LeaseSpec
from rungway.policies.bucket import TokenBucket
from rungway.policies.budget import BudgetMeter
from rungway.policies.desk import Desk
from rungway.simulate import scenario
from rungway.simulate.faults import parse
from rungway.simulate.scenario import random_world
from rungway.simulate.workload import Arrival
from rungway.simulate.world import World
from sim.kit import patient, world

AWAY = "away:8,partition:10,replica:6,gateway:3,delay:6,clock:6"
SECONDS = 5.0


def broken(seeds: range, faults: str = AWAY) -> list[str]:
    for seed in seeds:
        found = random_world(seed, parse(faults), SECONDS).watch.broken
        if found:
            return found
    return []


@pytest.mark.parametrize("batch", range(5))
def test_no_seed_overdraws_a_lease_or_leaves_its_interval(batch: int) -> None:
    found, admitted = {}, 0
    for seed in range(batch * 20, (batch + 1) * 20):
        played = random_world(seed, parse(AWAY), SECONDS)
        admitted += played.watch.history.admitted
        if played.watch.broken:
            found[f"rungway simulate --seed {seed} --faults {AWAY} --duration {SECONDS:g}"] = played.watch.broken[0]
    assert not found
    assert admitted > 50


def steady(per_s: float, seconds: float, tenant: str = "acme") -> list[Arrival]:
    return [Arrival(k / per_s, tenant, 20, 10, 10) for k in range(int(per_s * seconds))]


def lone(lease: LeaseSpec, *, budget: Budget | None = None, **quotas: Any) -> World:
    limits = Quotas(
        **({"requests_per_minute": None, "tokens_per_minute": None, "concurrent_requests": None} | quotas),
        queue_max=1000,
    )
    platform = scenario.platform(patient("acme", quotas=limits, budget=budget or Budget(nusd=None)), lease=lease)
    return world(msgspec.structs.replace(platform, gateway=GatewaySpec(replicas=1)))


def test_new_requests_are_answered_while_the_controller_is_dead() -> None:
    played = lone(LeaseSpec(share=0.5))
    played.loop.after(2 * NS_PER_S, played.crash_controller, 8.0)
    played.play(steady(4.0, 12.0))
    assert played.watch.broken == []
    outage = [call for call in played.clients.calls if 5.0 < call.arrival.at_s < 8.5]
    assert len(outage) >= 12
    assert all(call.outcome == "completed" for call in outage)
    assert max(call.first_ns - call.sent_ns for call in outage) < NS_PER_S
    leased = [row for row in played.disk.rows.values() if row.reason == "lease"]
    assert len(leased) == played.watch.history.admitted >= len(outage)


def test_without_leases_the_same_requests_wait() -> None:
    played = lone(LeaseSpec(share=0.0))
    played.loop.after(2 * NS_PER_S, played.crash_controller, 8.0)
    played.play(steady(4.0, 12.0))
    outage = [call for call in played.clients.calls if 5.0 < call.arrival.at_s < 8.5]
    assert played.watch.broken == [] and played.watch.history.admitted == 0
    assert min(call.first_ns - call.sent_ns for call in outage) > NS_PER_S


@pytest.mark.parametrize("fault", ["crash_controller", "partition_controller"])
def test_a_small_quota_gives_a_small_lease_and_not_one_more(fault: str) -> None:
    played = lone(LeaseSpec(share=0.5), requests_per_minute=20)
    played.loop.after(NS_PER_S, getattr(played, fault), 8.0)
    played.play(steady(6.0, 8.0))
    assert played.watch.broken == []
    assert 0 < played.watch.history.admitted <= 10


def test_a_lease_ends_with_its_time() -> None:
    played = lone(LeaseSpec(share=0.5, ttl_s=6.0))
    played.loop.after(NS_PER_S, played.crash_controller, 18.0)
    played.play(steady(2.0, 16.0))
    assert played.watch.broken == []
    late = [call for call in played.clients.calls if 9.0 < call.arrival.at_s < 15.0]
    assert late and not any(played.disk.rows[call.request_ids[-1]].reason == "lease" for call in late)
    assert played.watch.history.admitted > 0


def midnight(step_s: float, *, crash: bool) -> World:
    """A day's budget of ten answers, a wall clock a minute before midnight that is set by `step_s`, and set back."""
    price = scenario.SMALL.cost_nusd(input_tokens=20, cached_tokens=0, output_tokens=10)
    played = lone(LeaseSpec(share=0.5), budget=Budget(nusd=10 * price, per="day"))
    day_ns = 86_400 * NS_PER_S
    played.loop.wall_step_ns = day_ns - played.loop.wall_ns() % day_ns - 60 * NS_PER_S
    played.controller.core.cell.tenants["acme"].budget.reset_s(played.loop.wall_ns())
    played.loop.after(2 * NS_PER_S, played.step_clock, step_s)
    played.loop.after(10 * NS_PER_S, played.step_clock, -step_s)
    if crash:
        played.loop.after(12 * NS_PER_S, played.crash_controller, 0.5)
    played.play(steady(4.0, 90.0))
    return played


@pytest.mark.parametrize("crash", [False, True])
def test_a_clock_that_crosses_midnight_twice_begins_the_day_once(crash: bool) -> None:
    """Forth over midnight a new day begins; set back and reached again, it is the same day and as spent as it was."""
    played = midnight(300.0, crash=crash)
    assert played.watch.broken == []
    answers = sum(call.outcome == "completed" for call in played.clients.calls)
    assert 18 <= answers <= 20


@pytest.mark.parametrize("step_s", [-300.0, 300.0])
@pytest.mark.parametrize(("step_at_s", "bursts"), [(7.1, 1), (6.0, 2)])
def test_a_step_of_the_clock_refills_no_bucket_even_over_a_restart(
    step_s: float, step_at_s: float, bursts: int
) -> None:
    """A step while no controller lives is seen by the newest row. One between two rows of the last minute can hide the older
    ones from the new controller: that gives one burst, and not more."""
    played = lone(LeaseSpec(share=0.5), requests_per_minute=30)
    played.loop.after(int(step_at_s * NS_PER_S), played.step_clock, step_s)
    played.loop.after(7 * NS_PER_S, played.crash_controller, 0.2)
    played.play(steady(8.0, 20.0))
    assert played.watch.broken == []
    answered = sum(call.outcome == "completed" for call in played.clients.calls)
    # A burst, a third of a minute's refill, and what was in flight at the crash.
    assert answered <= bursts * 30 + 10 + 8


# -- mutations: each breaks one promise -----------------------------------------------------------------------------


def test_a_lease_spent_twice_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    affords = Desk._affords

    def generous(self: Desk, tenant: str, part: Any, need: int, nusd: int) -> bool:
        twice = msgspec.structs.replace(part, tokens=2 * part.tokens, requests=2 * part.requests)
        return affords(self, tenant, twice, need, nusd)

    monkeypatch.setattr(Desk, "_affords", generous)
    assert any("its lease is" in what for what in broken(range(40)))


def test_a_bill_that_is_debited_twice_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def twice(cell: Any, orphans: Any, now: Any) -> None:
        write_orphan(cell, orphans, now)
        cell.tenants[next(iter(orphans)).end.billing.tenant].budget.settle(0, 10**7, now.wall_ns)

    monkeypatch.setattr("rungway.control.orphans.write_orphan", twice)
    assert any("the history allows" in what for what in broken(range(60)))


def test_a_double_refund_of_money_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    settle = BudgetMeter.settle

    def twice(self: BudgetMeter, held_nusd: int, cost_nusd: int, wall_ns: int) -> None:
        settle(self, held_nusd, cost_nusd - max(0, held_nusd - cost_nusd), wall_ns)

    monkeypatch.setattr(BudgetMeter, "settle", twice)
    assert any("the history allows" in what for what in broken(range(12), "none"))


def test_a_double_refund_of_tokens_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    give_back = TokenBucket.give_back

    def twice(self: TokenBucket, n: int, now_ns: int) -> None:
        give_back(self, n, now_ns)
        give_back(self, n, now_ns)

    monkeypatch.setattr(TokenBucket, "give_back", twice)
    platform = scenario.platform(
        patient(
            "acme",
            quotas=Quotas(requests_per_minute=None, tokens_per_minute=6000, concurrent_requests=None, queue_max=1000),
        )
    )
    played = world(platform)
    # Bounds of 200 tokens, answers of 100: half of each reservation comes back, here twice.
    played.play([Arrival(k / 8.0, "acme", 20, 100, 200) for k in range(240)])
    assert any("was admitted" in what for what in played.watch.broken)
