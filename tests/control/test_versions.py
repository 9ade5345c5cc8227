"""Several versions of a tier, and replicas of several sizes: what one of them cannot do now stops nobody else."""

from __future__ import annotations

from random import Random
from typing import Any
from zlib import crc32

import msgspec
import pytest

from control.harness import World, platform, tenant
from rungway.contracts import Isolation, Platform
from rungway.messages import ReplicaInfo
from rungway.policies.versions import pick_version
from rungway.types import Grant

NAMES = ("small-v1", "small-v2")


def two_versions(weights: tuple[float, float] = (50.0, 50.0), **spec: Any) -> Platform:
    whole = tenant("acme", isolation=Isolation(in_flight_share_max=1.0))
    base = platform(whole, tenant("globex", isolation=Isolation(in_flight_share_max=1.0)), **spec)
    first = base.tiers[0].versions[0]
    versions = tuple(
        msgspec.structs.replace(first, name=name, weight=weight) for name, weight in zip(NAMES, weights, strict=True)
    )
    return msgspec.structs.replace(
        base, tiers=(msgspec.structs.replace(base.tiers[0], versions=versions), base.tiers[1])
    )


def world(slots: tuple[int, ...] = (4, 2), **spec: Any) -> World:
    here = World(tenant("acme"), tenant("globex"), replicas=())
    here.core.reload(two_versions(**spec), here.now)
    for name, size in zip(NAMES, slots, strict=False):
        add(here, name, size)
    here.take()
    return here


def add(here: World, version: str, slots: int, state: str = "ready") -> None:
    here.core.replica_hello(ReplicaInfo(f"{version}-r", "", "small", version, slots, 100_000, state), here.now)


def session_of(version: str, number: int = 0) -> str:
    """A session that this version serves where both have replicas."""
    versions = two_versions().tiers[0].versions
    mine = (f"s{k}" for k in range(1000) if pick_version(versions, crc32(f"s{k}".encode()), NAMES).name == version)
    return [next(mine) for _ in range(number + 1)][-1]


def test_a_full_version_stops_nobody_who_waits_for_another() -> None:
    here = world()
    first, second = session_of("small-v1"), session_of("small-v2")
    canary = [here.submit("acme", session=second) for _ in range(4)]
    old = [here.submit(who, session=first) for who in ("globex", "acme", "globex", "acme")]
    assert {here.grant(request).replica_id for request in canary[:2]} == {"small-v2-r"}
    assert [here.answer(request) for request in canary[2:]] == [None, None]
    assert {here.grant(request).replica_id for request in old} == {"small-v1-r"}
    here.complete(canary[1])
    assert here.grant(canary[2]).replica_id == "small-v2-r"


def test_who_waits_for_a_full_version_is_not_overtaken_on_it() -> None:
    here = world(slots=(4, 2))
    second = session_of("small-v2")
    running = [here.submit("acme", session=second) for _ in range(2)]
    pair = here.submit("acme", session=second, n=2, best_of=2)
    single = here.submit("acme", session=second)
    here.complete(running[0])
    assert here.answer(pair) is None and here.answer(single) is None
    here.complete(running[1])
    assert here.grant(pair).replica_id == "small-v2-r" and here.answer(single) is None


def test_a_version_without_replicas_leaves_its_part_to_the_others() -> None:
    here = world(slots=(4,))
    requests = [here.submit("acme", session=session_of("small-v2", number)) for number in range(3)]
    assert {here.grant(request).offer.version for request in requests} == {"small-v1"}
    add(here, "small-v2", 2)
    assert here.grant(here.submit("acme", session=session_of("small-v2"))).offer.version == "small-v2"


@pytest.mark.parametrize("how", ["lost", "draining"])
def test_who_waits_for_a_version_that_goes_is_served_by_another(how: str) -> None:
    here = world()
    second = session_of("small-v2")
    running = [here.submit("acme", session=second) for _ in range(2)]
    waiting = here.submit("acme", session=second)
    assert here.answer(waiting) is None
    if how == "lost":
        here.lose("small-v2-r")
    else:
        add(here, "small-v2", 2, "draining")
    here.core.tick(here.now)
    here.take()
    assert here.grant(waiting).offer.version == "small-v1"
    if how == "lost":
        here.retry(running[0])  # it has begun: it goes on as it began, and stops nobody
    assert here.grant(here.submit("globex")).offer.version == "small-v1"


