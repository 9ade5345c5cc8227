"""Clients: they send what the workload says when it says (open loop), hang up, and try again as often as they are told."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from rungway.clock import NS_PER_MS, NS_PER_S
from rungway.contracts import CLASS_ORDER, Platform, TenantClass
from rungway.outcomes import Outcome
from rungway.simulate.flight import Flight
from rungway.simulate.gateway import SimGateway
from rungway.simulate.loop import Loop
from rungway.simulate.prefix import CACHE_BLOCK_TOKENS, prefix_keys
from rungway.simulate.workload import Arrival
from rungway.types import Ask

UNREACHABLE = "unreachable"
GATEWAY_DIED = "gateway_died"
ANSWERED = frozenset({Outcome.COMPLETED, Outcome.LENGTH, Outcome.CACHE_HIT, Outcome.TEMPLATE})
_NO_RETRY = frozenset({*ANSWERED, Outcome.CLIENT_CANCELLED})


@dataclass(slots=True)
class Call:
    """One logical request of a client, over all its tries. Times in virtual nanoseconds; `first_ns` is 0 until a token
    came. `last_try_ns` is when the try that ended it was sent."""

    arrival: Arrival
    tenant_class: TenantClass
    sent_ns: int
    last_try_ns: int = 0
    tries: int = 0
    engine_starts: int = 0
    outcome: str = ""
    code: str = ""
    first_ns: int = 0
    done_ns: int = 0
    tokens: int = 0
    tpot_ms: float | None = None
    rung: int = 0
    tier: str = ""
    request_ids: list[str] = field(default_factory=list)


class Clients:
    """All tenants' clients. `tries_max` counts the first try, too; `backoff_s` is what passes between tries (None = as
    long as the refusal's Retry-After says)."""

    def __init__(
        self,
        loop: Loop,
        platform: Platform,
        gateways: Sequence[SimGateway],
        *,
        tries_max: int = 1,
        backoff_s: float | None = None,
    ) -> None:
        self.loop, self.platform, self.gateways = loop, platform, gateways
        self.tries_max, self.backoff_s = tries_max, backoff_s
        self.calls: list[Call] = []
        self.owner: dict[str, Call] = {}
        self.pending = 0
        self._source: Iterator[Arrival] = iter(())
        self._serial = 0
        self._turn = 0
        self.contracts = {tenant.name: tenant for tenant in platform.tenants}
        self._tiers = {alias.name: alias.tiers for alias in platform.models}
        self._names = [tier.name for tier in platform.tiers]

    def begin(self, source: Iterator[Arrival]) -> None:
        self._source = source
        self._next()

    def _next(self) -> None:
        """Plan one arrival at a time: a trace of an hour need not lie in the heap."""
        arrival = next(self._source, None)
        if arrival is not None:
            self.pending += 1
            self.loop.at(int(arrival.at_s * NS_PER_S), self._send, arrival)

    def _send(self, arrival: Arrival) -> None:
        self._next()
        contract = self.contracts[arrival.tenant]
        wanted = arrival.tenant_class or contract.tenant_class
        lower = max(CLASS_ORDER.index(wanted), CLASS_ORDER.index(contract.tenant_class))
        call = Call(arrival, CLASS_ORDER[lower], self.loop.now_ns)
        self.calls.append(call)
        self._try(call)

    def _try(self, call: Call) -> None:
        call.tries += 1
        call.last_try_ns = self.loop.now_ns
        living = [gateway for gateway in self.gateways if gateway.alive]
        if not living:
            self._over(call, UNREACHABLE, "", None)
            return
        self._turn += 1
        gateway = living[self._turn % len(living)]
        ask = self._ask(call, gateway.name)
        call.request_ids.append(ask.request_id)
        self.owner[ask.request_id] = call
        flight = gateway.submit(ask, call.arrival)
        if call.arrival.leaves_ms is not None and call.tries == 1:
            self.loop.after(int(call.arrival.leaves_ms * NS_PER_MS), gateway.leave, flight)

    def _ask(self, call: Call, gateway_id: str) -> Ask:
        arrival, contract = call.arrival, self.contracts[call.arrival.tenant]
        model = arrival.model or contract.models[0]
        self._serial += 1
        keys = prefix_keys(arrival.tenant, arrival.blocks)[: self.platform.gateway.prefix_keys_max]
        prompt, limit = max(1, arrival.input_tokens), self.platform.ladder.context_limit_tokens
        return Ask(
            request_id=f"q{self._serial}",
            gateway_id=gateway_id,
            tenant=arrival.tenant,
            key_id=f"{arrival.tenant}-1",
            tenant_class=call.tenant_class,
            model=model,
            tiers=self._tiers.get(model, (model,)),
            prompt_tokens=dict.fromkeys(self._names, prompt),
            trimmed_tokens=dict.fromkeys(self._names, min(prompt, limit)),
            output_bound=arrival.output_bound,
            received_wall_ns=self.loop.wall_ns(),
            stream=True,
            risk=arrival.risk,
            action=arrival.action,
            deadline_ms=arrival.deadline_ms,
            session=arrival.session,
            prefix_keys=dict.fromkeys(self._names, keys) if keys else {},
            key_tokens=dict.fromkeys(self._names, CACHE_BLOCK_TOKENS) if keys else {},
        )

    # -- ends -------------------------------------------------------------------------------------------------

    def done(self, flight: Flight, outcome: Outcome) -> None:
        """A gateway answered."""
        call = self.owner[flight.ask.request_id]
        call.engine_starts += flight.attempts
        if flight.grant is not None:
            call.rung, call.tier = flight.grant.offer.rung, flight.grant.offer.tier
        if flight.first_ns and not call.first_ns:
            call.first_ns = flight.first_ns
        call.tokens = flight.tokens
        if flight.last_ns > flight.first_ns:
            call.tpot_ms = (flight.last_ns - flight.first_ns) / max(1, flight.tokens - 1) / NS_PER_MS
        wait_s = None if flight.refusal is None else flight.refusal.retry_after_s
        self._over(call, outcome, flight.code or "", wait_s)

    def died(self, flight: Flight) -> None:
        """The gateway died under a request."""
        call = self.owner[flight.ask.request_id]
        call.engine_starts += flight.attempts
        self._over(call, GATEWAY_DIED, "", None)

    def _over(self, call: Call, outcome: str, code: str, retry_after_s: int | None) -> None:
        call.outcome, call.code, call.done_ns = outcome, code, self.loop.now_ns
        if outcome not in _NO_RETRY and call.tries < self.tries_max:
            wait_s = self.backoff_s if self.backoff_s is not None else float(retry_after_s or 1)
            self.loop.after(int(wait_s * NS_PER_S), self._try, call)
        else:
            self.pending -= 1
