"""What can no longer begin in time yields: to its own tenant's but for a turn, to other tenants within a bound."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from policies.fair_server import ROOM, SHARES, FairServer, Job, U, entry, random_gap, take_all, worst_gap
from rungway.policies.fairness import FairQueue, Queued

YIELDS = 50.0
EXAMPLES = 300


@dataclass
class LateServer(FairServer):
    """`lags` says of each waiting request, before each step, whether it becomes late now."""

    lags: Callable[[Queued], bool] = lambda waiting: False

    def dispatch(self) -> None:
        for waiting in [each for each in self.queue.entries() if not each.late]:
            if self.lags(waiting):
                self.queue.relegate(waiting)
        super().dispatch()


def yielding(yields: float, lags: Callable[[Queued], bool]) -> LateServer:
    return LateServer(ROOM, FairQueue(SHARES, yields=yields), lags=lags)


@settings(max_examples=EXAMPLES, deadline=None)
@given(st.integers(0, 2**32))
def test_backlogged_tenants_differ_by_at_most_two_u_and_what_is_late_yields(seed: int) -> None:
    rng, lateness = random.Random(seed), random.Random(seed + 1)
    server = yielding(YIELDS, lambda waiting: lateness.random() < 0.1)
    worst = random_gap(server, rng, lambda name, size, answer, weight: Job(name, size, answer, weight=weight))
    assert worst <= 2 * (U + YIELDS)


def one_who_is_always_late(yields: float) -> float:
    server = yielding(yields, lambda waiting: waiting.tenant == "late")

    def offer(step: int) -> None:
        for name in ("late", "on-time"):
            while server.queue.depth(name) < 10:
                server.submit(Job(name, 4, 8))

    return worst_gap(server, {"late": 1.0, "on-time": 1.0}, 600, offer)


def test_who_is_late_yields_to_other_tenants_within_the_bound() -> None:
    assert one_who_is_always_late(0.0) <= 2 * U
    assert YIELDS < one_who_is_always_late(YIELDS) <= 2 * (U + YIELDS)


def test_putting_who_is_late_behind_all_tenants_breaks_the_bound() -> None:
    assert one_who_is_always_late(1e9) > 2 * (U + YIELDS)


def test_a_class_that_knows_its_costs_does_not_pay_for_those_that_do_not() -> None:
    """Answers cost six times their prompts. One class has had 40 of them; then all three wait, and the shares hold at once."""
    queue = FairQueue(SHARES)
    serial = iter(range(1000))

    def dispatch() -> int:
        taken = queue.select(take_all)
        assert taken is not None
        queue.charge(taken.tenant, taken.band, 72.0)
        queue.push(entry(f"r{next(serial)}", taken.tenant, band=taken.band, cost=12.0))
        return taken.band

    queue.push(entry("first", "t0", cost=12.0))
    for _ in range(40):
        dispatch()
    for band in (1, 2):
        queue.push(entry(f"first{band}", f"t{band}", band=band, cost=12.0))
    served = Counter(dispatch() for _ in range(30))
    assert served[0] >= 16 and served[1] >= 7 and served[2] >= 2


def test_who_is_late_is_overtaken_only_so_often() -> None:
    queue = FairQueue(SHARES, turn=3)
    queue.push(entry("old", "a", deadline=0))
    queue.push(entry("older", "a", deadline=0))
    for waiting in list(queue.entries()):
        queue.relegate(waiting)
    served = []
    for number in range(9):
        queue.push(entry(f"new{number}", "a", deadline=number))
        taken = queue.select(take_all)
        assert taken is not None
        served.append(taken.request_id)
    assert served == ["new0", "new1", "new2", "old", "new3", "new4", "new5", "older", "new6"]
