"""The explanation of a decision for people. The decision is JSON written by whatever version ran then, so every part
may be missing and unknown parts are shown as they are."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rungway.commands.common import cell, clock_text, show, table
from rungway.contracts import NUSD_PER_USD

_KNOWN = (
    "ask",
    "rungs",
    "pressure",
    "thresholds",
    "offers",
    "best",
    "given",
    "rejected",
    "reason",
    "config",
    "queue_wait_ms",
)


def print_explanation(answer: Mapping[str, Any]) -> None:
    """`answer`: {"request": ledger row with a parsed `decision`, "audit": entries}."""
    row = answer.get("request") or {}
    decision = row.get("decision")
    decision = decision if isinstance(decision, dict) else {}
    show(f"[bold]{cell(row.get('request_id'))}[/bold]")
    _facts("Asked", _asked(row, decision))
    _facts("Ladder", _ladder(decision))
    _offers(decision)
    _facts("Given", _given(row, decision))
    _facts("Measured", _measured(row))
    _audit(answer.get("audit") or [])
    _facts("More", [(name, value) for name, value in decision.items() if name not in _KNOWN])


def _facts(title: str, facts: Sequence[tuple[str, Any]]) -> None:
    kept = [(name, value) for name, value in facts if value not in (None, "", [], {})]
    if kept:
        show("", f"[bold]{title}[/bold]")
        for name, value in kept:
            show(f"  {cell(name):<20} {_short(value)}")


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False) if isinstance(value, dict | list) else cell(value)
    return cell(text) if isinstance(value, dict | list) else text


def _ns(value: Any) -> str | None:
    return clock_text(value) if isinstance(value, int) and value > 0 else None


def _asked(row: Mapping[str, Any], decision: Mapping[str, Any]) -> list[tuple[str, Any]]:
    ask = decision.get("ask") if isinstance(decision.get("ask"), dict) else {}
    same = ("request_id", "tenant", "key_id", "tenant_class", "class", "risk", "action", "model", "endpoint", "session")
    return [
        ("at", _ns(row.get("started_wall_ns"))),
        ("tenant", row.get("tenant")),
        ("key", row.get("key_id")),
        ("class", row.get("tenant_class")),
        ("risk", row.get("risk")),
        ("action", row.get("action")),
        ("model", row.get("model")),
        ("endpoint", row.get("endpoint")),
        ("session", row.get("session")),
        *((name, value) for name, value in (ask or {}).items() if name not in same),
    ]


def _ladder(decision: Mapping[str, Any]) -> list[tuple[str, Any]]:
    pressure = decision.get("pressure")
    facts: list[tuple[str, Any]] = []
    for pool, value in pressure.items() if isinstance(pressure, dict) else ():
        if isinstance(value, list | tuple) and len(value) == 2:
            facts.append((f"pressure {pool}", f"{cell(value[0])} (from {value[1]})"))
        else:
            facts.append((f"pressure {pool}", value))
    rungs, thresholds = decision.get("rungs"), decision.get("thresholds")
    names = thresholds.get("names") if isinstance(thresholds, dict) else None
    named = dict(enumerate(names)) if isinstance(names, list) else {}
    for tier, rung in rungs.items() if isinstance(rungs, dict) else ():
        facts.append((f"rung {tier}", f"{rung} {named[rung]}" if rung in named else rung))
    if isinstance(thresholds, dict):
        facts += [(f"threshold {name}", value) for name, value in thresholds.items() if name != "names"]
    else:
        facts.append(("thresholds", thresholds))
    return facts


def _offers(decision: Mapping[str, Any]) -> None:
    offers = [offer for offer in decision.get("offers") or [] if isinstance(offer, dict)]
    best, given = decision.get("best"), decision.get("given")
    if isinstance(given, dict) and given not in offers:
        offers.append(given)
    rows = []
    for offer in offers:
        degraded = offer.get("degraded") or ()
        rows.append(
            [
                " ".join(name for name, marked in (("best", best), ("given", given)) if offer == marked),
                offer.get("kind"),
                "/".join(str(offer[name]) for name in ("tier", "version") if offer.get(name)) or None,
                offer.get("p_ok"),
                _usd(offer.get("price_nusd")),
                offer.get("net_value_usd"),
                offer.get("time_ms"),
                offer.get("rung"),
                ", ".join(map(str, degraded)) if isinstance(degraded, list | tuple) else degraded,
            ]
        )
    if rows:
        columns = ["", "kind", "offer", "p_ok", "price USD", "net value USD", "time ms", "rung", "degraded"]
        show("", table("Offers", columns, rows))
    rejected = [entry for entry in decision.get("rejected") or [] if isinstance(entry, dict)]
    if rejected:
        rows = [[entry.get("tier"), entry.get("kind"), entry.get("why")] for entry in rejected]
        show("", table("Not given", ["tier", "kind", "why"], rows))


def _usd(nusd: Any) -> float | None:
    return nusd / NUSD_PER_USD if isinstance(nusd, int | float) else None


def _given(row: Mapping[str, Any], decision: Mapping[str, Any]) -> list[tuple[str, Any]]:
    served = "/".join(str(row[name]) for name in ("tier", "version") if row.get(name))
    return [
        ("outcome", row.get("outcome")),
        ("code", row.get("code")),
        ("served by", served),
        ("rung", row.get("rung")),
        ("degraded", row.get("degraded")),
        ("reason", row.get("reason") or decision.get("reason")),
        ("cache", row.get("cache")),
        ("replica", row.get("replica_id")),
        ("attempts", row.get("attempts")),
        ("configuration", decision.get("config")),
    ]


def _measured(row: Mapping[str, Any]) -> list[tuple[str, Any]]:
    met = row.get("slo_met")
    return [
        ("ended", _ns(row.get("ended_wall_ns"))),
        *((name, row.get(name)) for name in ("queue_wait_ms", "ttft_ms", "tpot_ms", "e2e_ms")),
        ("SLO met", None if met is None else bool(met)),
        *((name, row.get(name)) for name in ("prompt_tokens", "cached_tokens", "output_tokens", "wasted_tokens")),
        ("cost USD", _usd(row.get("cost_nusd"))),
    ]


def _audit(entries: Sequence[Any]) -> None:
    """What the log says of this request in a line each; the whole entries are in `--json` and `rungway audit`."""
    rows = []
    for entry in entries:
        if isinstance(entry, dict):
            what = _gist(entry.get("detail"))
            digest = str(entry.get("hash") or "")[:12]
            rows.append([entry.get("seq"), _ns(entry.get("wall_ns")), entry.get("kind"), what, digest])
    if rows:
        show("", table("Audit", ["seq", "time", "kind", "what", "hash"], rows))


def _gist(detail: Any) -> str:
    if not isinstance(detail, dict):
        return _short(detail)
    if detail.get("degraded"):
        return f"{', '.join(map(str, detail['degraded']))} because of {detail.get('cause')}"
    return str(detail.get("code") or _short(detail))
