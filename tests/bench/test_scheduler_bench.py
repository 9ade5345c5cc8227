"""The scheduler's benchmark keeps the load that it says it measures, and its books balance."""

from __future__ import annotations

import pytest

from rungway.chaos.bench import scheduler as bench


def test_the_load_stays_full_and_what_ends_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RUNNING": 30, "WAITING": 60, "TENANTS": 5, "STEPS": 80, "WARM_STEPS": 10}.items():
        monkeypatch.setattr(bench, name, value)
    monkeypatch.setattr(bench, "BATCHED_TOKENS", 512)
    report = bench.bench_scheduler(quick=False, say=lambda _: None)
    assert [row["rules"] for row in report.control] == ["plain", "lpm and soft quotas"]
    for row in report.control:
        assert row["steps"] == 80 and row["running"] >= 25 and row["running"] + row["waiting"] == 90
        assert row["tokens_per_step"] >= 30
    assert [verdict.ok for verdict in report.verdicts if "books" in verdict.what] == [True, True]
