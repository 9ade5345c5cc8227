"""The metrics of docs/metrics.md. One registry per cell, fed by ledger rows and by the counts that gateways send.

Label values come from configuration only: an unknown tenant or model shares the value "other", so outsiders cannot grow
the number of series.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from rungway.contracts import NUSD_PER_USD, Platform
from rungway.types import LedgerRow

OTHER = "other"
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
TPOT_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1)

# name -> (help, labels). Counters that gateways may feed through Counts are listed here as well.
COUNTERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "requests": ("Requests by how they ended.", ("tenant", "class", "tier", "outcome")),
    "tokens": ("Tokens by kind: input, cached_input, output, wasted.", ("tenant", "tier", "kind")),
    "cost_usd": ("Billed cost in US dollars.", ("tenant", "tier")),
    "degraded": ("Answers given at a rung, with the cause.", ("tenant", "rung", "reason")),
    "refused": ("Error answers by code.", ("tenant", "code")),
    "cache": ("Look-ups in the answer cache.", ("tenant", "kind", "result")),
    "leased": ("Requests that a gateway admitted from its lease while the controller was away.", ("tenant",)),
    "cancelled": ("Requests that the client gave up.", ("tenant",)),
    "retry": ("Further attempts after a failed one.", ("tenant",)),
    "evictions": ("Answers stopped for other work, to go on later.", ("tenant",)),
    "structured_output_failures": ("Answers that did not fit their schema.", ("tenant",)),
}
HISTOGRAMS: dict[str, tuple[str, tuple[float, ...]]] = {
    "ttft_seconds": ("Time to first token.", SECONDS),
    "tpot_seconds": ("Time per output token after the first.", TPOT_SECONDS),
    "e2e_seconds": ("Whole request.", SECONDS),
    "queue_wait_seconds": ("Time in the controller's queue.", SECONDS),
}
GAUGES: dict[str, tuple[str, tuple[str, ...]]] = {
    "queue_depth": ("Requests waiting.", ("tenant", "class")),
    "in_flight_tokens": ("Tokens granted and not yet settled.", ("tenant", "tier")),
    "rung": (
        "Rung of the ladder in force; class suffix :over is for tenants over their share.",
        ("pool", "tenant_class"),
    ),
    "pressure": ("Highest pressure of the pool's scopes.", ("pool",)),
    "kv_blocks": ("KV blocks by state: free, cached, used.", ("replica", "state")),
    "draft_tokens": (
        "Tokens of speculative decoding since the engine's start: drafted, accepted.",
        ("replica", "state"),
    ),
    "draft_length": ("Drafts of a sequence in a step, moving average; near 0 where they do not pay.", ("replica",)),
    "replica_state": ("Replicas by state.", ("tier", "version", "state")),
    "slo_attainment": ("Share of recent answers that met the target.", ("tenant", "slo")),
    "quota_degraded": ("1 while quotas are not enforced by the controller.", ()),
}


class Metrics:
    """Counters move with rows and counts; gauges are read from the controller when somebody scrapes."""

    def __init__(self, platform: Platform) -> None:
        self.registry = CollectorRegistry()
        self.counters = {
            name: Counter(f"rungway_{name}_total", text, labels, registry=self.registry)
            for name, (text, labels) in COUNTERS.items()
        }
        self.histograms = {
            name: Histogram(
                f"rungway_{name}", text, ("tenant", "class", "tier"), registry=self.registry, buckets=buckets
            )
            for name, (text, buckets) in HISTOGRAMS.items()
        }
        self.gauges = {
            name: Gauge(f"rungway_{name}", text, labels, registry=self.registry)
            for name, (text, labels) in GAUGES.items()
        }
        self._children: dict[tuple[str, tuple[str, ...]], Callable[[float], object]] = {}
        self.known: frozenset[str] = frozenset()
        self.adopt(platform)

    def adopt(self, platform: Platform) -> None:
        self.known = frozenset(tenant.name for tenant in platform.tenants)

    def count(self, name: str, labels: tuple[str, ...], amount: float = 1.0) -> None:
        child = self._children.get((name, labels))
        if child is None:
            child = self._children[(name, labels)] = self.counters[name].labels(*labels).inc
        child(amount)

    def observe(self, name: str, labels: tuple[str, ...], milliseconds: float) -> None:
        child = self._children.get((name, labels))
        if child is None:
            child = self._children[(name, labels)] = self.histograms[name].labels(*labels).observe
        child(milliseconds / 1000.0)

    def increments(self, increments: Iterable[tuple[str, tuple[str, ...], float]]) -> None:
        """Counts from a gateway, by full metric name. The tenant label is checked against the configuration."""
        for full_name, labels, amount in increments:
            name = full_name.removeprefix("rungway_").removesuffix("_total")
            if name in self.counters and len(labels) == len(COUNTERS[name][1]) and amount > 0:
                tenant = labels[0] if labels[0] in self.known else OTHER
                self.count(name, (tenant, *labels[1:]), amount)

    def row(self, row: LedgerRow) -> None:
        """One settled request."""
        tenant = row.tenant if row.tenant in self.known else OTHER
        tier = row.tier or "none"
        self.count("requests", (tenant, row.tenant_class, tier, row.outcome))
        if row.prompt_tokens or row.output_tokens:
            self.count("tokens", (tenant, tier, "input"), row.prompt_tokens - row.cached_tokens)
            self.count("tokens", (tenant, tier, "cached_input"), row.cached_tokens)
            self.count("tokens", (tenant, tier, "output"), row.output_tokens)
            self.count("cost_usd", (tenant, tier), row.cost_nusd / NUSD_PER_USD)
        if row.wasted_tokens:
            self.count("tokens", (tenant, tier, "wasted"), row.wasted_tokens)
        if row.degraded:
            for rung in row.degraded.split(","):
                self.count("degraded", (tenant, rung, row.reason))
        if row.outcome == "refused":
            self.count("refused", (tenant, row.code))
            return
        if row.outcome == "client_cancelled":
            self.count("cancelled", (tenant,))
        if row.attempts > 1:
            self.count("retry", (tenant,), row.attempts - 1)
        where = (tenant, row.tenant_class, tier)
        for name, value in (("ttft_seconds", row.ttft_ms), ("tpot_seconds", row.tpot_ms), ("e2e_seconds", row.e2e_ms)):
            if value is not None:
                self.observe(name, where, value)
        self.observe("queue_wait_seconds", where, row.queue_wait_ms)

    def set_gauge(self, name: str, values: Iterable[tuple[tuple[str, ...], float]]) -> None:
        """Replace all series of a gauge; those not named are gone."""
        gauge = self.gauges[name]
        if not GAUGES[name][1]:
            for _, value in values:
                gauge.set(value)
            return
        gauge.clear()
        for labels, value in values:
            gauge.labels(*labels).set(value)

    def render(self) -> bytes:
        """Prometheus text exposition."""
        return generate_latest(self.registry)
