"""Order by locality: the bound, what breaks it, and what it gains."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.fair_server import (
    ROOM,
    SHARES,
    U,
    big_and_small_requests,
    enter_unlifted,
    entry,
    returning_tenant,
    take_all,
    worst_gap,
)
from policies.local_server import Document, LocalServer, random_run
from rungway.policies import locality
from rungway.policies.bands import Band
from rungway.policies.fairness import FairQueue, Queued, Verdict
from rungway.policies.flow import Flow
from rungway.policies.locality import PASSES_MAX, Local

QUANTUM = 32.0
EXAMPLES = 300


@settings(max_examples=EXAMPLES, deadline=None)
@given(st.integers(0, 2**32))
def test_backlogged_tenants_differ_by_at_most_two_u_and_a_quantum(seed: int) -> None:
    worst, quantum = random_run(seed)
    assert worst <= 2 * (U + quantum)


# -- scenarios, and mutations that must break them -------------------------------------------------------------------


def cold_and_warm(server: LocalServer, weights: tuple[float, float] = (1.0, 1.0)) -> float:
    """Both want everything; all that "warm" asks begins with one document, nothing that "cold" asks is ever asked again."""

    def offer(step: int) -> None:
        for tenant, weight in (("cold", weights[0]), ("warm", weights[1])):
            while server.queue.depth(tenant) < 10:
                name, prefix = (0, 20) if tenant == "warm" else (server.serial + 1, 0)
                server.submit(Document(tenant, 24, 4, weight=weight, name=name, prefix=prefix))

    return worst_gap(server, {"cold": weights[0], "warm": weights[1]}, 800, offer)


def coming_back(server: LocalServer) -> float:
    return returning_tenant(server, lambda name: Document(name, 4, 8, name=1, prefix=3))


def big_and_small(server: LocalServer) -> float:
    """The small ones have a cached beginning."""
    return big_and_small_requests(
        server,
        lambda step: Document("small", 3, 6 + step % 5, name=1, prefix=2),
        lambda: Document("big", 24, 36),
    )


SCENARIOS = (cold_and_warm, coming_back, big_and_small)


def test_the_scenarios_hold_the_bound() -> None:
    for scenario in SCENARIOS:
        assert scenario(LocalServer(ROOM, quantum=QUANTUM)) <= 2 * (U + QUANTUM), scenario.__name__
    assert cold_and_warm(LocalServer(ROOM, quantum=QUANTUM), (1.0, 4.0)) <= 2 * (U + QUANTUM)


def test_without_the_lift_the_bound_breaks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Band, "enter", enter_unlifted)
    assert coming_back(LocalServer(ROOM, quantum=QUANTUM)) > 2 * (U + QUANTUM)


def test_without_an_end_of_the_deficit_the_bound_breaks() -> None:
    assert cold_and_warm(LocalServer(ROOM, quantum=math.inf)) > 2 * (U + QUANTUM)


def test_refilling_before_all_are_spent_breaks_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """As soon as one tenant has spent its deficit all get another quantum: the warm one always has some."""

    def eligible_refilled(band: Band, done: set[int]) -> list[Flow]:
        flows = [flow for _, order, flow in band.ready if order not in done]
        if any(flow.counter >= band.level for flow in flows):
            band.level = max(flow.counter for flow in flows) + QUANTUM
        return [flow for flow in flows if flow.counter < band.level]

    monkeypatch.setattr(locality, "_eligible", eligible_refilled)
    assert cold_and_warm(LocalServer(ROOM, quantum=QUANTUM)) > 2 * (U + QUANTUM)


class FreeHits(LocalServer):
    """Who is served from the cache is charged nothing, neither for the rest of its prompt nor for the answer."""

    def judge(self, entry: Queued) -> Verdict:
        verdict = super().judge(entry)
        if entry.cached:
            entry.cached = entry.cost
        return verdict

    def decode(self) -> None:
        paid = {id(job): job.emitted for job in self.running if isinstance(job, Document) and job.expected}
        names = {id(job): job for job in self.running}
        super().decode()
        for key, before in paid.items():
            job = names[key]
            self.queue.charge(job.tenant, job.band, -2.0 * (job.emitted - before))


def test_charging_hits_nothing_breaks_the_bound() -> None:
    assert cold_and_warm(FreeHits(ROOM, quantum=QUANTUM)) > 2 * (U + QUANTUM)


def test_overtaking_what_does_not_fit_breaks_the_bound() -> None:
    assert big_and_small(LocalServer(ROOM, quantum=QUANTUM, skipping=True)) > 2 * (U + QUANTUM)


# -- what it gains, and its limits -----------------------------------------------------------------------------------


def documents(quantum: float | None) -> LocalServer:
    """Two tenants over eight documents each, room in the cache for two."""
    server = LocalServer(120, quantum=quantum or 1e-9, kept=2, news=1)
    for step in range(1500):
        for tenant in ("a", "b"):
            while server.queue.depth(tenant) < 16:
                server.submit(Document(tenant, 24, 4, name=(server.serial * 7 + step) % 8, prefix=20))
        server.dispatch()
        server.decode()
    return server


def test_a_quantum_buys_hits() -> None:
    without, little, more = (documents(quantum) for quantum in (None, 64.0, 512.0))
    rate = [server.hits / server.asked for server in (without, little, more)]
    assert rate[0] + 0.04 < rate[1] < rate[2], rate
    assert more.service["a"] / more.service["b"] == pytest.approx(1.0, abs=0.05)


def serve(queue: FairQueue, warm: dict[str, int], quantum: float = 1000.0) -> str | None:
    taken = queue.select(take_all, Local(quantum, lambda each: warm.get(each.request_id, 0)))
    return None if taken is None else taken.request_id


def test_the_longest_cached_beginning_goes_first_then_the_order_of_vtc() -> None:
    queue = FairQueue(SHARES)
    for name in ("a1", "a2", "b1", "b2"):
        queue.push(entry(name, name[0], cost=10.0))
    warm = {"a2": 5, "b2": 7}
    assert [serve(queue, warm) for _ in range(5)] == ["b2", "a2", "a1", "b1", None]


def test_a_spent_deficit_ends_the_preference() -> None:
    queue = FairQueue(SHARES)
    for k in range(6):
        queue.push(entry(f"a{k}", "a", cost=10.0))
        queue.push(entry(f"b{k}", "b", cost=10.0))
    order = [serve(queue, {f"a{k}": 9 for k in range(6)}, quantum=30.0) for _ in range(12)]
    assert [str(name)[0] for name in order] == list("aaabbbaaabbb")


def test_the_first_in_line_is_overtaken_only_so_often() -> None:
    queue = FairQueue(SHARES)
    queue.push(entry("cold", "a", cost=10.0))
    for k in range(40):
        queue.push(entry(f"w{k}", "a", cost=10.0))
    warm = {f"w{k}": 9 for k in range(40)}
    order = [serve(queue, warm, quantum=1e9) for _ in range(PASSES_MAX + 1)]
    assert order.index("cold") == PASSES_MAX


def test_dispatch_charges_what_is_not_cached() -> None:
    queue = FairQueue(SHARES)
    queue.push(entry("a1", "a", cost=100.0))

    def judge(which: Queued) -> Verdict:
        which.cached = 64.0
        return Verdict.TAKE

    assert queue.select(judge) is not None
    assert queue.counter("a", 0) == 36.0


def test_a_capped_tenant_keeps_no_deficit_and_holds_up_nobody() -> None:
    queue = FairQueue(SHARES)
    for k in range(50):
        queue.push(entry(f"capped{k}", "capped", cost=10.0))
        queue.push(entry(f"free{k}", "free", cost=10.0))

    def judge(which: Queued) -> Verdict:
        return Verdict.SKIP_TENANT if which.tenant == "capped" else Verdict.TAKE

    local = Local(30.0, lambda which: 0)
    assert all(queue.select(judge, local) is not None for _ in range(40))
    assert queue.counter("free", 0) - queue.counter("capped", 0) <= 30.0 + 10.0
    order = Counter(taken.tenant for _ in range(10) if (taken := queue.select(take_all, local)))
    assert order["free"] >= 3


def test_skipped_entries_are_passed_and_a_stop_ends_the_choice() -> None:
    queue = FairQueue(SHARES)
    for name in ("a1", "a2", "b1"):
        queue.push(entry(name, name[0], cost=10.0))
    local = Local(1000.0, lambda which: 5 if which.request_id == "a1" else 0)
    taken = queue.select(lambda which: Verdict.SKIP if which.request_id == "a1" else Verdict.TAKE, local)
    assert taken is not None and taken.request_id == "a2"
    asked: list[str] = []

    def stop(which: Queued) -> Verdict:
        asked.append(which.request_id)
        return Verdict.STOP

    assert queue.select(stop, local) is None and asked == ["a1"]


def test_everything_is_served_in_the_end() -> None:
    server = LocalServer(ROOM, quantum=16.0)
    for k in range(120):
        size = 1 + k * 7 % 24
        server.submit(Document(f"t{k % 5}", size, 1 + k % 20, name=k % 3, prefix=size // 2))
    for _ in range(1500):
        server.dispatch()
        server.decode()
    assert server.queue.depth() == 0 and server.used == 0 and len(server.taken) == server.serial
