"""Decisions a second of the controller's core alone: one core of the machine, 1,000 tenants, messages in batches.

One decision is the whole life of a request in the core: submit, grant, the replica's end, the gateway's finish and the
ledger row made (not written). No sockets, no database: what is left is the policies and their books.
"""

from __future__ import annotations

import random
import time
from typing import Any

from rungway.chaos.bench.http_load import percentile
from rungway.chaos.bench.report import Report, Say, surroundings
from rungway.clock import NS_PER_MS, NS_PER_S
from rungway.contracts import CLASS_ORDER, Budget, Platform, Price, Quotas, Tenant, Tier
from rungway.control.cell import Now
from rungway.control.core import Core
from rungway.engine.protocol import EngineStats
from rungway.messages import Granted, ReplicaInfo
from rungway.messages import Report as ReplicaReport
from rungway.policies.quality import load_default
from rungway.simulate import scenario
from rungway.types import Ask, AttemptEnd, Finish, Grant, Usage, billing_of

TENANTS = 1000
BATCH = 32
TURN_NS = 5 * NS_PER_MS
TICK_TURNS = 10
DECISIONS = 30_000
BAR_PER_S = 3000.0
_START_WALL_NS = 1_800_000_000 * NS_PER_S


def _tenant(number: int) -> Tenant:
    return scenario.tenant(
        f"t{number}",
        tenant_class=CLASS_ORDER[number % 3],
        weight=1.0 + number % 4,
        quotas=Quotas(
            requests_per_minute=1_000_000, tokens_per_minute=1_000_000_000, concurrent_requests=1000, queue_max=1000
        ),
        budget=Budget(nusd=10**15),
    )


def _tier(name: str, rank: int, unit: int) -> Tier:
    price = Price(input=unit, cached_input=unit // 4, output=2 * unit)
    return Tier(
        name=name, rank=rank, price=price, versions=(scenario.version(name, name=f"{name}-v1", max_num_seqs=256),)
    )


def _platform() -> Platform:
    tiers = (_tier("small", 0, 1_000_000), _tier("large", 1, 10_000_000))
    return scenario.platform(*(_tenant(number) for number in range(TENANTS)), tiers=tiers)


class _Drive:
    """Gateway and replicas of a core on a virtual clock: what was granted in one turn ends in the next."""

    def __init__(self) -> None:
        self.turns = 0
        self.core = Core(_platform(), load_default(), self.now)
        self.core.gateway_hello("g1", [], self.now)
        self.replicas = [("small-r1", "small"), ("small-r2", "small"), ("large-r1", "large"), ("large-r2", "large")]
        for replica_id, tier in self.replicas:
            info = ReplicaInfo(replica_id, "", tier, f"{tier}-v1", 256, 1_000_000)
            self.core.replica_hello(info, self.now)
        self.running: list[Grant] = []
        self.asks: dict[str, Ask] = {}
        self.decided = self.rows = 0

    @property
    def now(self) -> Now:
        passed_ns = self.turns * TURN_NS
        return Now(1000 * NS_PER_S + passed_ns, _START_WALL_NS + passed_ns)

    def turn(self, asks: list[Ask]) -> None:
        """One turn of the controller: ends of the last one, new asks, dispatch. This is what is timed."""
        now, core = self.now, self.core
        for grant, end, finish in self._ends(now):
            core.attempt_ended(grant.replica_id, end, now)
            core.finished("g1", finish, now)
        for ask in asks:
            core.submit(ask, now)
        core.settle_turn(now)
        if self.turns % TICK_TURNS == 0:
            for replica_id, _ in self.replicas:
                core.report(ReplicaReport(replica_id, EngineStats(0, 0, 0, 4096, 4096, 0), []), now)
            core.tick(now)
        effects = core.cell.effects.drain()
        self.rows += len(effects.rows)
        self.running = [message.grant for _, message in (*effects.sends, *effects.held) if isinstance(message, Granted)]
        self.decided += len(self.running)
        self.turns += 1

    def _ends(self, now: Now) -> list[tuple[Grant, AttemptEnd, Finish]]:
        return [(grant, *_end(self.asks.pop(grant.request_id), grant, now)) for grant in self.running]


def _end(ask: Ask, grant: Grant, now: Now) -> tuple[AttemptEnd, Finish]:
    offer = grant.offer
    end = AttemptEnd(
        request_id=ask.request_id,
        attempt=grant.attempt,
        replica_id=grant.replica_id,
        usage=Usage(prompt_tokens=offer.prompt_tokens, output_tokens=16),
        finish="stop",
        billing=billing_of(ask, grant),
        started_wall_ns=now.wall_ns,
        ended_wall_ns=now.wall_ns,
    )
    finish = Finish(
        request_id=ask.request_id,
        outcome="completed",
        delivered={grant.attempt: 16},
        ttft_ms=5.0,
        tpot_ms=5.0,
        e2e_ms=90.0,
    )
    return end, finish


def _asks(drive: _Drive, start: int, chance: random.Random) -> list[Ask]:
    """A batch of requests of tenants drawn with Zipf's law: few ask often, most rarely."""
    made = []
    for number in range(start, start + BATCH):
        who = min(TENANTS - 1, int(TENANTS ** chance.random()) - 1)
        model, tiers = chance.choice((("auto", ("small", "large")), ("small", ("small",)), ("large", ("large",))))
        prompt = chance.randrange(10, 400)
        ask = Ask(
            request_id=f"q{number}",
            gateway_id="g1",
            tenant=f"t{who}",
            key_id=f"t{who}-1",
            tenant_class=drive.core.cell.tenants[f"t{who}"].contract.tenant_class,
            model=model,
            tiers=tiers,
            prompt_tokens=dict.fromkeys(tiers, prompt),
            trimmed_tokens=dict.fromkeys(tiers, prompt),
            output_bound=64,
            received_wall_ns=drive.now.wall_ns,
        )
        drive.asks[ask.request_id] = ask
        made.append(ask)
    return made


def bench_controller(*, quick: bool, say: Say) -> Report:
    """CPU time of the core per decision, and how long one turn of a batch takes."""
    wanted = DECISIONS // 10 if quick else DECISIONS
    drive, chance = _Drive(), random.Random(1)
    turns_ms: list[float] = []
    spent_ns = warm = 0
    for start in range(0, wanted + BATCH * 20, BATCH):
        asks = _asks(drive, start, chance)
        began_ns = time.process_time_ns()
        drive.turn(asks)
        took_ns = time.process_time_ns() - began_ns
        if start < BATCH * 20:
            warm = drive.decided
            continue
        spent_ns += took_ns
        turns_ms.append(took_ns / NS_PER_MS)
    decided = drive.decided - warm
    per_s = decided / (spent_ns / NS_PER_S)
    p50, p99 = percentile(turns_ms, 0.5), percentile(turns_ms, 0.99)
    say(f"{decided} decisions, {per_s:.0f}/s of CPU time; a turn of {BATCH}: p50 {p50:.2f} ms, p99 {p99:.2f} ms")
    report = Report(
        "controller", notes=[surroundings(), f"{TENANTS} tenants, batches of {BATCH}, CPU time of one core"]
    )
    report.at_least("decisions/s of the core alone", per_s, BAR_PER_S, "")
    asked = wanted + BATCH * 20
    report.at_least("requests granted and settled / asked", drive.rows / asked, 1 - 2 * BATCH / asked, "")
    row: dict[str, Any] = {"decisions": decided, "per_s": round(per_s), "turn_ms_p50": p50, "turn_ms_p99": p99}
    report.control.append(row)
    return report
