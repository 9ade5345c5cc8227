"""The answer of a simulation as plain data: per tenant, per class, fairness, cost, and whether the invariants held."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from rungway.clock import NS_PER_S
from rungway.contracts import NUSD_PER_USD, TenantClass
from rungway.outcomes import CODES, Code, Outcome
from rungway.simulate.clients import ANSWERED, Call
from rungway.simulate.measure import fairness, grouped, percentile, times_ms
from rungway.simulate.world import World
from rungway.types import LedgerRow

_WHOLE = frozenset({Outcome.COMPLETED, Outcome.LENGTH})


def good(world: World, call: Call) -> bool:
    """Answered by a model, whole, and within the tenant's targets for first token and pace."""
    if call.outcome not in _WHOLE or not call.first_ns:
        return False
    contract = world.clients.contracts[call.arrival.tenant]
    ttft_ms = (call.first_ns - call.sent_ns) / 1e6
    return ttft_ms <= contract.slo.ttft_ms_p99 and (call.tpot_ms is None or call.tpot_ms <= contract.slo.tpot_ms_p99)


def shed(call: Call) -> bool:
    """Refused because the platform is too full, not because of a limit of the tenant's own."""
    return call.outcome == Outcome.REFUSED and bool(call.code) and CODES[Code(call.code)].whose == "platform"


def summary(world: World) -> dict[str, Any]:
    calls = world.clients.calls
    duration_s = max(1e-9, (world.sampler.stopped_ns - world.sampler.started_ns) / NS_PER_S)
    weights = {tenant.name: tenant.weight for tenant in world.platform.tenants}
    fair = fairness(world.sampler.samples, weights, gap_bound(world))
    emitted = sum(replica.batch.emitted_total for replica in world.replicas.values())
    wasted = emitted - sum(call.tokens for call in calls if call.outcome in _WHOLE)
    busy_s = sum(replica.batch.busy_ns for replica in world.replicas.values()) / NS_PER_S
    starts = sum(gateway.starts for gateway in world.gateways)
    return {
        "duration_s": round(duration_s, 3),
        "requests": len(calls),
        "tries": sum(call.tries for call in calls),
        "attempts_per_request": _round(starts / max(1, len(calls))),
        "goodput_per_s": _round(sum(good(world, call) for call in calls) / duration_s),
        "output_tokens_per_s": _round(emitted / duration_s),
        "output_tokens": emitted,
        "wasted_tokens_ratio": _round(wasted / max(1, emitted)),
        "hit_rate": _round(hit_rate(world.disk.rows.values())),
        "utilisation": _round(busy_s / max(1e-9, world.sampler.replica_s)),
        "cost_usd": _usd(row.cost_nusd for row in world.disk.rows.values()),
        "replica_cost_usd": _round(_replica_cost(world, duration_s)),
        "outcomes": dict(Counter(str(call.outcome) for call in calls).most_common()),
        "codes": dict(Counter(str(call.code) for call in calls if call.code).most_common()),
        "downgrades": len(world.disk.downgrades),
        "fairness": {
            "jain_min": _round(fair.jain_min),
            "jain_mean": _round(fair.jain_mean),
            "windows": fair.windows,
            "gap_max": _round(fair.gap_max),
            "gap_bound": fair.bound,
        },
        "classes": {
            str(tenant_class): _class(world, [call for call in calls if call.tenant_class == tenant_class], duration_s)
            for tenant_class in TenantClass
            if any(call.tenant_class == tenant_class for call in calls)
        },
        "tenants": {name: _tenant(world, name, mine, duration_s) for name, mine in grouped(calls).items()},
        "faults": world.faults,
        "checks": world.watch.checks,
        "rows_misnamed": world.watch.misnamed,
        "rows_unwritten": world.watch.unwritten,
        "violations": world.watch.broken,
    }


def gap_bound(world: World) -> float:
    """2U / (smallest weight), U = max(longest prompt, 2 x tokens that a tier may have in flight); where the order is by
    locality, two quanta more, and two of what late requests yield."""
    by_tier: Counter[str] = Counter()
    for replica in world.living():
        by_tier[replica.version.tier] += replica.info.kv_tokens
    longest = max((call.arrival.input_tokens for call in world.clients.calls), default=0)
    unit = max(longest, 2 * max(by_tier.values(), default=0))
    spec = world.platform.controller
    quanta = 2.0 * spec.locality_quantum_tokens if spec.order == "dlpm" else 0.0
    if spec.shed.target_factor is not None and spec.order != "dlpm":
        quanta += 2.0 * spec.shed.late_quantum_tokens
    return 2.0 * unit / min(tenant.weight for tenant in world.platform.tenants) + quanta


def hit_rate(rows: Iterable[LedgerRow]) -> float | None:
    """Part of the prompt tokens that prefix caches supplied; None where no prompt was computed."""
    cached = prompts = 0
    for row in rows:
        cached += row.cached_tokens
        prompts += row.prompt_tokens
    return cached / prompts if prompts else None


def _tenant(world: World, name: str, calls: Sequence[Call], duration_s: float) -> dict[str, Any]:
    contract = world.clients.contracts[name]
    rows = [world.disk.rows[i] for call in calls for i in call.request_ids if i in world.disk.rows]
    met = sum(good(world, call) for call in calls)
    return {
        "class": str(contract.tenant_class),
        "weight": contract.weight,
        "requests": len(calls),
        "answered": sum(call.outcome in ANSWERED for call in calls),
        "refused": sum(call.outcome == Outcome.REFUSED for call in calls),
        "goodput_per_s": _round(met / duration_s),
        "within_slo": _round(met / len(calls)),
        **_times(calls),
        "hit_rate": _round(hit_rate(rows)),
        "output_tokens": sum(row.output_tokens for row in rows),
        "cost_usd": _usd(row.cost_nusd for row in rows),
        "rung_max": max((call.rung for call in calls), default=0),
    }


def _class(world: World, calls: Sequence[Call], duration_s: float) -> dict[str, Any]:
    return {
        "requests": len(calls),
        "shed_ratio": _round(sum(map(shed, calls)) / len(calls)),
        "goodput_per_s": _round(sum(good(world, call) for call in calls) / duration_s),
        **_times(calls),
    }


def _times(calls: Sequence[Call]) -> dict[str, Any]:
    ttft, tpot = times_ms(calls), [call.tpot_ms for call in calls if call.tpot_ms is not None]
    return {
        "ttft_ms_p50": _round(percentile(ttft, 0.5)),
        "ttft_ms_p99": _round(percentile(ttft, 0.99)),
        "tpot_ms_p50": _round(percentile(tpot, 0.5)),
        "tpot_ms_p99": _round(percentile(tpot, 0.99)),
    }


def _replica_cost(world: World, duration_s: float) -> float:
    versions = world.platform.versions()
    share = {v.pool: sum(r.version.pool == v.pool for r in world.living()) for v in versions}
    nusd = sum(share[v.pool] * v.replica_cost_nusd_per_hour * duration_s / 3600.0 for v in versions)
    return nusd / NUSD_PER_USD


def _usd(amounts: Iterable[int]) -> float:
    return round(sum(amounts) / NUSD_PER_USD, 6)


def _round(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
