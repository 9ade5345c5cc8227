"""Golden runs of the fair queue under the real controller: weights, a public trace of 27 tenants, Jain's index."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from rungway.overload import ShedSpec
from rungway.simulate.measure import fairness, percentile
from rungway.simulate.summary import gap_bound
from rungway.simulate.traces import read_trace
from rungway.simulate.workload import Arrival, Stream, arrivals
from rungway.simulate.world import World
from sim import kit

# Nobody is late, so nobody yields: the bound is 2 U.
NO_TARGETS: dict[str, Any] = {"shed": ShedSpec(target_factor=None)}
ENDLESS = NO_TARGETS | {"queue_timeout_s": kit.FOREVER_S, "request_timeout_s": kit.FOREVER_S}

WEIGHTS = {"t1": 1.0, "t2": 2.0, "t3": 3.0, "t4": 4.0}
LOADED_S = 150.0


@pytest.fixture(scope="module")
def weighted() -> World:
    """Four tenants, each asking for half of the capacity, for `LOADED_S`."""
    tenants = [kit.patient(name, weight=weight) for name, weight in WEIGHTS.items()]
    world = kit.world(kit.one_tier(*tenants, **ENDLESS))
    streams = [Stream(name, 7.0, (64, 64), (64, 64), end_s=LOADED_S, even=True) for name in WEIGHTS]
    run_for(world, arrivals(streams, Random(1)), LOADED_S)
    assert not world.watch.broken
    return world


def run_for(world: World, wanted: list[Arrival], seconds: float) -> None:
    """Play exactly that long, whatever still waits then."""
    start_s = world.loop.now_ns / 1e9
    world.clients.begin(replace(arrival, at_s=arrival.at_s + start_s) for arrival in wanted)
    world.loop.run(world.loop.now_ns + int(seconds * 1e9))
    world.sampler.stop()


def test_service_follows_the_weights_within_two_percent(weighted: World) -> None:
    served = {tenant: tokens for (_, tenant), tokens in weighted.sampler.served().items()}
    unit = sum(served.values()) / sum(WEIGHTS.values())
    for tenant, weight in WEIGHTS.items():
        assert served[tenant] / unit == pytest.approx(weight, rel=0.02), served


def test_backlogged_tenants_share_evenly_and_within_the_bound(weighted: World) -> None:
    fair = fairness(weighted.sampler.samples, WEIGHTS, gap_bound(weighted), window_s=45)
    assert fair.windows >= 2
    assert fair.jain_min is not None and fair.jain_min >= 0.99
    # In flight are at most 16 sequences of 128 tokens, whatever the KV cache could hold.
    assert fair.gap_max <= 2 * max(64, 2 * 16 * 128)


def test_a_full_pool_is_never_idle_while_somebody_waits(weighted: World) -> None:
    busy = [sample for sample in weighted.sampler.samples[5:] if sample.backlogged]
    assert len(busy) > LOADED_S * 0.9
    assert min(sample.in_flight["small"] for sample in busy) >= 15  # one may end in the turn that is looked at


def arena(arm: str, wanted: list[Arrival]) -> World:
    """`fcfs`: everybody is one tenant, so the same controller serves in order of arrival."""
    asked = [
        replace(
            arrival,
            session=arrival.tenant,
            tenant="all" if arm == "fcfs" else arrival.tenant,
            output_bound=arrival.output_tokens,
        )
        for arrival in wanted
    ]
    tenants = [kit.patient(name) for name in sorted({arrival.tenant for arrival in asked})]
    # 16 sequences at 37.5 ms a token: two thirds of what the trace asks for.
    version = kit.engine(16, 37.5, kv_tokens=10_000)
    settings = {"queue_timeout_s": kit.FOREVER_S, "tick_ms": 1000.0}
    platform = kit.one_tier(*tenants, version=version, **(NO_TARGETS | settings), request_timeout_s=kit.FOREVER_S)
    world = kit.world(platform, report_ms=500.0)
    world.play(asked)
    assert not world.watch.broken
    return world


def test_small_tenants_of_the_arena_trace_do_not_pay_for_big_ones() -> None:
    wanted = read_trace(kit.trace("vtc/arena27_tenants.csv"), Random(0))
    sizes = Counter(arrival.tenant for arrival in wanted)
    smallest = set(sorted(sizes, key=lambda name: (sizes[name], name))[:13])
    assert len(sizes) == 27
    p99, rate = {}, {}
    for arm in ("fcfs", "vtc"):
        world = arena(arm, wanted)
        calls = [call for call in world.clients.calls if call.arrival.session in smallest]
        p99[arm] = percentile([(call.first_ns - call.sent_ns) / 1e6 for call in calls], 0.99)
        last_ns = max(call.done_ns for call in world.clients.calls)
        rate[arm] = sum(call.tokens for call in world.clients.calls) / last_ns
        if arm == "vtc":
            weights = dict.fromkeys(sizes, 1.0)
            fair = fairness(world.sampler.samples, weights, gap_bound(world), window_s=240)
            assert fair.windows >= 1 and fair.jain_min is not None and fair.jain_min >= 0.99
            assert fair.gap_max <= 2 * max(max(a.input_tokens for a in wanted), 2 * 10_000)
    assert p99["vtc"] <= p99["fcfs"] / 8, p99
    assert rate["vtc"] == pytest.approx(rate["fcfs"], rel=0.02)
