"""Locality under the real controller: the Mooncake conversation trace against a router that only looks for prefixes, and
what locality must not do."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import msgspec
import pytest

from rungway.outcomes import Outcome
from rungway.policies import placement
from rungway.policies.placement import Need, ReplicaView
from rungway.policies.roster import Roster
from rungway.simulate.measure import Fairness, fairness, percentile, times_ms
from rungway.simulate.prefix import prefix_keys
from rungway.simulate.summary import gap_bound, hit_rate, summary
from rungway.simulate.traces import read_trace
from rungway.simulate.workload import Arrival, speed_up
from rungway.simulate.world import World
from sim import kit

TENANTS = [f"t{number}" for number in range(6)]
QUANTUM = 65_536


def conversations(minutes: float, speed: float) -> list[Arrival]:
    """The first minutes of the trace. A conversation is told by the second block of its prompt, the first is the same for
    nearly all; it belongs to one of six tenants."""
    found = []
    for arrival in read_trace(kit.trace("mooncake/conversation_trace.jsonl"), Random(0), duration_s=60 * minutes):
        talk = arrival.blocks[min(1, len(arrival.blocks) - 1)]
        tenant = TENANTS[talk * 2_654_435_761 % 2**32 % len(TENANTS)]
        found.append(replace(arrival, tenant=tenant, output_bound=arrival.output_tokens))
    return speed_up(found, speed)


def play(wanted: list[Arrival], replicas: int, kv_tokens: int, slots: int = 64, **spec: Any) -> World:
    """H200s with an 8B model; prompts of up to 123,192 tokens."""
    version = kit.engine(slots, kv_tokens=kv_tokens, max_context=140_000, max_num_batched_tokens=2048)
    names = sorted({arrival.tenant for arrival in wanted})
    settings = {"queue_timeout_s": kit.FOREVER_S, "tick_ms": 1000.0, **spec}
    platform = kit.one_tier(*map(kit.patient, names), version=version, request_timeout_s=kit.FOREVER_S, **settings)
    gateway = msgspec.structs.replace(platform.gateway, prefix_keys_max=64)
    platform = msgspec.structs.replace(platform, gateway=gateway)
    world = kit.world(platform, costs={"small": "h200-8b"}, replicas=replicas, report_ms=250.0)
    world.play(wanted)
    assert not world.watch.broken and {call.outcome for call in world.clients.calls} == {Outcome.COMPLETED}
    return world


def hits(world: World) -> float:
    rate = hit_rate(world.disk.rows.values())
    assert rate is not None
    return rate


def ttft_ms(world: World, share: float) -> float:
    found = percentile(times_ms(world.clients.calls), share)
    assert found is not None
    return found


def fair(world: World) -> Fairness:
    weights = dict.fromkeys(TENANTS, 1.0)
    return fairness(world.sampler.samples, weights, gap_bound(world), window_s=60)


def by_prefix_alone(wanted: list[Arrival], replicas: int, kv_tokens: int, patch: pytest.MonkeyPatch) -> World:
    """The idealised router: every request at once to the replica that holds most of its beginning, however many wait
    there; the least loaded where none holds any. Nothing ever waits in the controller, so nobody is treated fairly."""

    boundless = 1000.0

    def always(view: ReplicaView, sequences: int, tokens: int, factor: float) -> bool:
        return True

    def scan(roster: Roster, need: Need) -> ReplicaView | None:
        return placement.choose(roster.views.values(), need, boundless)  # the index knows of no replica without room

    patch.setattr(placement, "has_room", always)
    patch.setattr(Roster, "place", scan)
    return play(wanted, replicas, kv_tokens, in_flight_factor=boundless, locality_imbalance_max=1e9)


def test_the_mooncake_trace_is_hit_as_often_as_by_a_router_that_only_looks_for_prefixes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wanted = conversations(minutes=10, speed=1.6)
    least = play(wanted, 4, 800_000, locality_imbalance_max=0.0)
    ours = play(wanted, 4, 800_000, order="dlpm", locality_quantum_tokens=QUANTUM)
    pure = by_prefix_alone(wanted, 4, 800_000, monkeypatch)
    assert hits(ours) >= 0.9 * hits(pure), (hits(ours), hits(pure))
    assert hits(ours) >= 1.5 * hits(least), (hits(ours), hits(least))
    assert ttft_ms(ours, 0.5) <= ttft_ms(least, 0.5)
    assert ttft_ms(ours, 0.99) <= 1.05 * ttft_ms(pure, 0.99), "fairness is not paid for with time"


def test_under_overload_the_order_finds_hits_and_the_bound_holds() -> None:
    wanted = conversations(minutes=8, speed=3.0)
    vtc = play(wanted, 2, 800_000)
    ours = play(wanted, 2, 800_000, order="dlpm", locality_quantum_tokens=QUANTUM)
    assert hits(ours) > hits(vtc), (hits(ours), hits(vtc))
    found = fair(ours)
    assert found.windows >= 1
    assert 0 < found.gap_max <= found.bound == 2 * (2 * 2 * 800_000 + QUANTUM)


def test_sessions_and_hot_beginnings_never_break_the_bound() -> None:
    """One tenant asks always about the same text in one session, the other never twice about the same."""
    wanted = []
    for number in range(700):
        blocks = (1, 2, 3, 4) if number % 2 else tuple(range(10 * number + 100, 10 * number + 104))
        session = "s" if number % 2 else None
        tenant = TENANTS[number % 2]
        wanted.append(Arrival(number * 0.01, tenant, 2048, 64, 64, session=session, blocks=blocks))
    world = play(wanted, 2, 20_000, slots=8, order="dlpm", locality_quantum_tokens=4096)
    rates = {name: hit_rate(row for row in world.disk.rows.values() if row.tenant == name) for name in TENANTS[:2]}
    assert rates["t1"] is not None and rates["t1"] > 0.6 and rates["t0"] == 0.0
    # At most 16 sequences of 2,112 tokens are in flight.
    gap = fairness(world.sampler.samples, dict.fromkeys(TENANTS, 1.0), 0.0, window_s=10).gap_max
    assert 0 < gap <= 2 * (2 * 16 * 2112 + 4096)
    loads = [sum(end.usage.prompt_tokens for end in replica.truth) for replica in world.replicas.values()]
    assert max(loads) <= 1.6 * min(loads), loads


def test_no_tenant_gains_or_learns_from_anothers_cache() -> None:
    """The same texts, first asked by one tenant, then by another: the second one finds nothing, and is placed exactly as
    if the first had asked for something else."""

    def second(blocks: tuple[int, ...]) -> tuple[float | None, list[str]]:
        first = [Arrival(0.2 * k, "t0", 2048, 4, 4, blocks=blocks) for k in range(8)]
        then = [Arrival(5.0 + 0.2 * k, "t1", 2048, 4, 4, blocks=(7, 8, 9, 10 + k)) for k in range(8)]
        world = play([*first, *then], 3, 40_000, order="dlpm")
        rows = [row for row in world.disk.rows.values() if row.tenant == "t1"]
        rows.sort(key=lambda row: row.started_wall_ns)
        assert rows[0].cached_tokens == 0
        return hit_rate(rows), [row.replica_id for row in rows]

    assert second((7, 8, 9, 10)) == second((1, 2, 3, 4))
    assert not set(prefix_keys("t0", (7, 8, 9))) & set(prefix_keys("t1", (7, 8, 9)))


def test_the_report_says_what_each_tenant_was_hit() -> None:
    wanted = [Arrival(0.5 * k, TENANTS[k % 2], 1024, 4, 4, blocks=(1, 2 + k * (k % 2))) for k in range(20)]
    result = summary(play(wanted, 1, 40_000))
    same, other = (result["tenants"][name]["hit_rate"] for name in ("t0", "t1"))
    assert same > 0.8 and 0.3 < other < 0.5 and other < result["hit_rate"] < same
