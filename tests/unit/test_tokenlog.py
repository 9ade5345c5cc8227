"""The token log survives what it is for: kill -9 in the middle of a step."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from rungway.contracts import Price
from rungway.engine.protocol import EngineUsage
from rungway.replica import tokenlog
from rungway.replica.attempts import attempt_end
from rungway.replica.tokenlog import TokenLog, TokenLogError, adopt
from rungway.types import AttemptEnd, Billing

NOW = 1_700_000_000_000_000_000


def billing(tenant: str = "acme", **more: str) -> Billing:
    return Billing(
        tenant=tenant,
        key_id="acme-1",
        tenant_class="standard",
        risk="normal",
        action="read",
        model="auto",
        tier="small",
        version="fake",
        rung=0,
        degraded=(),
        reason=more.get("reason", "best offer"),
        price=Price(input=1, cached_input=1, output=2),
        gateway_id="g",
        received_wall_ns=NOW,
    )


def ended(request_id: str, finish: str, tokens: tuple[int, int, int], attempt: int = 1) -> AttemptEnd:
    return attempt_end("a/b/1", request_id, attempt, billing(), EngineUsage(*tokens), finish, (NOW, NOW + 5))


def test_counts_and_ends_are_read_back(tmp_path: Path) -> None:
    log = TokenLog.create(tmp_path, "small/fake/1", slots=4)
    first = log.open("r1", 1, billing(), NOW)
    second = log.open("r2", 3, billing("globex"), NOW + 1)
    log.count(first, 7, 0, 42)
    log.end(second, ended("r2", "length", (5, 2, 9), attempt=3))
    one, two = sorted((entry.end for entry in log.entries(NOW + 99)), key=lambda end: end.request_id)
    assert (one.finish, one.usage.prompt_tokens, one.usage.output_tokens) == ("lost", 7, 42)
    assert (one.replica_id, one.ended_wall_ns, one.billing) == ("small/fake/1", NOW + 99, billing())
    assert (two.finish, two.attempt, two.usage.cached_tokens, two.ended_wall_ns) == ("length", 3, 2, NOW + 5)
    assert two.billing.tenant == "globex"
    log.free(first)
    assert [entry.end.request_id for entry in log.entries(NOW)] == ["r2"]
    log.close()


def test_a_full_table_and_an_oversized_entry_are_refused(tmp_path: Path) -> None:
    log = TokenLog.create(tmp_path, "x", slots=1)
    with pytest.raises(TokenLogError, match="too long"):
        log.open("r" * 300, 1, billing(), NOW)
    with pytest.raises(TokenLogError, match="too long"):
        log.open("r", 1, billing(reason="y" * 2000), NOW)
    slot = log.open("r", 1, billing(), NOW)
    with pytest.raises(TokenLogError, match="full"):
        log.open("s", 1, billing(), NOW)
    log.free(slot)
    log.open("s", 1, billing(), NOW)
    log.remove()
    assert list(tmp_path.iterdir()) == []


def test_a_living_owner_is_not_adopted_and_a_dead_one_once(tmp_path: Path) -> None:
    log = TokenLog.create(tmp_path, "x", slots=2)
    log.open("r", 1, billing(), NOW)
    assert adopt(tmp_path) == []
    log.close()
    (adopted,) = adopt(tmp_path)
    assert adopt(tmp_path) == []  # the lock is held by the first adopter
    assert [entry.end.request_id for entry in adopted.entries(NOW)] == ["r"]
    adopted.remove()
    assert adopt(tmp_path) == []


def test_the_same_replica_id_again_takes_another_file(tmp_path: Path) -> None:
    first = TokenLog.create(tmp_path, "x", slots=1)
    second = TokenLog.create(tmp_path, "x", slots=1)
    assert first.path != second.path
    first.remove()
    second.remove()


def test_foreign_files_are_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "junk.table").write_bytes(b"not a table")
    (tmp_path / "short.table").write_bytes(b"")
    TokenLog.create(tmp_path, "x", slots=1).close()
    monkeypatch.setattr(tokenlog.socket, "gethostname", lambda: "another-node")
    assert adopt(tmp_path) == []
    assert len(list(tmp_path.glob("*.table"))) == 3


def test_an_unwritable_folder_is_a_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tokenlog, "_reserve", full)
    with pytest.raises(TokenLogError, match="No space left"):
        TokenLog.create(tmp_path, "x", slots=1)
    assert list(tmp_path.iterdir()) == []


def test_kill_9_loses_nothing(tmp_path: Path) -> None:
    """A process that counts without pause is killed; the table is exact to the last count that it announced."""
    script = textwrap.dedent(
        """
        import sys
        from pathlib import Path
        from test_tokenlog import NOW, billing, ended
        from rungway.replica.tokenlog import TokenLog
        log = TokenLog.create(Path(sys.argv[1]), "small/fake/dead")
        done = log.open("done", 1, billing(), NOW)
        log.end(done, ended("done", "stop", (3, 0, 8)))
        slot = log.open("busy", 2, billing(), NOW)
        emitted = 0
        while True:
            emitted += 1
            log.count(slot, 11, 0, emitted)
            if emitted % 1000 == 0:
                print(emitted, flush=True)
        """
    )
    path = os.pathsep.join([*sys.path, str(Path(__file__).parent)])
    child = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert child.stdout is not None
    assert child.stdout.readline().strip() == "1000"
    assert adopt(tmp_path) == []
    child.send_signal(signal.SIGKILL)
    announced = [1000, *map(int, child.stdout.read().split())]
    assert child.wait(60) == -signal.SIGKILL
    child.stdout.close()
    (orphan,) = adopt(tmp_path)
    ends = {entry.end.request_id: entry.end for entry in orphan.entries(NOW)}
    assert (ends["done"].finish, ends["done"].usage.output_tokens) == ("stop", 8)
    busy = ends["busy"]
    assert (busy.finish, busy.attempt, busy.usage.prompt_tokens, busy.replica_id) == ("lost", 2, 11, "small/fake/dead")
    assert announced[-1] <= busy.usage.output_tokens < announced[-1] + 1000
    assert busy.billing == billing()
    orphan.remove()
