"""The played ledger says what the real one says: a new controller remembers the same from either."""

from __future__ import annotations

from pathlib import Path

import pytest

from rungway.ledger import LedgerReader, LedgerWriter
from rungway.simulate.faults import parse
from rungway.simulate.scenario import random_world
from rungway.simulate.world import World


@pytest.fixture(scope="module")
def world() -> World:
    return random_world(48, parse("delay:12,replica:20,controller:8,gateway:6"), 6.0)


@pytest.fixture
def reader(world: World, tmp_path: Path) -> LedgerReader:
    url = f"sqlite:///{tmp_path / 'ledger.db'}"
    writer = LedgerWriter(url, lambda ticket: None)
    disk = world.disk
    writer.put(rows=list(disk.rows.values()), audit=disk.audit, attempts=list(disk.ends.values()))
    writer.put(waste=list(disk.waste.items()))
    writer.close()
    return LedgerReader(url)


def test_both_ledgers_give_a_new_controller_the_same_memory(world: World, reader: LedgerReader) -> None:
    disk = world.disk
    middle_ns = sorted(row.ended_wall_ns for row in disk.rows.values())[len(disk.rows) // 2]
    assert reader.newest_ns() == disk.newest_ns()
    for since_ns in (0, middle_ns):
        assert reader.recent(since_ns) == disk.recent(since_ns)
        told = {entry[0]: entry for entry in reader.settled(since_ns, 50_000)}
        assert told == {entry[0]: entry for entry in disk.settled(since_ns, 50_000)}
        for tenant in {row.tenant for row in disk.rows.values()}:
            assert reader.spent_since(tenant, since_ns) == disk.spent_since(tenant, since_ns)
    assert sorted(reader.output_samples(2000)) == sorted(disk.output_samples(2000))
    reader.close()


def test_the_books_of_a_storm_balance_in_the_real_ledger(world: World, reader: LedgerReader) -> None:
    found = reader.reconcile()
    assert found["ok"] and found["unsettled"] == 0, found
    assert world.disk.waste, "no output was found late: the test shows little"
    reader.close()


def test_the_newest_rows_are_remembered_first(world: World, reader: LedgerReader) -> None:
    newest = {row.request_id for row in sorted(world.disk.rows.values(), key=lambda r: r.ended_wall_ns)[-5:]}
    told = reader.settled(0, 5)
    assert len(told) == 5 and {entry[0] for entry in told} <= set(world.disk.rows)
    assert len(newest & {entry[0] for entry in told}) >= 4  # rows of one moment may come in any order
    reader.close()
