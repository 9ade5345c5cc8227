"""A controller core on a virtual clock, with replicas and gateways played by the test."""

from __future__ import annotations

from typing import Any

import msgspec

from rungway.contracts import LadderSpec, Platform, Quotas, Slo, Tenant, TenantClass, Tier
from rungway.control.cell import Now
from rungway.control.core import Core
from rungway.control.effects import Effects
from rungway.engine.protocol import EngineStats
from rungway.messages import Granted, Message, Refused, ReplicaInfo, Report, Retry
from rungway.policies.quality import load_default
from rungway.simulate import scenario
from rungway.types import Ask, AttemptEnd, Billing, Finish, Grant, LedgerRow, Refusal, Usage

NO_LIMITS = Quotas(requests_per_minute=None, tokens_per_minute=None, concurrent_requests=None, queue_max=1000)
LADDER = msgspec.structs.replace(scenario.LADDER, dwell_up_s=10.0, dwell_down_s=60.0, context_limit_tokens=1024)
SECOND = 1_000_000_000
START_WALL_NS = 1_800_000_000 * SECOND


def tenant(name: str, **changes: Any) -> Tenant:
    """An interactive tenant without limits, whose first token is due in half a second."""
    terms = {"quotas": NO_LIMITS, "slo": Slo(ttft_ms_p99=500, tpot_ms_p99=60, availability=0.999), **changes}
    return scenario.tenant(name, **terms)


def platform(*tenants: Tenant, ladder: LadderSpec = LADDER, **spec: Any) -> Platform:
    """Two tiers, small and large, of one version each. Late binding is exact: as many in flight as a batch has places."""
    tiers = tuple(
        Tier(name=name, rank=rank, price=price, versions=(scenario.version(name, name=f"{name}-v1"),))
        for rank, (name, price) in enumerate((("small", scenario.SMALL), ("large", scenario.LARGE)))
    )
    base = scenario.platform(*tenants, tiers=tiers, in_flight_factor=1.0, **spec)
    return msgspec.structs.replace(base, ladder=ladder, digest="digest")


def billed(grant: Grant, tenant: str = "acme") -> Billing:
    """What the gateway sends along with the work of a grant."""
    return Billing(
        tenant=tenant,
        key_id="k",
        tenant_class="interactive",
        risk="normal",
        action="read",
        model="small",
        tier=grant.offer.tier,
        version=grant.offer.version,
        rung=grant.offer.rung,
        degraded=grant.offer.degraded,
        reason=grant.reason,
        price=grant.price,
        gateway_id="g1",
        received_wall_ns=1,
    )


