"""A core that lives through everything at once: traffic, lost and draining replicas of several versions and sizes, repeated and
late words, and reloads that bring, take, rename and change tenants, versions and ladders under way."""

from __future__ import annotations

from random import Random
from typing import Any

import msgspec
import pytest

from control.harness import LADDER, NO_LIMITS, SECOND, World, platform, tenant
from rungway.contracts import CLASS_ORDER, Budget, Isolation, Platform, Tenant
from rungway.control.pool import Pool
from rungway.engine.protocol import EngineStats
from rungway.messages import Granted, ReplicaInfo, Report, Retry
from rungway.policies.ladder import LadderState
from rungway.types import Grant

NAMES = [f"t{number}" for number in range(5)]
VERSIONS = ("small-v1", "small-v2", "small-v3")
REPLICAS = [(f"{version}-r{number}", version) for version in VERSIONS for number in (1, 2)]


def contract(name: str, rng: Random) -> Tenant:
    few = msgspec.structs.replace(NO_LIMITS, requests_per_minute=rng.choice((None, 300)), queue_max=rng.choice((3, 50)))
    return tenant(
        name,
        weight=rng.choice((0.1, 1.0, 3.0)),
        tenant_class=rng.choice(CLASS_ORDER),
        quotas=few,
        budget=Budget(nusd=rng.choice((None, 10**10)), per=rng.choice(("day", "month"))),
        isolation=Isolation(
            in_flight_share_max=rng.choice((0.3, 1.0)),
            reserved_share=rng.choice((0.0, 0.15)),
            shard_replicas=rng.choice((None, None, 1, 2)),
        ),
    )


def configuration(rng: Random) -> Platform:
    names = rng.sample(NAMES, rng.randint(1, len(NAMES)))
    base = platform(*(contract(name, rng) for name in names), ladder=short() if rng.random() < 0.3 else LADDER)
    if len(base.ladder.rungs) < len(LADDER.rungs):
        floor = base.ladder.rungs[-1].name
        lower = tuple(
            msgspec.structs.replace(each, ladder=msgspec.structs.replace(each.ladder, floor=floor))
            for each in base.tenants
        )
        base = msgspec.structs.replace(base, tenants=lower)
    first = base.tiers[0].versions[0]
    versions = tuple(
        msgspec.structs.replace(first, name=name, weight=weight)
        for name, weight in zip(VERSIONS, (1.0, rng.choice((0.0, 0.5)), rng.choice((0.0, 2.0))), strict=True)
    )
    spec = msgspec.structs.replace(
        base.controller,
        in_flight_factor=rng.choice((1.0, 1.5)),
        order=rng.choice(("vtc", "dlpm")),
        breaker_failures=rng.choice((1, 5)),
        class_shares=rng.choice(({}, {"interactive": 0.6, "standard": 0.3, "batch": 0.1})),
    )
    return msgspec.structs.replace(
        base, controller=spec, tiers=(msgspec.structs.replace(base.tiers[0], versions=versions), base.tiers[1])
    )


def short() -> Any:
    return msgspec.structs.replace(LADDER, rungs=LADDER.rungs[:4], digest="short")


