"""Faults of other engines' schedulers that no other file has a test of. Aborts, refused allocations, starvation and
preemption stand in test_in_batch.py and test_blast.py, hits and collisions in test_prefix_cache.py."""

from __future__ import annotations

import pytest

from engine.native_kit import Heard, drain, work
from engine.test_scheduler import rig
from rungway.engine.blocks import BlockPool
from rungway.engine.fairness import SHARES_MAX
from rungway.engine.sequence import Group
from rungway.engine.victims import PREEMPTIONS_MAX


@pytest.mark.parametrize("ends", ["finish", "cancel", "preempt"])
def test_a_block_that_the_prefix_index_keeps_is_freed_once_and_not_lost(ends: str) -> None:
    core, scheduler, _ = rig(blocks=20)
    heard = Heard()
    heard.take(core.add(work("first", list(range(17)), max_tokens=4)))
    heard.take(core.add(work("second", list(range(17)), max_tokens=9, sequences=2)))
    for _ in range(3):
        heard.take(core.step())
        assert core.check() == []
    if ends == "cancel":
        heard.take(core.cancel("first"))
        heard.take(core.cancel("second"))
    elif ends == "preempt":
        for seq in list(scheduler.running):
            scheduler.preempt(seq)
            assert core.check() == []
    drain(core, heard)
    pool = scheduler.pool
    assert pool.free == 20 and pool.idle >= 4
    taken = pool.take(20)
    assert taken is not None and len(set(taken)) == 20 and pool.take(1) is None


def test_the_self_check_itself_counts_a_shared_block_once_for_each_holder() -> None:
    pool = BlockPool(8, 4)
    table = pool.take(3) or []
    pool.share(table[:2])
    assert pool.check([table, table[:2]]) == []
    assert pool.check([table]) and pool.check([table, table[:2], table[:1]])
    pool.release(table[:2])
    assert pool.check([table]) == [] and pool.free == 5


def test_a_cancel_between_arrival_and_the_first_step_leaves_nothing_behind() -> None:
    core, scheduler, runner = rig(blocks=20)
    for sequences in (1, 3):
        core.add(work("r", [1] * 9, max_tokens=4, sequences=sequences))
        ends = core.cancel("r")
        assert [end.finish for end in ends] == ["cancelled"] * sequences and ends[-1].usage is not None
        assert not scheduler.groups and not len(scheduler.waiting) and not core.busy and core.check() == []
    assert core.step() == [] and runner.steps == []


def test_a_request_id_that_is_in_use_is_refused_and_its_owner_goes_on() -> None:
    core, _, _ = rig(blocks=40)
    heard = Heard()
    heard.take(core.add(work("same", [1] * 5, max_tokens=6)))
    heard.take(core.step())
    (end,) = core.add(work("same", [9] * 5, max_tokens=6))
    assert end.finish == "error" and "in use" in (end.error or "") and core.check() == []
    drain(core, heard)
    assert heard.tokens("same") == [2, 3, 4, 5, 6, 7] and heard.last("same").finish == "length"


def test_a_preempted_request_keeps_its_place_and_what_it_said_however_often_it_gives_way() -> None:
    core, scheduler, _ = rig(blocks=60, seqs=2)
    heard = Heard()
    for name in ("old", "young", "younger"):
        heard.take(core.add(work(name, [1], max_tokens=30)))
    for _ in range(PREEMPTIONS_MAX + 4):
        heard.take(core.step())
        old = next(seq for seq in scheduler.running if seq.group.work.request_id == "old")
        scheduler.preempt(old)
        assert next(iter(scheduler.waiting)).group.work.request_id == "old"
    drain(core, heard)
    assert all(heard.tokens(name) == list(range(2, 32)) for name in ("old", "young", "younger"))


def test_counters_of_shares_that_are_gone_do_not_gather_and_nobody_gains_by_it() -> None:
    core, scheduler, _ = rig(blocks=60, seqs=4)
    queue = scheduler.waiting
    for at in range(SHARES_MAX + 300):
        queue.arrive(f"s{at}")
        queue.charge(f"s{at}", inputs=1.0 + at % 7)
        if at % 50 == 0:
            queue.settle({f"s{at}": None}.keys())
    queue.settle({"s0": None}.keys())
    assert len(queue._spent) <= SHARES_MAX
    group = Group(work("late", [1] * 4, share="s3"))
    scheduler.add(group, 20)
    assert queue.got("s3") >= queue._floor
    core.cancel("late")