class World:
    """Drives a Core. Messages to gateways are collected; what was `held` counts as sent, rows as written."""

    def __init__(self, *tenants: Tenant, replicas: tuple[str, ...] = ("small", "large"), **kwargs: Any) -> None:
        self.mono_ns = 1000 * SECOND
        self.wall_ns = START_WALL_NS
        self.core = Core(platform(*tenants, **kwargs), load_default(), self.now)
        self.cell = self.core.cell
        self.sent: list[tuple[str, Message]] = []
        self.rows: list[LedgerRow] = []
        self.audit: list[Any] = []
        self.waste: list[tuple[str, int]] = []
        self.held_before_commit = 0
        self.count = 0
        self.core.gateway_hello("g1", [], self.now)
        for tier in replicas:
            self.replica(tier, f"{tier}-r1")
        self.take()

    @property
    def now(self) -> Now:
        return Now(self.mono_ns, self.wall_ns)

    def replica(
        self,
        tier: str,
        replica_id: str,
        slots: int = 4,
        kv_tokens: int = 100_000,
        running: tuple[tuple[str, int], ...] = (),
    ) -> None:
        info = ReplicaInfo(replica_id, "", tier, f"{tier}-v1", slots, kv_tokens)
        self.core.replica_hello(info, self.now, running)

    def report_all(self) -> None:
        for replica_id in list(self.cell.replicas):
            self.core.report(Report(replica_id, EngineStats(0, 0, 0, 1000, 1000, 0), []), self.now)

    def advance(self, seconds: float, step_s: float = 0.05) -> None:
        """Let time pass in ticks, replicas reporting all the while."""
        left = int(seconds * SECOND)
        while left > 0:
            step = min(left, int(step_s * SECOND))
            self.mono_ns += step
            self.wall_ns += step
            left -= step
            self.report_all()
            self.core.tick(self.now)
            self.take()

    def take(self) -> Effects:
        effects = self.cell.effects.drain()
        self.held_before_commit += len(effects.held)
        self.sent += effects.sends + effects.held
        self.rows += effects.rows
        self.audit += effects.audit
        self.waste += effects.waste
        return effects

    def ask(self, who: str = "acme", **changes: Any) -> Ask:
        self.count += 1
        model = changes.pop("model", "small")
        tiers = {"auto": ("small", "large")}.get(model, (model,))
        prompt = changes.pop("prompt", 10)
        base = Ask(
            request_id=f"q{self.count}",
            gateway_id="g1",
            tenant=who,
            key_id=f"{who}-1",
            tenant_class=self.cell.tenants[who].contract.tenant_class
            if who in self.cell.tenants
            else TenantClass.BATCH,
            model=model,
            tiers=tiers,
            prompt_tokens={"small": prompt, "large": prompt},
            trimmed_tokens={"small": min(prompt, 1024), "large": min(prompt, 1024)},
            output_bound=20,
            received_wall_ns=self.wall_ns,
        )
        return msgspec.structs.replace(base, **changes)

    def submit(self, who: str = "acme", **changes: Any) -> str:
        ask = self.ask(who, **changes)
        self.core.submit(ask, self.now)
        self.core.settle_turn(self.now)
        self.take()
        return ask.request_id

    def answer(self, request_id: str) -> Grant | Refusal | None:
        """The last decision sent about a request."""
        for _, message in reversed(self.sent):
            if isinstance(message, Granted) and message.grant.request_id == request_id:
                return message.grant
            if isinstance(message, Refused) and message.refusal.request_id == request_id:
                return message.refusal
        return None

    def grant(self, request_id: str) -> Grant:
        answer = self.answer(request_id)
        assert isinstance(answer, Grant), answer
        return answer

    def refusal(self, request_id: str) -> Refusal:
        answer = self.answer(request_id)
        assert isinstance(answer, Refusal), answer
        return answer

    def engine_end(
        self, request_id: str, output: int, *, attempt: int | None = None, finish: str = "stop", cached: int = 0
    ) -> None:
        grant = self.grant(request_id)
        number = grant.attempt if attempt is None else attempt
        flight = self.cell.flights.get(request_id)
        billing = billed(grant, flight.ask.tenant if flight is not None else "acme")
        end = AttemptEnd(
            request_id=request_id,
            attempt=number,
            replica_id=grant.replica_id,
            usage=Usage(prompt_tokens=grant.offer.prompt_tokens, cached_tokens=cached, output_tokens=output),
            finish=finish,
            billing=billing,
            started_wall_ns=self.wall_ns,
            ended_wall_ns=self.wall_ns,
        )
        self.core.attempt_ended(grant.replica_id, end, self.now)
        self.core.settle_turn(self.now)
        self.take()

    def client_end(self, request_id: str, outcome: str = "completed", **fields: Any) -> None:
        flight = self.cell.flights.get(request_id)
        fields.setdefault("attempts", len(flight.attempts) if flight is not None else 0)
        self.core.finished("g1", Finish(request_id=request_id, outcome=outcome, **fields), self.now)
        self.core.settle_turn(self.now)
        self.take()

    def complete(self, request_id: str, output: int = 20) -> None:
        """The ordinary end: the engine finishes, the client has it all."""
        grant = self.grant(request_id)
        self.engine_end(request_id, output)
        self.client_end(request_id, delivered={grant.attempt: output}, ttft_ms=5.0, tpot_ms=5.0, e2e_ms=100.0)

    def retry(self, request_id: str, why: str = "replica_lost", emitted: int = 0) -> None:
        grant = self.grant(request_id)
        self.core.retry("g1", Retry(request_id, grant.attempt, grant.replica_id, why, emitted), self.now)
        self.core.settle_turn(self.now)
        self.take()

    def lose(self, replica_id: str) -> None:
        self.core.replica_lost(replica_id, self.now)
        self.core.settle_turn(self.now)
        self.take()

    def row(self, request_id: str) -> LedgerRow:
        rows = [row for row in self.rows if row.request_id == request_id]
        assert len(rows) == 1, f"{len(rows)} rows for {request_id}"
        return rows[0]

    def at_rest(self) -> None:
        """Nothing held, nothing in flight, nothing queued."""
        assert not self.cell.flights
        for pool in self.cell.pools.values():
            assert pool.queue.depth() == 0
            assert all(view.running == 0 and view.tokens == 0 for view in pool.views.values())
            assert not any((*pool.band_sequences, *pool.band_tokens, *pool.queued_bands))
            assert not pool.holders and (pool.roster.running, pool.roster.tokens) == (0, 0)
        for state in self.cell.tenants.values():
            assert (state.running, state.waiting) == (0, 0)
            assert state.budget.held == 0
            assert not any(state.pool_tokens.values())
            assert not any(state.queued_tokens.values())
            assert state.retries.running == 0