def test_without_any_replica_who_waits_stays_where_it_is() -> None:
    here = world(slots=(4, 2))
    second = session_of("small-v2")
    waiting = [here.submit("acme", session=second) for _ in range(3)][-1]
    here.lose("small-v2-r")
    here.lose("small-v1-r")
    here.advance(0.2)
    assert here.answer(waiting) is None
    add(here, "small-v2", 2)
    here.advance(0.1)
    assert here.grant(waiting).offer.version == "small-v2"


def test_a_tenant_whose_version_is_full_banks_no_credit() -> None:
    """It waits, but not for what the others use: else its small counter would hold down every newcomer's."""
    here = world(slots=(1, 1))
    first, second = session_of("small-v1"), session_of("small-v2")
    here.submit("acme", session=second)
    here.submit("acme", session=second)
    for _ in range(20):
        request = here.submit("globex", session=first, prompt=100)
        here.complete(request)
    queue = here.cell.pools["small"].queue
    assert queue.counter("acme", 0) >= queue.counter("globex", 0) - 200.0


@pytest.mark.parametrize("seed", range(8))
def test_the_parts_of_versions_follow_their_weights_and_sessions_stay(seed: int) -> None:
    versions, rng = two_versions((80.0, 20.0)).tiers[0].versions, Random(seed)
    keys = [rng.getrandbits(32) for _ in range(4000)]
    both = [pick_version(versions, key, NAMES).name for key in keys]
    assert both.count("small-v2") == pytest.approx(800, rel=0.15)
    alone = [pick_version(versions, key, {"small-v1"}).name for key in keys]
    assert set(alone) == {"small-v1"}
    assert [pick_version(versions, key, ()).name for key in keys] == both


# -- what no replica could ever hold --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("slots", "kv_tokens", "ask"),
    [
        (4, 100_000, {"n": 8, "best_of": 8}),
        (4, 500, {"prompt": 490}),
        (4, 500, {"prompt": 100, "n": 4, "best_of": 4, "output_bound": 300}),
    ],
)
def test_more_than_a_replica_holds_takes_a_whole_one_and_blocks_nobody_for_ever(
    slots: int, kv_tokens: int, ask: dict[str, int]
) -> None:
    here = World(tenant("acme"), tenant("globex"), replicas=())
    here.replica("small", "small-r1", slots, kv_tokens)
    before = here.submit("acme")
    big, behind = here.submit("acme", **ask), here.submit("acme")
    here.complete(before)
    here.complete(big)
    here.complete(behind)
    here.at_rest()


def test_an_answer_ends_where_the_largest_cache_does() -> None:
    here = World(tenant("acme"), replicas=())
    here.replica("small", "small-r1", 4, 500)
    grant = here.grant(here.submit(prompt=400, output_bound=1000))
    assert (grant.offer.max_tokens, grant.reserved_tokens) == (100, 500)
    assert here.refusal(here.submit(prompt=500)).code == "context_length_exceeded"


def test_what_fits_no_replica_that_is_left_waits_alone() -> None:
    here = World(tenant("acme"), tenant("globex"), replicas=())
    here.replica("small", "big", 4, 5_000)
    running = here.submit("acme", prompt=3_000)
    waiting = here.submit("acme", prompt=3_000)
    here.replica("small", "little", 4, 500)
    here.lose("big")
    assert here.answer(waiting) is None
    assert here.grant(here.submit("globex")).replica_id == "little"
    assert here.grant(here.submit("acme")).replica_id == "little"
    here.client_end(running, "client_cancelled", delivered={1: 0})
    here.replica("small", "big", 4, 5_000)
    here.advance(0.1)
    assert here.grant(waiting).replica_id == "big"


def test_a_tenants_cap_counts_every_sequence() -> None:
    capped = Isolation(in_flight_share_max=0.5)
    here = World(tenant("acme", isolation=capped), tenant("globex"), replicas=())
    here.replica("small", "small-r1", 8)
    here.submit("globex")
    assert isinstance(here.answer(here.submit("acme")), Grant)
    assert here.answer(here.submit("acme", n=4, best_of=4)) is None
    assert here.cell.tenants["acme"].pool_running["small"] == 1
