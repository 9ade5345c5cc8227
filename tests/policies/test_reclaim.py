"""Which running work gives way: enough and no more, the lowest class and the newest first, guarantees kept."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from rungway.policies.reclaim import Counts, Keeps, Need, Room, Running, Spare, choose_victims, order

FREE = Keeps({}, [0.0, 0.0, 0.0])


def running(
    name: str, replica: str = "r1", *, tenant: str = "hog", band: int = 2, since: int = 0, **more: int
) -> Running:
    return Running(name, 1, replica, tenant, band, since, more.get("sequences", 1), more.get("tokens", 10))


def spare(all_of_it: list[Running], sequences: int = 10, tokens: int = 1000) -> Spare:
    tenants: dict[str, Counts] = {}
    bands = [Counts() for _ in range(3)]
    for each in all_of_it:
        tenants.setdefault(each.tenant, Counts()).add(each.sequences, each.tokens)
        bands[each.band].add(each.sequences, each.tokens)
    return Spare(tenants, bands, sequences, tokens)


def names(chosen: tuple[str, list[Running]] | None) -> list[str] | None:
    return None if chosen is None else [each.request_id for each in chosen[1]]


def test_the_newest_of_the_lowest_class_gives_way() -> None:
    work = [running("old", since=1), running("new", since=9), running("standard", band=1, since=20)]
    assert names(choose_victims(Need(1, 5), [Room("r1", 0, 100)], work, spare(work), FREE)) == ["new"]


def test_nothing_is_stopped_where_there_is_room() -> None:
    work = [running("a"), running("b", "r2")]
    rooms = [Room("r1", 0, 100), Room("r2", 1, 100)]
    assert choose_victims(Need(1, 5), rooms, work, spare(work), FREE) == ("r2", [])


def test_fewest_win_and_a_large_one_spares_the_small_ones_before_it() -> None:
    work = [
        running("s1", since=9),
        running("s2", since=8),
        running("large", since=1, tokens=500),
        running("x", "r2", since=5, tokens=40),
    ]
    rooms = [Room("r1", 1, 0), Room("r2", 1, 0)]
    assert names(choose_victims(Need(1, 400), rooms, work, spare(work), FREE)) == ["large"]
    assert names(choose_victims(Need(1, 30), rooms, work, spare(work), FREE)) == ["x"]


def test_a_tenant_and_a_class_keep_their_shares() -> None:
    work = [running(f"q{k}", since=k) for k in range(4)]
    rooms = [Room("r1", 0, 1000)]
    assert names(choose_victims(Need(2, 1), rooms, work, spare(work), Keeps({"hog": 0.2}, [0.0] * 3))) == ["q3", "q2"]
    assert choose_victims(Need(3, 1), rooms, work, spare(work), Keeps({"hog": 0.2}, [0.0] * 3)) is None
    assert choose_victims(Need(2, 1), rooms, work, spare(work), Keeps({}, [0.0, 0.0, 0.3])) is None


def test_a_pause_that_would_break_a_deadline_comes_last_in_its_class() -> None:
    work = [running("tight", since=9)._replace(tight=True), running("loose", since=1), running("above", band=1)]
    assert sorted(work, key=order)[0].request_id == "loose" and sorted(work, key=order)[1].request_id == "tight"


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 10**9))
def test_enough_no_more_and_nobody_below_his_share(seed: int) -> None:
    rng = random.Random(seed)
    work = [
        running(
            f"q{k}",
            f"r{rng.randrange(3)}",
            tenant=f"t{rng.randrange(3)}",
            band=rng.randrange(3),
            since=rng.randrange(50),
            sequences=rng.randint(1, 3),
            tokens=rng.randint(1, 80),
        )
        for k in range(rng.randint(0, 15))
    ]
    rooms = [Room(f"r{k}", rng.randint(0, 2), rng.randint(0, 60)) for k in range(3)]
    need = Need(rng.randint(1, 3), rng.randint(1, 150))
    keeps = Keeps({f"t{k}": rng.random() * 0.5 for k in range(3)}, [rng.random() * 0.3 for _ in range(3)])
    before = spare(work)
    chosen = choose_victims(need, rooms, work, before, keeps)
    if chosen is None:
        for room in rooms:  # then no replica could make room even by all that the shares leave
            mine = [each for each in work if each.replica_id == room.replica_id and before.allows(each, keeps)]
            free = (
                room.sequences + sum(each.sequences for each in mine),
                room.tokens + sum(each.tokens for each in mine),
            )
            assert free[0] < need.sequences or free[1] < need.tokens or len(mine) > 1
        return
    replica, victims = chosen
    (room,) = (room for room in rooms if room.replica_id == replica)
    assert all(each.replica_id == replica for each in victims)
    sequences = room.sequences + sum(each.sequences for each in victims)
    tokens = room.tokens + sum(each.tokens for each in victims)
    assert sequences >= need.sequences and tokens >= need.tokens
    for each in victims:  # without any of them it would not be enough
        assert sequences - each.sequences < need.sequences or tokens - each.tokens < need.tokens
    left = [each for each in work if each not in victims]
    for tenant, share in keeps.tenants.items():
        if any(each.tenant == tenant for each in victims):
            mine = [each for each in left if each.tenant == tenant]
            assert max(sum(e.sequences for e in mine) / 10, sum(e.tokens for e in mine) / 1000) >= share - 1e-9
