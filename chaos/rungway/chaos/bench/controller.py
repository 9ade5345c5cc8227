"""Decisions a second of the controller's core alone: one core of the machine, 1,000 tenants, messages in batches.

One decision is the whole life of a request in the core: submit, grant, the replica's end, the gateway's finish and the
ledger row made (not written). No sockets, no database: what is left is the policies and their books.
"""

from __future__ import annotations

import random
import time
from typing import Any

import msgspec

from rungway.chaos.bench.http_load import percentile
from rungway.chaos.bench.report import Report, Say, surroundings
from rungway.clock import NS_PER_MS, NS_PER_S
from rungway.contracts import CLASS_ORDER, Budget, Platform, Price, Quotas, Tenant, Tier
from rungway.control.cell import Now
from rungway.control.core import Core
from rungway.engine.protocol import EngineStats
from rungway.messages import Granted, Refused, ReplicaInfo
from rungway.messages import Report as ReplicaReport
from rungway.policies.quality import load_default
from rungway.simulate import scenario
from rungway.types import Ask, AttemptEnd, Finish, Grant, Usage, billing_of

TENANTS = 1000
BATCH = 32
TURN_NS = 5 * NS_PER_MS
TICK_TURNS = 10
DECISIONS = 30_000
REPLICAS = 4
BAR_PER_S = 3000.0
DECISION_P99_MS = 5.0
REFUSAL_P99_MS = 1.0
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
    """Gateway and replicas (so many, dealt out to two tiers) of a core on a virtual clock: what was granted in one turn
    ends in the next."""

    def __init__(self, replicas: int) -> None:
        self.turns = 0
        self.core = Core(_platform(), load_default(), self.now)
        self.core.gateway_hello("g1", [], self.now)
        tiers = ["small" if number % 2 == 0 else "large" for number in range(replicas)]
        self.replicas = [(f"{tier}-r{number // 2 + 1}", tier) for number, tier in enumerate(tiers)]
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


def _asks(drive: _Drive, start: int, chance: random.Random, count: int = BATCH) -> list[Ask]:
    """A batch of requests of tenants drawn with Zipf's law: few ask often, most rarely."""
    made = []
    for number in range(start, start + count):
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


def _each_ms(drive: _Drive, asks: list[Ask]) -> list[float]:
    """Processor time of every single submit, with what it leads to. What it is told stays in the effects."""
    took: list[float] = []
    for ask in asks:
        began_ns = time.thread_time_ns()
        drive.core.submit(ask, drive.now)
        took.append((time.thread_time_ns() - began_ns) / NS_PER_MS)
    return took


def _half_rate(drive: _Drive, wanted: int, per_s: float, chance: random.Random) -> list[float]:
    """Milliseconds of processor time until each request is decided while they come at half of the peak rate: its turn takes
    all that came in one turn's time, so what is judged or dispatched last in it waits longest."""
    each = max(1, int(per_s / 2 * TURN_NS / NS_PER_S))
    waits: list[float] = []
    for start in range(0, wanted, each):
        asks = _asks(drive, 10_000_000 + start, chance, each)
        began_ns = time.process_time_ns()
        drive.turn(asks)
        waits += [(time.process_time_ns() - began_ns) / NS_PER_MS] * each
    return waits


def _refusals(chance: random.Random, wanted: int, replicas: int) -> tuple[list[float], int]:
    """All tenants wait in a full pool behind clients' deadlines that cannot be met: how long each no takes, and how many
    of the answers were one."""
    drive = _Drive(replicas)
    for number in range(TENANTS):
        ask = _asks(drive, 20_000_000 + number, chance, 1)[0]
        drive.core.submit(msgspec.structs.replace(ask, tenant=f"t{number}", model="small", tiers=("small",)), drive.now)
    drive.core.settle_turn(drive.now)
    asks = _asks(drive, 30_000_000, chance, wanted)
    asks = [msgspec.structs.replace(ask, model="small", tiers=("small",), deadline_ms=1.0) for ask in asks]
    took = _each_ms(drive, asks)
    sends = drive.core.cell.effects.drain().sends
    names = {ask.request_id for ask in asks}
    said_no = sum(isinstance(message, Refused) and message.refusal.request_id in names for _, message in sends)
    return took, said_no


def bench_controller(*, quick: bool, say: Say, replicas: int = REPLICAS) -> Report:
    """CPU time of the core per decision, and how long one turn of a batch takes."""
    wanted = DECISIONS // 10 if quick else DECISIONS
    drive, chance = _Drive(replicas), random.Random(1)
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
        "controller",
        notes=[surroundings(), f"{TENANTS} tenants, {replicas} replicas, batches of {BATCH}, CPU time of one core"],
    )
    report.at_least("decisions/s of the core alone", per_s, BAR_PER_S, "")
    asked = wanted + BATCH * 20
    report.at_least("requests granted and settled / asked", drive.rows / asked, 1 - 2 * BATCH / asked, "")
    row: dict[str, Any] = {"decisions": decided, "per_s": round(per_s), "turn_ms_p50": p50, "turn_ms_p99": p99}
    waits = _half_rate(drive, wanted // 2, per_s, chance)
    refusals, said_no = _refusals(chance, wanted // 10, replicas)
    for name, values, bar_ms in (("decision", waits, DECISION_P99_MS), ("refusal", refusals, REFUSAL_P99_MS)):
        row[f"{name}_ms_p50"], row[f"{name}_ms_p99"] = percentile(values, 0.5), percentile(values, 0.99)
        say(f"{name}: p50 {row[f'{name}_ms_p50']:.3f} ms, p99 {row[f'{name}_ms_p99']:.3f} ms")
        report.at_most(
            f"{name} p99 at half of the peak rate" if name == "decision" else "refusal p99 with all tenants waiting",
            row[f"{name}_ms_p99"],
            bar_ms,
            "ms",
        )
    report.at_least("of those asks refused", said_no / len(refusals), 1.0, "")
    report.control.append(row)
    return report
