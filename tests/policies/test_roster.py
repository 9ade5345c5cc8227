"""The index of replicas against the scan that defines the choice: `placement.choose` over all of them."""

from __future__ import annotations

from random import Random

import pytest

from rungway.policies.locality import Warmth
from rungway.policies.placement import Need, ReplicaView, choose
from rungway.policies.prefixes import holders
from rungway.policies.roster import HOMES_MAX, Roster

S = 1_000_000_000
NOW = 100 * S
FACTORS = (0.5, 1.0, 1.1)


class Twins:
    """A roster under random changes, and the plain state that it must agree with."""

    def __init__(self, seed: int) -> None:
        self.rng = Random(seed)
        self.factor = 1.1
        self.roster = Roster(self.factor)
        self.serial = 0

    def change(self) -> None:
        rng, roster = self.rng, self.roster
        views = list(roster.views.values())
        kind = rng.choice(("add", "load", "load", "load", "drain", "drop", "silent", "broken", "stretch"))
        if kind == "add" or not views:
            self.add()
            return
        view = rng.choice(views)
        if kind == "load":
            roster.load(view, rng.randint(-1, 12), rng.choice((0, 100, 500, 990, 1000, rng.randint(0, 1100))))
        elif kind == "drain":
            roster.drain(view, rng.random() < 0.4)
        elif kind == "drop" and len(views) > 3:
            roster.drop(view.replica_id)
        elif kind == "silent":
            view.reported_ns = NOW - rng.choice((0, S, S + 1, 5 * S))
        elif kind == "broken":
            view.breaker_open = rng.random() < 0.4
        elif kind == "stretch":
            self.factor = rng.choice(FACTORS)
            roster.stretch(self.factor)

    def add(self) -> None:
        self.serial += 1
        slots, room = self.rng.choice(((10, 1000), (10, 1000), (4, 1000), (10, 500), (0, 0)))
        view = ReplicaView(f"r{self.serial:03}", "small", self.rng.choice(("v1", "v1", "v2")), slots, room)
        view.reported_ns, view.draining = NOW, self.rng.random() < 0.1
        view.bit = 1 << self.serial
        self.roster.add(view)

    def need(self) -> Need:
        rng, views = self.rng, list(self.roster.views.values())
        names = [view.replica_id for view in views]
        where: dict[int, int] = {}
        for view in views if rng.random() < 0.6 else ():
            for key in range(rng.choice((0, 0, 1, 3, 8))):
                where[key] = where.get(key, 0) | view.bit
        prompt = rng.choice((1, 50, 1000))
        return Need(
            version=rng.choice(("v1", "v1", "v2", "v3")),
            sequences=rng.choice((1, 1, 1, 2, 5)),
            tokens=rng.choice((0, 10, 100, 600)),
            session=rng.choice((None, None, "", "s1", "s2", f"s{rng.randrange(50)}")),
            now_ns=NOW,
            stale_ns=S,
            avoid=frozenset(rng.sample(names, min(len(names), rng.choice((0, 0, 0, 1, 2))))),
            kept=set(rng.sample(names, min(len(names), rng.choice((0, 0, 1, 4))))),
            only=None if rng.random() < 0.8 else frozenset([*rng.sample(names, len(names) // 2), "gone"]),
            warmth=None if rng.random() < 0.2 else Warmth(prompt, 100, holders(where, range(8))),
            imbalance=rng.choice((0.0, 0.1, 0.5, 1.0)),
        )

    def scan(self, need: Need) -> ReplicaView | None:
        return choose(self.roster.views.values(), need, self.factor)

    def sums(self) -> tuple[int, ...]:
        at_work = [view for view in self.roster.views.values() if not view.draining]
        slots = [int(self.factor * view.max_num_seqs) for view in at_work]
        return (
            sum(view.running for view in at_work),
            sum(slots),
            sum(view.tokens for view in at_work),
            sum(view.kv_tokens for view in at_work),
            sum(view.running < most for view, most in zip(at_work, slots, strict=True)),
        )


@pytest.mark.parametrize("part", range(4))
def test_the_index_chooses_what_the_scan_chooses_and_keeps_its_sums(part: int) -> None:
    placed = 0
    for seed in range(part * 50, part * 50 + 50):
        twins = Twins(seed)
        for _ in range(twins.rng.choice((2, 8, 25))):
            twins.add()
        for step in range(80):
            twins.change()
            roster = twins.roster
            kept = (roster.running, roster.slots, roster.tokens, roster.room, roster.open)
            assert kept == twins.sums(), (seed, step)
            need = twins.need()
            got = roster.place(need)
            assert got is twins.scan(need), (seed, step, need)
            placed += got is not None
    assert placed > 1000, "this has to be about choices"


class _Counted(ReplicaView):
    """Counts how often somebody asks what it holds."""

    __slots__ = ("looks",)

    def __getattribute__(self, name: str) -> object:
        if name == "running":
            object.__setattr__(self, "looks", object.__getattribute__(self, "looks") + 1)
        return object.__getattribute__(self, name)


@pytest.mark.parametrize("held", [0, 1, 200])
def test_a_decision_does_not_look_at_every_replica(held: int) -> None:
    roster, views = Roster(1.0), []
    for number in range(200):
        view = _Counted.__new__(_Counted)
        object.__setattr__(view, "looks", 0)
        ReplicaView.__init__(view, f"r{number:03}", "small", "v1", 10, 1000, reported_ns=NOW)
        view.bit = 1 << number
        roster.add(view)
        views.append(view)
    where = dict.fromkeys(range(3), sum(1 << number for number in range(held)))
    for view in views:
        view.looks = 0
    need = Need("v1", 1, 10, None, NOW, S, warmth=Warmth(1000, 100, holders(where, range(8))), imbalance=0.5)
    assert roster.place(need) is views[0]
    assert sum(view.looks for view in views) < 20


def test_a_full_line_is_not_walked() -> None:
    roster, views = Roster(1.0), []
    for number in range(200):
        view = _Counted.__new__(_Counted)
        object.__setattr__(view, "looks", 0)
        ReplicaView.__init__(view, f"r{number:03}", "small", "v1", 10, 1000, reported_ns=NOW, running=9, tokens=995)
        roster.add(view)
        views.append(view)
    for view in views:
        view.looks = 0
    assert roster.place(Need("v1", 1, 10, None, NOW, S)) is None
    assert sum(view.looks for view in views) == 0


def test_remembered_homes_are_bounded_and_forgotten_with_the_membership() -> None:
    roster = Roster(1.0)
    for number in range(5):
        roster.add(ReplicaView(f"r{number}", "small", "v1", 10, 1000, reported_ns=NOW))
    for number in range(HOMES_MAX + 100):
        roster.place(Need("v1", 1, 10, f"s{number}", NOW, S))
    assert len(roster._homes) == HOMES_MAX
    home = roster.place(Need("v1", 1, 10, "s", NOW, S))
    assert home is not None
    roster.drop(home.replica_id)
    assert roster.place(Need("v1", 1, 10, "s", NOW, S)) is not home
