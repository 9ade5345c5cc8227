"""usage, audit and explain read the database when no server runs; keys tell a running server."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import sqlite3
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rungway.cli import main
from rungway.clock import wall_ns
from rungway.ledger.schema import database_url
from rungway.ledger.writer import LedgerWriter
from rungway.settings import load_platform
from rungway.types import AuditEntry, LedgerRow

PLATFORM = """\
tenants_dir: tenants
state_dir: state
tiers:
  small:
    price_usd_per_1k: {input: 1, cached_input: 1, output: 1}
    versions: {s: {backend: fake}}
"""
Run = Callable[..., tuple[int, str, str]]


def row(request_id: str, tenant: str) -> LedgerRow:
    now = wall_ns() - 10**9
    decision = json.dumps({"rejected": [{"tier": "large", "kind": "model", "why": "budget"}], "rungs": {"small": 2}})
    return LedgerRow(
        request_id=request_id, started_wall_ns=now - 10**8, ended_wall_ns=now, tenant=tenant, key_id=f"{tenant}-1",
        tenant_class="standard", risk="normal", action="read", endpoint="chat", model="small", tier="small", version="s",
        rung=2, degraded="best_of_1", reason="pressure", outcome="completed", code="", prompt_tokens=100,
        cached_tokens=0, output_tokens=50, wasted_tokens=0, cost_nusd=150_000_000, price_input=10**9,
        price_cached_input=10**9, price_output=10**9, attempts=1, replica_id="r1", gateway_id="g1", session="",
        cache="off", queue_wait_ms=1.0, ttft_ms=5.0, tpot_ms=2.0, e2e_ms=100.0, slo_met=1, decision=decision,
    )  # fmt: skip


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """The state folder of a platform that ran once and was killed: ready.json is still there."""
    (tmp_path / "tenants").mkdir()
    for name in ("acme", "beta"):
        (tmp_path / "tenants" / f"{name}.yaml").write_text(f"tenant: {name}\n")
    (tmp_path / "rungway.yaml").write_text(PLATFORM)
    platform = load_platform(tmp_path / "rungway.yaml")
    state = Path(platform.state_dir)
    state.mkdir()
    writer = LedgerWriter(database_url(platform), lambda ticket: None)
    entry = AuditEntry(wall_ns=wall_ns(), kind="downgrade", tenant="acme", request_id="req-1", rung=2, detail='{"a":1}')
    writer.put(rows=[row("req-1", "acme"), row("req-2", "beta")], audit=[entry, entry])
    writer.close()
    ready = {"url": "http://127.0.0.1:9", "pid": os.getpid(), "keys": {"admin": "gone"}}
    (state / "ready.json").write_text(json.dumps(ready))
    return state


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], state: Path) -> Run:
    for name in ("RUNGWAY_URL", "RUNGWAY_KEY", "RUNGWAY_STATE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RUNGWAY_CONFIG", str(state.parent / "rungway.yaml"))

    def invoke(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["rungway", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    return invoke


@pytest.mark.parametrize("ready", [True, False])
def test_usage_from_the_database(run: Run, state: Path, ready: bool) -> None:
    if not ready:
        (state / "ready.json").unlink()
    code, out, err = run("usage", "--json")
    data = json.loads(out)
    assert (code, data["totals"]["requests"]) == (0, 2)
    assert data["tenants"]["acme"]["output_tokens"] == 50
    assert "no server answers" in err
    assert json.loads(run("usage", "--json", "--tenant", "beta")[1])["totals"]["requests"] == 1
    assert json.loads(run("usage", "--json", "--until", "2d")[1])["totals"]["requests"] == 0
    assert "acme" in run("usage")[1]


def test_a_given_url_is_never_replaced_by_the_database(run: Run) -> None:
    for command in (("usage",), ("audit",), ("explain", "req-1")):
        code, out, _ = run(*command, "--url", "http://127.0.0.1:9", "--key", "k")
        assert (code, out) == (1, "")


def test_explain_from_the_database(run: Run) -> None:
    code, out, _ = run("explain", "req-1")
    assert code == 0
    for word in ("acme", "best_of_1", "budget", "0.15", "downgrade"):
        assert word in out, word
    assert json.loads(run("explain", "req-1", "--json")[1])["request"]["decision"]["rungs"] == {"small": 2}
    code, out, err = run("explain", "req-9")
    assert (code, out) == (1, "")
    assert "no settled request 'req-9'" in err


def test_audit_and_its_verification_from_the_database(run: Run, state: Path) -> None:
    data = json.loads(run("audit", "--json")[1])["data"]
    assert sorted(entry["seq"] for entry in data) == [1, 2]
    assert len(json.loads(run("audit", "--json", "--after", "1")[1])["data"]) == 1
    assert json.loads(run("audit", "--json", "--tenant", "beta")[1])["data"] == []
    assert "downgrade" in run("audit")[1]
    code, out, _ = run("audit", "verify", "--json")
    assert (code, json.loads(out)["ok"], json.loads(out)["rows"]) == (0, True, 2)
    with sqlite3.connect(state / "ledger.db") as database:
        database.execute("UPDATE audit SET tenant = 'other' WHERE seq = 2")
    database.close()
    code, out, _ = run("audit", "verify")
    assert code == 1
    assert "BROKEN at entry 2" in out


def test_nothing_is_created_where_nothing_ran(run: Run, state: Path) -> None:
    elsewhere = state.parent / "elsewhere"
    code, out, err = run("usage", "--state", str(elsewhere))
    assert (code, out, len(err.splitlines())) == (1, "", 1)
    assert not elsewhere.exists()


def test_a_revocation_is_told_only_to_a_server_that_holds_the_lock(run: Run, state: Path) -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGHUP, lambda number, frame: heard.append(number))
    try:
        data = json.loads(run("keys", "create", "acme", "--json")[1])
        assert (data["reloaded"], heard) == (False, [])
        with (state / "serve.lock").open("w") as lock:
            data = json.loads(run("keys", "revoke", "acme", data["id"], "--json")[1])
            assert (data["reloaded"], heard) == (False, [])  # a lock file that nobody holds: the server is gone
            fcntl.flock(lock, fcntl.LOCK_EX)
            data = json.loads(run("keys", "create", "acme", "--json")[1])
            assert (data["reloaded"], heard) == (True, [signal.SIGHUP])
    finally:
        signal.signal(signal.SIGHUP, before)
