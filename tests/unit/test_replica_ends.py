"""Ends are kept, re-sent at their time, freed when acknowledged, and left behind for the next replica."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from rungway.contracts import Price
from rungway.engine.protocol import EngineUsage
from rungway.replica import ends as ends_module
from rungway.replica.attempts import attempt_end
from rungway.replica.ends import RESEND_AFTER_NS, Ends
from rungway.replica.tokenlog import TokenLog, adopt
from rungway.types import AttemptEnd, Billing

BILLING = Billing(
    tenant="acme",
    key_id="k",
    tenant_class="standard",
    risk="normal",
    action="read",
    model="auto",
    tier="small",
    version="fake",
    rung=0,
    degraded=(),
    reason="",
    price=Price(input=1, cached_input=1, output=1),
    gateway_id="g",
    received_wall_ns=1,
)
T = 10 * RESEND_AFTER_NS


def end(name: str) -> AttemptEnd:
    return attempt_end("small/fake/1", name, 1, BILLING, EngineUsage(1, 0, 2), "stop", (1, 2))


def finish(ends: Ends, log: TokenLog, name: str, now_ns: int) -> None:
    ends.add(end(name), log.open(name, 1, BILLING, 1), now_ns)


def names(found: list[AttemptEnd]) -> list[str]:
    return [one.request_id for one in found]


def test_resending_waits_its_time_and_a_new_session_does_not(tmp_path: Path) -> None:
    log = TokenLog.create(tmp_path, "x", slots=8)
    ends = Ends(log, [], 1)
    finish(ends, log, "a", T)
    finish(ends, log, "b", T + RESEND_AFTER_NS // 2)
    assert ends.take_due(T + RESEND_AFTER_NS - 1) == []
    assert names(ends.take_due(T + RESEND_AFTER_NS)) == ["a"]
    assert ends.take_due(T + RESEND_AFTER_NS) == []
    ends.all_due()
    assert sorted(names(ends.take_due(T + RESEND_AFTER_NS))) == ["a", "b"]
    ends.acknowledge([("a", 1), ("a", 1), ("never", 7)])
    assert names(ends.take_due(T + 3 * RESEND_AFTER_NS)) == ["b"]
    ends.acknowledge([("b", 1)])
    assert (len(ends), log.room) == (0, 8)
    ends.close()
    assert list(tmp_path.iterdir()) == []


def test_one_round_sends_a_bounded_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ends_module, "BATCH_MAX", 3)
    log = TokenLog.create(tmp_path, "x", slots=8)
    ends = Ends(log, [], 1)
    for name in "abcde":
        finish(ends, log, name, T)
    later = T + RESEND_AFTER_NS
    assert names(ends.take_due(later)) + names(ends.take_due(later)) + names(ends.take_due(later)) == list("abcde")
    ends.close()


def test_full_when_slots_or_spare_places_are_used_up(tmp_path: Path) -> None:
    log = TokenLog.create(tmp_path, "x", slots=2)
    ends = Ends(log, [], 1, spare=2)
    finish(ends, log, "a", T)
    assert not ends.full
    finish(ends, log, "b", T)
    assert ends.full
    ends.acknowledge([("a", 1)])
    assert not ends.full
    for name in ("n1", "n2", "n3"):
        ends.add(end(name), None, T)
    assert ends.full
    assert len(ends) == 3  # b, n1, n2: what never ran and finds no place is not kept
    ends.acknowledge([("n1", 1)])
    assert not ends.full
    ends.close()


def test_orphans_are_reported_and_removed_when_acknowledged(tmp_path: Path) -> None:
    dead = TokenLog.create(tmp_path, "dead", slots=4)
    dead.count(dead.open("r", 1, BILLING, 1), 5, 0, 9)
    dead.close()
    TokenLog.create(tmp_path, "idle", slots=4).close()
    own = TokenLog.create(tmp_path, "new", slots=4)
    ends = Ends(own, adopt(tmp_path), 77)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dead.table", "new.table"]  # nothing was owed by idle
    (lost,) = ends.take_due(T)
    assert (lost.finish, lost.replica_id, lost.usage.output_tokens, lost.ended_wall_ns) == ("lost", "dead", 9, 77)
    ends.acknowledge([("r", 1)])
    assert [path.name for path in tmp_path.iterdir()] == ["new.table"]
    ends.close()


def test_what_is_not_acknowledged_stays_for_the_next(tmp_path: Path) -> None:
    log = TokenLog.create(tmp_path, "x", slots=4)
    ends = Ends(log, [], 1)
    finish(ends, log, "a", T)
    ends.close()
    own = TokenLog.create(tmp_path, "y", slots=4)
    again = Ends(own, adopt(tmp_path), 77)
    assert again.take_due(T) == [msgspec.structs.replace(end("a"), replica_id="x")]
    again.close()
    assert [path.name for path in tmp_path.iterdir()] == ["x.table"]
