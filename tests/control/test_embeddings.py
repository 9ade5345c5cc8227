"""Embeddings under the controller: held and billed by their input, never degraded, deferred or refused like anything else."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from control.harness import LADDER, World, tenant
from rungway.contracts import Budget, LadderTerms, Price, Quotas, Tier, TierKind
from rungway.policies.ladder import set_override
from rungway.simulate import scenario
from rungway.types import Risk

PRICE = Price(input=1000, cached_input=0, output=0)


class EmbedWorld(World):
    """A World with a tier for embeddings and one replica of it."""

    def __init__(self, *tenants: Any, **kwargs: Any) -> None:
        super().__init__(*tenants, **kwargs)
        version = msgspec.structs.replace(
            scenario.version("embed", name="embed-v1"), kind=TierKind.EMBEDDING, max_context=256
        )
        tier = Tier(name="embed", rank=0, price=PRICE, versions=(version,), kind=TierKind.EMBEDDING)
        before = self.cell.platform
        self.core.reload(msgspec.structs.replace(before, tiers=(*before.tiers, tier), digest="more"), self.now)
        self.replica("embed", "embed-r1")
        self.take()

    def embed(self, tokens: int, who: str = "acme", **changes: Any) -> str:
        fields = {"output_bound": 0, "kind": TierKind.EMBEDDING, "endpoint": "embeddings", "trimmed_tokens": {}}
        return self.submit(
            who, **({"model": "embed", "prompt_tokens": {"embed": tokens}, "tiers": ("embed",)} | fields | changes)
        )


def test_all_inputs_together_may_be_longer_than_the_context_and_are_the_bill() -> None:
    world = EmbedWorld(tenant("acme"))
    request = world.embed(5000)
    grant = world.grant(request)
    assert (grant.offer.tier, grant.offer.max_tokens, grant.offer.rung, grant.reserved_tokens) == ("embed", 0, 0, 5000)
    world.complete(request, output=0)
    (row,) = world.rows
    assert (row.prompt_tokens, row.output_tokens, row.endpoint, row.outcome) == (5000, 0, "embeddings", "completed")
    assert row.cost_nusd == 5000


def test_no_rung_but_defer_touches_them() -> None:
    world = EmbedWorld(tenant("acme", ladder=LadderTerms(floor="defer")))
    pool = world.cell.pools["embed"]
    for rung in range(1, 8):
        for scope in pool.scopes:
            pool.scopes[scope], _ = set_override(pool.scopes[scope], rung, world.mono_ns + 10**12, LADDER)
        request = world.embed(10, cached=True)
        if rung == 7:
            assert world.refusal(request).code == "deferred"
        else:
            offer = world.grant(request).offer
            assert (offer.kind, offer.tier, offer.rung, offer.degraded) == ("model", "embed", 0, ())
            world.complete(request, output=0)


def test_a_tier_for_text_and_one_for_embeddings_never_stand_in_for_each_other() -> None:
    world = EmbedWorld(tenant("acme"))
    world.lose("embed-r1")
    assert world.refusal(world.embed(10)).code == "no_capacity"
    world.lose("small-r1")
    world.lose("large-r1")
    world.replica("embed", "embed-r2")
    assert world.refusal(world.submit("acme")).code == "no_capacity"
    assert world.grant(world.embed(10)).replica_id == "embed-r2"


def test_high_risk_needs_no_tier_of_text() -> None:
    world = EmbedWorld(tenant("acme", risk_high_tier_min="large"))
    assert world.grant(world.embed(10, risk=Risk.HIGH)).offer.tier == "embed"


def test_own_limits_hold() -> None:
    quotas = Quotas(requests_per_minute=None, tokens_per_minute=100, concurrent_requests=None, queue_max=10)
    world = EmbedWorld(tenant("acme", quotas=quotas), tenant("poor", budget=Budget(nusd=50, at_limit="degrade")))
    assert world.refusal(world.embed(101)).code == "context_length_exceeded"
    assert world.grant(world.embed(80)).offer.tier == "embed"
    assert world.refusal(world.embed(80)).code == "tokens_per_minute"
    assert world.refusal(world.embed(80, who="poor")).code == "budget_exhausted"


@pytest.mark.parametrize(("outcome", "billed"), [("completed", 40), ("replica_lost", 0), ("error", 0)])
def test_a_replica_that_never_reports_its_end(outcome: str, billed: int) -> None:
    """The client that has its vectors pays for them; the one that has not pays nothing."""
    world = EmbedWorld(tenant("acme"))
    request = world.embed(40)
    world.client_end(request, outcome, delivered={1: 0}, ttft_ms=5.0)
    world.lose("embed-r1")
    (row,) = world.rows
    assert (row.prompt_tokens, row.cost_nusd) == (billed, billed)


def test_tenants_take_turns_by_their_tokens() -> None:
    """One has thirty requests waiting, the other ten later ones of the same size: those leave the queue in turns."""
    world = EmbedWorld(tenant("bulk"), tenant("small"))
    asked = {world.embed(100, who="bulk"): "bulk" for _ in range(30)}
    asked |= {world.embed(100, who="small"): "small" for _ in range(10)}
    done: set[str] = set()
    for _ in range(20):
        running = [request for request in asked if world.answer(request) is not None and request not in done]
        done.add(running[0])
        world.complete(running[0], output=0)
    granted = [who for request, who in asked.items() if world.answer(request) is not None]
    assert len(granted) == 24 and 8 <= granted.count("small") <= 10
