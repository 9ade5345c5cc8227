"""Prefixes in the controller: where a prompt is placed, what is charged for it, and in which order."""

from __future__ import annotations

from typing import Any

import pytest

from control.harness import World, tenant
from rungway.engine.chain import chain_keys
from rungway.engine.protocol import EngineStats, PrefixNews
from rungway.messages import Report

PROMPT = 101
KEYS = chain_keys("acme", list(range(PROMPT)), 16)
TEXT: dict[str, Any] = {
    "model": "small",
    "tiers": ("small",),
    "prompt_tokens": {"small": PROMPT},
    "trimmed_tokens": {"small": PROMPT},
    "prefix_keys": {"small": KEYS},
    "key_tokens": {"small": 16},
}


def tell(world: World, replica_id: str, keys: tuple[int, ...]) -> None:
    news = PrefixNews(True, list(keys), [])
    world.core.report(Report(replica_id, EngineStats(0, 0, 0, 1000, 1000, 0), [], prefixes=news), world.now)


def test_a_prompt_goes_where_its_beginning_is_and_pays_for_the_rest() -> None:
    world = World(tenant("acme"), replicas=("small",))
    world.replica("small", "small-r2")
    pool = world.cell.pools["small"]
    for holder in list(pool.views):
        for other in pool.views:
            tell(world, other, KEYS[:5] if other == holder else ())
        before = pool.queue.counter("acme", 0)
        request = world.submit(**TEXT)
        assert world.grant(request).replica_id == holder
        assert pool.queue.counter("acme", 0) - before == PROMPT - 5 * 16
        world.engine_end(request, 0, cached=80)
        assert pool.queue.counter("acme", 0) - before == PROMPT - 80
        world.client_end(request, delivered={1: 0})


@pytest.mark.parametrize("reported", [0, 16, 96])
def test_settlement_corrects_what_was_expected_to_be_cached(reported: int) -> None:
    world = World(tenant("acme"), replicas=("small",))
    pool = world.cell.pools["small"]
    tell(world, next(iter(pool.views)), KEYS[:3])
    request = world.submit(**TEXT)
    assert pool.queue.counter("acme", 0) == PROMPT - 48
    world.engine_end(request, 7, cached=reported)
    assert pool.queue.counter("acme", 0) == PROMPT - reported + 2 * 7


def test_a_repeat_is_neither_charged_nor_given_back_for_its_prompt() -> None:
    world = World(tenant("acme"), replicas=("small",))
    pool = world.cell.pools["small"]
    request = world.submit(**TEXT)
    charged = pool.queue.counter("acme", 0)
    assert charged == PROMPT
    world.retry(request, emitted=0)
    world.engine_end(request, 3, cached=96)
    assert pool.queue.counter("acme", 0) == charged + 2 * 3


def test_keys_of_another_length_of_prompt_or_of_no_replica_say_nothing() -> None:
    world = World(tenant("acme"), replicas=("small",))
    pool = world.cell.pools["small"]
    tell(world, next(iter(pool.views)), chain_keys("globex", list(range(PROMPT)), 16))
    world.submit(**TEXT)
    assert pool.queue.counter("acme", 0) == PROMPT


@pytest.mark.parametrize(("order", "first"), [("vtc", "cold"), ("dlpm", "warm")])
def test_the_order_is_by_what_the_free_replica_holds(order: str, first: str) -> None:
    world = World(tenant("acme"), replicas=(), order=order)
    world.replica("small", "small-r1", slots=1)
    pool = world.cell.pools["small"]
    running = world.submit(**{**TEXT, "prefix_keys": {}})
    assert pool.in_flight() == (1, 1)
    asked = {"cold": world.submit(**{**TEXT, "prefix_keys": {}}), "warm": world.submit(**TEXT)}
    tell(world, next(iter(pool.views)), KEYS[:5])
    world.mono_ns += 60_000_000
    world.complete(running)
    assert {name for name, request in asked.items() if world.answer(request) is not None} == {first}
