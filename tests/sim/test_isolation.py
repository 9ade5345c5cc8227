"""A noisy neighbour against a victim inside its quota, on an engine whose prefill really costs something (A10G, 7B)."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from random import Random

import pytest

from rungway.contracts import Isolation, Quotas
from rungway.simulate.measure import percentile
from rungway.simulate.workload import Arrival, Stream, arrivals
from sim import kit

LOADED_S = 300.0
QUOTAS = Quotas(requests_per_minute=None, tokens_per_minute=None, concurrent_requests=None, queue_max=100)
SHORT, LONG = (200, 400), (2500, 3500)


def neighbours(times: float, prompts: tuple[int, int]) -> list[Arrival]:
    """The victim's own arrivals are the same in every run; `session` says whose a request is."""
    rate = 0.7 * times if prompts == SHORT else 0.07 * times
    victim = arrivals([Stream("victim", 1.5, (200, 400), (32, 64), end_s=LOADED_S)], Random(5))
    hog = arrivals([Stream("hog", rate, prompts, (128, 256), end_s=LOADED_S)], Random(6)) if times else []
    return sorted((replace(a, session=a.tenant) for a in [*victim, *hog]), key=lambda arrival: arrival.at_s)


@cache
def victims_p99_ms(times: float, *, arm: str = "isolated", cap: float = 0.3, prompts: tuple[int, int] = SHORT) -> float:
    """Time to first token. `fcfs`: nobody is told apart."""
    isolated = arm == "isolated"
    victim = kit.patient(
        "victim", isolation=Isolation(in_flight_share_max=1.0, reserved_share=0.3 if isolated else 0.0)
    )
    hog = kit.patient("hog", isolation=Isolation(in_flight_share_max=cap if isolated else 1.0), quotas=QUOTAS)
    wanted = neighbours(times, prompts)
    if arm == "fcfs":
        wanted = [replace(arrival, tenant="victim") for arrival in wanted]
    version = kit.engine(32, kv_tokens=16_000, max_num_batched_tokens=512)
    settings = {"queue_timeout_s": kit.FOREVER_S, "request_timeout_s": kit.FOREVER_S}
    world = kit.world(
        kit.one_tier(victim, hog, version=version, **settings), report_ms=250.0, costs={"small": "a10g-7b"}
    )
    start_s = world.loop.now_ns / 1e9
    world.clients.begin(replace(arrival, at_s=arrival.at_s + start_s) for arrival in wanted)
    world.loop.run(world.loop.now_ns + int((LOADED_S + 30) * 1e9))
    assert world.watch.broken == []
    calls = [call for call in world.clients.calls if call.arrival.session == "victim"]
    end_ns = world.loop.now_ns
    p99 = percentile([((call.first_ns or end_ns) - call.sent_ns) / 1e6 for call in calls], 0.99)
    assert p99 is not None and len(calls) > 400
    if isolated:
        assert all(call.outcome == "completed" for call in calls)
    return p99


def test_a_victim_hardly_feels_ten_times_its_neighbours_quota() -> None:
    alone, at_quota, at_ten = (victims_p99_ms(times) for times in (0.0, 1.0, 10.0))
    assert at_ten <= 1.25 * at_quota
    assert at_ten <= 1.35 * alone


def test_half_of_the_pool_is_cap_enough_against_the_neighbour_at_quota() -> None:
    assert victims_p99_ms(10.0, cap=0.5) <= 1.25 * victims_p99_ms(1.0, cap=0.5)


def test_the_longest_prompts_are_no_better_weapon() -> None:
    at_quota, at_ten = (victims_p99_ms(times, prompts=LONG) for times in (1.0, 10.0))
    assert at_ten <= 1.25 * at_quota


@pytest.mark.parametrize("prompts", [SHORT, LONG])
def test_without_isolation_the_same_neighbour_breaks_the_victim(prompts: tuple[int, int]) -> None:
    assert victims_p99_ms(10.0, arm="fcfs", prompts=prompts) > 10 * victims_p99_ms(1.0, arm="fcfs", prompts=prompts)


def test_fair_order_alone_does_not_isolate() -> None:
    assert victims_p99_ms(10.0, arm="fair") > 1.35 * victims_p99_ms(1.0, arm="fair")
