"""Reading the controller: what `live`, `pools`, `ladder` and the gauges of /metrics show. Copies, never references."""

from __future__ import annotations

from collections import Counter

from rungway.clock import NS_PER_S
from rungway.contracts import NUSD_PER_USD
from rungway.control.cell import Cell, Now
from rungway.control.pool import Pool
from rungway.observe.metrics import Metrics


def pools(cell: Cell, now: Now) -> dict[str, object]:
    return {name: _pool(cell, pool, now) for name, pool in cell.pools.items()}


def _pool(cell: Cell, pool: Pool, now: Now) -> dict[str, object]:
    running, slots = pool.in_flight()
    return {
        "replicas": [
            {
                "replica_id": view.replica_id,
                "version": view.version,
                "state": _state(pool, view.replica_id, now),
                "running": view.running,
                "tokens": view.tokens,
                "max_num_seqs": view.max_num_seqs,
                "kv_tokens": view.kv_tokens,
            }
            for view in pool.views.values()
        ],
        "in_flight": running,
        "slots": slots,
        "saturation": round(pool.saturation(), 4),
        "queue_depth": pool.queue.depth(),
        "kv_use": round(pool.kv_use, 4),
        "prefill_tokens_per_s": round(pool.pace.prefill_rate, 1),
        "decode_ms_per_token": round(pool.pace.decode_ms, 3),
    }


def _state(pool: Pool, replica_id: str, now: Now) -> str:
    view = pool.views[replica_id]
    if view.draining:
        return "draining"
    stale = now.mono_ns - view.reported_ns > pool.spec.replica_stale_s * NS_PER_S
    if stale:
        return "stale"
    return "open" if pool.breakers[replica_id].state != "closed" else "ready"


def ladder(cell: Cell, now: Now) -> dict[str, object]:
    """Rungs in force per pool and class, their pressure, and the declared ladder."""
    spec = cell.platform.ladder
    names = [rung.name for rung in spec.rungs]
    scopes = []
    for pool in cell.pools.values():
        for scope, state in pool.scopes.items():
            rung = state.in_force
            pressure, signal = pool.pressures.get(scope, (0.0, "none"))
            scopes.append(
                {
                    "pool": pool.name,
                    "tenant_class": scope[0],
                    "side": scope[1],
                    "rung": rung,
                    "name": names[rung],
                    "pressure": pressure,
                    "signal": signal,
                    "override": state.override is not None,
                }
            )
    return {
        "rungs": [{"index": rung.index, "name": rung.name, "enter": rung.enter} for rung in spec.rungs],
        "leave": spec.leave,
        "dwell_up_s": spec.dwell_up_s,
        "dwell_down_s": spec.dwell_down_s,
        "digest": spec.digest,
        "scopes": scopes,
    }


def tenants(cell: Cell, now: Now, only: str | None = None) -> dict[str, object]:
    """Live counters and contracts per tenant."""
    shown: dict[str, object] = {}
    for name, state in cell.tenants.items():
        if only is not None and name != only:
            continue
        contract = state.contract
        limit = contract.budget.nusd
        shown[name] = {
            "plan": contract.plan,
            "class": contract.tenant_class,
            "weight": contract.weight,
            "models": contract.models,
            "suspended": contract.suspended,
            "running": state.running,
            "waiting": state.waiting,
            "in_flight_tokens": dict(state.pool_tokens),
            "held_tokens": sum(f.held_tokens for f in cell.flights.values() if f.state is state),
            "requests_remaining": state.requests.remaining(now.mono_ns),
            "tokens_remaining": state.tokens.remaining(now.mono_ns),
            "breaker": state.breaker.state,
            "budget": budget(cell, name, now),
            "budget_limit_usd": None if limit is None else limit / NUSD_PER_USD,
            "slo": {
                "ttft_ms_p99": contract.slo.ttft_ms_p99,
                "tpot_ms_p99": contract.slo.tpot_ms_p99,
                "availability": contract.slo.availability,
            },
        }
    return shown


def budget(cell: Cell, tenant: str, now: Now) -> dict[str, object]:
    """Spent and held money of the present window, in dollars, and when the next window starts."""
    state = cell.tenants[tenant]
    resets_s = state.budget.reset_s(now.wall_ns)  # first: it moves the meter into the present window
    limit = state.contract.budget.nusd
    return {
        "limit_usd": None if limit is None else limit / NUSD_PER_USD,
        "spent_usd": state.budget.spent / NUSD_PER_USD,
        "held_usd": state.budget.held / NUSD_PER_USD,
        "per": state.contract.budget.per,
        "at_limit": state.contract.budget.at_limit,
        "resets_in_s": round(resets_s),
    }


def live(cell: Cell, now: Now, only: str | None = None) -> dict[str, object]:
    """One look at everything that moves, for the dashboard and `rungway top`."""
    mine = tenants(cell, now, only)
    return {
        "pools": pools(cell, now) if only is None else {},
        "ladder": ladder(cell, now)["scopes"],
        "tenants": mine,
        "flights": sum(1 for f in cell.flights.values() if only is None or f.ask.tenant == only),
        "gateways": len(cell.gateways),
    }


def set_gauges(cell: Cell, metrics: Metrics, now: Now) -> None:
    """Bring the gauges up to date before a scrape."""
    depth: Counter[tuple[str, str]] = Counter()
    for flight in cell.flights.values():
        if flight.entry is not None:
            depth[(flight.ask.tenant, str(flight.ask.tenant_class))] += 1
    for name, state in cell.tenants.items():
        depth.setdefault((name, str(state.contract.tenant_class)), 0)
    metrics.set_gauge("queue_depth", depth.items())
    metrics.set_gauge(
        "in_flight_tokens",
        [((n, p), float(s.pool_tokens.get(p, 0))) for n, s in cell.tenants.items() for p in cell.pools],
    )
    metrics.set_gauge(
        "rung",
        [
            (
                (pool.name, scope[0] if scope[1] == "within" else f"{scope[0]}:over"),
                float(state.in_force),
            )
            for pool in cell.pools.values()
            for scope, state in pool.scopes.items()
        ],
    )
    metrics.set_gauge(
        "pressure", [((p.name,), max((v for v, _ in p.pressures.values()), default=0.0)) for p in cell.pools.values()]
    )
    blocks = []
    states: Counter[tuple[str, str, str]] = Counter()
    for pool in cell.pools.values():
        for version in pool.tier.versions:
            states.setdefault((pool.name, version.name, "ready"), 0)
        for replica_id, view in pool.views.items():
            states[(pool.name, view.version, _state(pool, replica_id, now))] += 1
        for replica_id, stats in pool.stats.items():
            used = stats.kv_blocks_total - stats.kv_blocks_free - stats.kv_blocks_cached
            blocks += [
                ((replica_id, "free"), float(stats.kv_blocks_free)),
                ((replica_id, "cached"), float(stats.kv_blocks_cached)),
                ((replica_id, "used"), float(used)),
            ]
    metrics.set_gauge("kv_blocks", blocks)
    engines = [(name, stats) for pool in cell.pools.values() for name, stats in pool.stats.items()]
    counts = [((name, "drafted"), float(stats.drafted_tokens)) for name, stats in engines]
    counts += [((name, "accepted"), float(stats.accepted_tokens)) for name, stats in engines]
    metrics.set_gauge("draft_tokens", counts)
    metrics.set_gauge("draft_length", [((name,), float(stats.draft_length)) for name, stats in engines])
    metrics.set_gauge("replica_state", states.items())
    metrics.set_gauge("quota_degraded", [((), 0.0)])