class Life:
    def __init__(self, seed: int) -> None:
        self.rng = Random(seed)
        self.world = World(tenant("t0"), replicas=("large",))
        self.world.core.reload(configuration(self.rng), self.world.now)
        self.told: list[tuple[str, Any]] = []

    def play(self, steps: int) -> None:
        kinds = (
            *("ask",) * 8,
            *("end",) * 6,
            *("progress", "retry", "replica", "wait", "leave", "again") * 2,
            "reload",
            "gateway",
            "override",
        )
        for _ in range(steps):
            getattr(self, self.rng.choice(kinds))()
            self.world.core.settle_turn(self.world.now)
            self.world.take()
            if self.rng.random() < 0.2:
                self.world.advance(0.05)
            check(self.world)

    def running(self) -> list[str]:
        flights = self.world.cell.flights
        return [name for name, flight in flights.items() if flight.running and flight.attempts and not flight.finish]

    def ask(self) -> None:
        rng = self.rng
        sequences = rng.choice((1, 1, 1, 2, 8))
        self.world.submit(
            rng.choice(NAMES),
            model=rng.choice(("small", "small", "auto")),
            prompt=rng.choice((1, 50, 700, 3000)),
            n=sequences,
            best_of=sequences,
            output_bound=rng.choice((1, 20, 4000)),
            session=rng.choice((None, "a", "b")),
            deadline_ms=rng.choice((None, None, 5.0, 5000.0, 1e18)),
            tenant_class=rng.choice(CLASS_ORDER),
        )

    def end(self) -> None:
        if running := self.running():
            name = self.rng.choice(running)
            grant = self.world.cell.flights[name].grant
            assert grant is not None
            if not isinstance(self.world.answer(name), Grant) or grant.replica_id not in self.world.cell.replicas:
                self.world.client_end(name, "replica_lost", delivered={grant.attempt: 0})
            else:
                self.world.complete(name, self.rng.choice((0, 5, 20, 6000)))
            self.told.append((name, grant))

    def progress(self) -> None:
        for name, flight in list(self.world.cell.flights.items()):
            for number, attempt in flight.attempts.items():
                if self.rng.random() < 0.3:
                    report = Report(
                        attempt.replica_id, EngineStats(0, 0, 0, 9, 9, 0), [(name, number, self.rng.randint(0, 300))]
                    )
                    self.world.core.report(report, self.world.now)

    def retry(self) -> None:
        if running := self.running():
            name = self.rng.choice(running)
            grant = self.world.cell.flights[name].grant
            assert grant is not None
            why = self.rng.choice(("evicted", "error", "replica_lost", "timeout"))
            message = Retry(name, self.rng.choice((grant.attempt, 1)), grant.replica_id, why, 0)
            for _ in range(self.rng.choice((1, 2))):
                self.world.core.retry("g1", message, self.world.now)

    def replica(self) -> None:
        name, version = self.rng.choice(REPLICAS)
        if name in self.world.cell.replicas and self.rng.random() < 0.5:
            self.world.core.replica_lost(name, self.world.now)
            return
        slots, room = self.rng.choice(((2, 1000), (4, 100_000), (8, 5000)))
        known = self.world.cell.replicas.get(name)
        if known is not None:
            slots, room = known.max_num_seqs, known.kv_tokens
        state = self.rng.choice(("ready", "draining"))
        self.world.core.replica_hello(ReplicaInfo(name, "", "small", version, slots, room, state), self.world.now)

    def wait(self) -> None:
        self.world.advance(self.rng.choice((0.05, 0.5, 5.0)), 0.25)

    def leave(self) -> None:
        if self.world.cell.flights:
            name = self.rng.choice(list(self.world.cell.flights))
            flight = self.world.cell.flights[name]
            self.world.core.withdraw(name, "client_cancelled", self.world.now)
            if flight.attempts and flight.entry is None:
                self.world.client_end(name, "client_cancelled", delivered=dict.fromkeys(flight.attempts, 0))

    def again(self) -> None:
        """Words that were said already: an Ask, both ends."""
        if self.world.cell.flights:
            flight = self.rng.choice(list(self.world.cell.flights.values()))
            self.world.core.submit(flight.ask, self.world.now)
        if self.told:
            name, grant = self.rng.choice(self.told)
            self.world.sent.append(("g1", Granted(grant)))
            self.world.engine_end(name, 3)
            self.world.client_end(name, delivered={grant.attempt: 3})

    def reload(self) -> None:
        self.world.core.reload(configuration(self.rng), self.world.now)

    def gateway(self) -> None:
        self.world.core.gateway_lost("g1", self.world.now)
        if self.rng.random() < 0.3:
            self.world.advance(40.0, 1.0)
        self.world.core.gateway_hello("g1", [], self.world.now)

    def override(self) -> None:
        pool = self.world.cell.pools["small"]
        scope = self.rng.choice(list(pool.scopes))
        rung = self.rng.randrange(len(self.world.cell.platform.ladder.rungs))
        pool.scopes[scope] = LadderState(rung, self.world.mono_ns, rung, self.world.mono_ns + 20 * SECOND)
        self.world.core.reoffer_all(self.world.now)

    def close(self) -> None:
        """Replicas are there again, everybody ends, and nothing is left of anything."""
        world = self.world
        for name, version in REPLICAS:
            world.core.replica_lost(name, world.now)
            world.core.replica_hello(ReplicaInfo(name, "", "small", version, 8, 100_000), world.now)
        for _ in range(400):
            world.advance(1.0, 0.25)
            for name in self.running():
                flight = world.cell.flights[name]
                if flight.entry is None:
                    numbers = {number: 0 for number, attempt in flight.attempts.items() if attempt.end is None}
                    world.client_end(name, "client_cancelled", delivered=numbers)
            if not world.cell.flights:
                break
        world.core.gateway_lost("g1", world.now)
        world.advance(60.0, 1.0)


def check(world: World) -> None:
    cell = world.cell
    entries = [entry for pool in cell.pools.values() for entry in pool.queue.entries()]
    waiting = {name for name, flight in cell.flights.items() if flight.entry is not None}
    assert {entry.request_id for entry in entries} == waiting
    for name, state in cell.tenants.items():
        mine = [flight for flight in cell.flights.values() if flight.state is state]
        assert state.waiting == sum(flight.entry is not None for flight in mine), name
        assert state.running == sum(flight.running for flight in mine), name
        assert state.budget.held == sum(flight.held_nusd for flight in mine), name
    assert all(flight.state is cell.tenants[flight.ask.tenant] for flight in cell.flights.values())
    for pool in cell.pools.values():
        check_pool(world, pool)


def check_pool(world: World, pool: Pool) -> None:
    queued = [flight for flight in world.cell.flights.values() if flight.entry is not None and flight.pool == pool.name]
    for band, _ in enumerate(CLASS_ORDER):
        assert pool.queued_bands[band] == sum(flight.held_tokens for flight in queued if flight.band == band)
    late = [flight for flight in queued if flight.entry is not None and flight.entry.late]
    assert pool.late == len(late) and sum(pool.late_bands) == sum(flight.held_tokens for flight in late)
    held = [
        attempt
        for flight in world.cell.flights.values()
        if flight.pool == pool.name
        for attempt in flight.attempts.values()
        if not attempt.released
    ]
    assert pool.held_tokens == sum(attempt.tokens for attempt in held)
    assert sum(pool.band_sequences) == sum(attempt.sequences for attempt in held)
    for name, view in pool.views.items():
        here = [attempt for attempt in held if attempt.replica_id == name]
        assert (view.running, view.tokens) == (sum(a.sequences for a in here), sum(a.tokens for a in here)), name
        assert view.tokens <= view.kv_tokens
    assert set(pool.breakers) == set(pool.views) == set(pool.prefixes)


@pytest.mark.parametrize("seed", range(30))
def test_whatever_comes_the_sums_hold_and_nothing_stays_behind(seed: int) -> None:
    life = Life(seed)
    life.play(250)
    life.close()
    life.world.at_rest()
    cell = life.world.cell
    assert set(cell.tenants) == {contract.name for contract in cell.platform.tenants} and not cell.leaving
    rows = [row.request_id for row in life.world.rows]
    assert len(rows) == len(set(rows)), "a request has two rows"
