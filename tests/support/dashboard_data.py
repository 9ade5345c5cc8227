"""Rows of a made-up day for the dashboard: several tenants, two tiers, a morning of pressure. Deterministic."""

from __future__ import annotations

import math
import random

import msgspec

from rungway.contracts import NUSD_PER_USD
from rungway.types import AuditEntry, LedgerRow

HOUR_NS = 3600 * 1_000_000_000
PRICES = {"small": (200_000, 50_000, 600_000), "large": (1_000_000, 250_000, 3_000_000)}
ENTER = {
    "full": 0.0,
    "rerank_off": 0.9,
    "best_of_1": 0.95,
    "context_trim": 1.0,
    "small_tier": 1.1,
    "cached_answer": 2.0,
    "template": 4.0,
    "defer": 8.0,
}


def offer(tier: str, rung: int = 0, degraded: tuple[str, ...] = ()) -> dict[str, object]:
    large = tier == "large"
    return {
        "kind": "model",
        "tier": tier,
        "version": f"fake-{tier}",
        "prompt_tokens": 412,
        "max_tokens": 256,
        "best_of": 1,
        "price_nusd": 1_180_000 if large else 236_000,
        "p_ok": 0.93 if large else 0.81,
        "time_ms": 2650.0 if large else 1310.0,
        "net_value_usd": 0.017 if large else 0.0156,
        "rung": rung,
        "degraded": degraded,
    }


def usage_row(number: int, rng: random.Random, tenant: str, tenant_class: str, ended_ns: int, busy: bool) -> LedgerRow:
    """One settled request. `busy`: the platform is under pressure then."""
    refused = busy and tenant_class != "interactive" and rng.random() < 0.06
    wanted = "large" if rng.random() < 0.55 else "small"
    lowered = busy and wanted == "large" and not refused and rng.random() < 0.6
    tier = "" if refused else "small" if lowered else wanted
    prompt, output = (0, 0) if refused else (rng.randint(120, 1400), rng.randint(40, 320))
    cached = int(prompt * rng.choice((0, 0, 0.5, 0.8)))
    input_price, cached_price, output_price = PRICES.get(tier, (0, 0, 0))
    cost = ((prompt - cached) * input_price + cached * cached_price + output * output_price) // 1000
    ttft = None if refused else rng.lognormvariate(math.log(620 if busy else 210), 0.42)
    decision = {
        "ask": {"model": "auto", "tiers": ["small", "large"]},
        "rungs": {"large": 4, "small": 0} if lowered else {"large": 0, "small": 0},
        "pressure": {"large": [1.34, "queue_wait"], "small": [0.31, "none"]},
        "thresholds": {"enter": ENTER, "leave": 0.7},
        "offers": [offer("large"), offer("small")],
        "best": offer("large"),
        "given": None if refused else offer(tier, 4, ("small_tier",)) if lowered else offer(tier),
        "rejected": [{"tier": "large", "kind": "model", "why": "rung small_tier"}] if lowered else [],
        "reason": "queue_wait" if lowered else "best_offer",
        "config": "5f0c1d9e77aa",
    }
    return LedgerRow(
        request_id=f"req_{number:024x}",
        started_wall_ns=ended_ns - 3_000_000_000,
        ended_wall_ns=ended_ns,
        tenant=tenant,
        key_id=f"{tenant}-1",
        tenant_class=tenant_class,
        risk="normal",
        action="read",
        endpoint="chat",
        model="auto",
        tier=tier,
        version=f"fake-{tier}" if tier else "",
        rung=4 if lowered else 0,
        degraded="small_tier" if lowered else "",
        reason="overloaded" if refused else "queue_wait" if lowered else "best_offer",
        outcome="refused" if refused else "completed",
        code="overloaded" if refused else "",
        prompt_tokens=prompt,
        cached_tokens=cached,
        output_tokens=output,
        wasted_tokens=0,
        cost_nusd=cost,
        price_input=input_price,
        price_cached_input=cached_price,
        price_output=output_price,
        attempts=0 if refused else 1,
        replica_id="" if refused else f"{tier}/fake-{tier}/7c1f09",
        gateway_id="gateway/1",
        session="",
        cache="off",
        queue_wait_ms=rng.random() * (900 if busy else 20),
        ttft_ms=ttft,
        tpot_ms=None if refused else rng.uniform(6, 28),
        e2e_ms=None if ttft is None else ttft + output * 12.0,
        slo_met=None if ttft is None else int(ttft <= 2000),
        decision=msgspec.json.encode(decision).decode(),
    )


def audit_of(row: LedgerRow) -> AuditEntry | None:
    """What the controller would have written down about a row."""
    decision = msgspec.json.decode(row.decision)
    common = {key: decision[key] for key in ("rungs", "pressure", "thresholds")}
    if row.outcome == "refused":
        detail = {"code": row.code, "model": row.model, "tried": [["large", "model", "queue full"]], **common}
        kind = "refusal"
    elif row.degraded:
        detail = {
            "degraded": row.degraded.split(","),
            "cause": row.reason,
            "model": row.model,
            "best": decision["best"],
            "given": decision["given"],
            "tried": [["large", "model", "rung small_tier"]],
            **common,
        }
        kind = "downgrade"
    else:
        return None
    text = msgspec.json.encode(detail, order="sorted").decode()
    return AuditEntry(
        wall_ns=row.started_wall_ns,
        kind=kind,
        tenant=row.tenant,
        request_id=row.request_id,
        rung=row.rung,
        detail=text,
    )


def rung_move(wall_ns: int, side: str, before: str, after: str, pressure: float) -> AuditEntry:
    detail = {
        "pool": "large",
        "tenant_class": "standard",
        "side": side,
        "rung_from": before,
        "rung_to": after,
        "pressure": pressure,
        "signal": "queue_wait",
        "why": "up" if pressure > 0.9 else "down",
    }
    text = msgspec.json.encode(detail, order="sorted").decode()
    return AuditEntry(wall_ns=wall_ns, kind="rung", tenant="", request_id="", rung=4, detail=text)


def made_up(now_ns: int, hours: int, tenants: dict[str, tuple[str, float]]) -> tuple[list[LedgerRow], list[AuditEntry]]:
    """Rows and audit entries of the last `hours`. `tenants`: name -> (class, requests per hour at noon)."""
    rng = random.Random(7)
    rows: list[LedgerRow] = []
    for back in range(hours, 0, -1):
        busy = back in (6, 7)
        for name, (tenant_class, rate) in tenants.items():
            wave = 0.45 + 0.55 * math.sin((hours - back) / 24 * 2 * math.pi) ** 2
            for _ in range(int(rate * wave * (1.9 if busy else 1.0) * rng.uniform(0.8, 1.2))):
                ended = now_ns - back * HOUR_NS + int(rng.random() * HOUR_NS)
                rows.append(usage_row(len(rows) + 1, rng, name, tenant_class, ended, busy))
    entries = [entry for row in rows if (entry := audit_of(row)) is not None]
    start = now_ns - 7 * HOUR_NS
    entries += [
        rung_move(start, "over", "full", "small_tier", 1.34),
        rung_move(start + 2 * HOUR_NS, "over", "small_tier", "full", 0.42),
    ]
    entries.sort(key=lambda entry: entry.wall_ns)
    return rows, entries


__all__ = ["NUSD_PER_USD", "audit_of", "made_up", "offer", "usage_row"]
