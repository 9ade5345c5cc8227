"""One tenant's live state: buckets, budget, breaker, retry budget and what it has in flight."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from rungway.clock import NS_PER_S
from rungway.contracts import CLASS_ORDER, ControllerSpec, Tenant
from rungway.policies.breaker import Breaker
from rungway.policies.bucket import TokenBucket
from rungway.policies.budget import BudgetMeter
from rungway.policies.retry import RetryBudget
from rungway.types import RateInfo

if TYPE_CHECKING:
    from rungway.control.crowd import Crowd

ACTIVE_FOR_NS = 10 * NS_PER_S
BANDS = {tenant_class: band for band, tenant_class in enumerate(CLASS_ORDER)}


class TenantState:
    """Mutable counters of a tenant. `pool_tokens[pool]` are its granted tokens in flight there,
    `pool_running[pool]` its sequences, `queued_tokens[pool]` the tokens it has waiting, of which `late_tokens[pool]` are
    late. `running` counts granted requests, `waiting` queued ones; both change through `count` only."""

    __slots__ = (
        "breaker",
        "budget",
        "contract",
        "crowd",
        "last_ask_ns",
        "late_tokens",
        "pool_running",
        "pool_tokens",
        "queued_tokens",
        "requests",
        "retries",
        "running",
        "service_s",
        "tokens",
        "waiting",
    )

    def __init__(self, contract: Tenant, spec: ControllerSpec, crowd: Crowd, now_ns: int, wall_ns: int) -> None:
        self.contract = contract
        self.crowd = crowd
        self.requests = TokenBucket(contract.quotas.requests_per_minute, now_ns)
        self.tokens = TokenBucket(contract.quotas.tokens_per_minute, now_ns)
        self.budget = BudgetMeter(contract.budget, wall_ns)
        self.breaker = Breaker(spec.breaker_failures, spec.breaker_open_s)
        self.retries = RetryBudget(contract.isolation.retry_budget_ratio, spec.retry_budget_floor)
        self.running = 0
        self.waiting = 0
        self.pool_tokens: dict[str, int] = {}
        self.pool_running: dict[str, int] = {}
        self.queued_tokens: dict[str, int] = {}
        self.late_tokens: dict[str, int] = {}
        self.last_ask_ns = now_ns - ACTIVE_FOR_NS
        self.service_s = 1.0

    def reload(self, contract: Tenant, spec: ControllerSpec, now_ns: int, wall_ns: int) -> None:
        """New contract, same usage: what was used stays used."""
        self.contract = contract
        self.breaker.adopt(spec.breaker_failures, spec.breaker_open_s)
        self.retries.resize(contract.isolation.retry_budget_ratio, spec.retry_budget_floor)
        self.requests.resize(contract.quotas.requests_per_minute, now_ns)
        self.tokens.resize(contract.quotas.tokens_per_minute, now_ns)
        self.budget.reload(contract.budget, wall_ns)

    def count(self, *, running: int = 0, waiting: int = 0) -> None:
        """So many requests more, or less, are granted or queued."""
        self.running += running
        self.waiting += waiting
        if self.running or self.waiting:
            self.crowd.join(self)
        else:
            self.crowd.rest(self)

    def active(self, now_ns: int) -> bool:
        """Has work in the system or asked within the last seconds: only then is its reserve kept free."""
        return self.running > 0 or self.waiting > 0 or now_ns - self.last_ask_ns < ACTIVE_FOR_NS

    def at_concurrency(self) -> bool:
        limit = self.contract.quotas.concurrent_requests
        return limit is not None and self.running >= limit

    def load_tokens(self, pool: str) -> int:
        """Tokens in flight and waiting in a pool: what its share is measured by."""
        return self.pool_tokens.get(pool, 0) + self.queued_tokens.get(pool, 0)

    def learn_service(self, seconds: float) -> None:
        self.service_s += 0.1 * (seconds - self.service_s)

    def concurrency_retry_s(self) -> int:
        """Seconds until one of its running requests has probably ended."""
        return min(60, max(1, math.ceil(self.service_s / max(1, self.running))))

    def rate(self, now_ns: int) -> RateInfo:
        quotas = self.contract.quotas
        return RateInfo(
            limit_requests=quotas.requests_per_minute,
            remaining_requests=self.requests.remaining(now_ns),
            reset_requests_s=self.requests.reset_s(now_ns),
            limit_tokens=quotas.tokens_per_minute,
            remaining_tokens=self.tokens.remaining(now_ns),
            reset_tokens_s=self.tokens.reset_s(now_ns),
        )
