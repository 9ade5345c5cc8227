"""Verdicts of the gateway benchmark: ratios inside a round, medians over rounds, and the exit that hangs on them."""

from __future__ import annotations

from typing import Any

from rungway.chaos.bench.gateway import judge_rounds
from rungway.chaos.bench.report import Report

NAMES = ("ours", "litellm", "vllm-router")


def row(per_s: float, p50_ms: float = 1.0, **more: Any) -> dict[str, Any]:
    return {"per_s": per_s, "p50_ms": p50_ms, "errors": {}, "degraded": 0, "lost": 0, "misplaced": 0, **more}


def rows(unary: float, streams: float, p50_ms: float = 1.0) -> dict[str, dict[str, Any]]:
    names = {f"unary {many}": row(unary, p50_ms) for many in (1, 16, 64)}
    return names | {f"streams {many}": row(streams) for many in (16, 64, 200)}


def judged(*rounds: dict[str, Any]) -> dict[str, tuple[float, bool]]:
    report = Report("gateway")
    judge_rounds(report, list(rounds), NAMES)
    return {verdict.what: (verdict.measured, verdict.ok) for verdict in report.verdicts}


def a_round(ours: float = 1600, litellm: float = 80, router: float = 4000) -> dict[str, Any]:
    return {"ours": rows(ours, 400, 1.6), "litellm": rows(litellm, 25, 14.0), "vllm-router": rows(router, 420, 0.4)}


def test_all_bars_hold_when_they_hold() -> None:
    assert all(ok for _, ok in judged(a_round()).values())


def test_the_median_of_the_rounds_decides() -> None:
    found = judged(a_round(ours=800), a_round(ours=1600), a_round(ours=2400))
    assert found["unary req/s at 64 connections / LiteLLM's best"] == (20.0, True)
    found = judged(a_round(ours=800), a_round(ours=800), a_round(ours=2400))
    assert found["unary req/s at 64 connections / LiteLLM's best"] == (10.0, False)


def test_the_others_best_row_counts() -> None:
    made = a_round()
    made["litellm"]["unary 1"]["per_s"] = 160
    assert judged(made)["unary req/s at 64 connections / LiteLLM's best"] == (10.0, False)


def test_one_lost_frame_in_one_round_fails() -> None:
    bad = a_round()
    bad["ours"]["streams 200"]["lost"] = 1
    assert judged(a_round(), bad)["frames lost or out of order"] == (1, False)


def test_a_side_that_served_nothing_proves_nothing() -> None:
    measured, ok = judged(a_round(litellm=0))["unary req/s at 64 connections / LiteLLM's best"]
    assert measured != measured and not ok


def test_a_report_without_verdicts_is_not_ok() -> None:
    assert not Report("gateway").ok
