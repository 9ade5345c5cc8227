"""The ladder in the controller: who walks down first, what is written down before the answer, and the way back."""

from __future__ import annotations

import json
from collections import Counter

import msgspec

from control.harness import LADDER, NO_LIMITS, World, tenant
from rungway.contracts import LadderTerms, Slo, TenantClass
from rungway.messages import Flight, Granted
from rungway.policies.ladder import clear_override, set_override
from rungway.types import Action, Grant, OfferKind, Risk


def overload(world: World, who: str = "acme", count: int = 8, **ask: object) -> list[str]:
    """Fill the pool's four slots and leave the rest waiting."""
    return [world.submit(who, **ask) for _ in range(count)]


def test_waiting_for_the_large_tier_ends_on_the_small_one_with_an_audit_row_first() -> None:
    world = World(tenant("acme"))
    requests = overload(world, model="large", count=6)
    assert world.answer(requests[5]) is None
    world.advance(1.0)
    grant = world.grant(requests[5])
    assert grant.offer.tier == "small" and grant.offer.degraded == ("small_tier",)
    assert grant.offer.rung == 4 and grant.reason == "queue_wait"
    rows = [entry for entry in world.audit if entry.kind == "downgrade" and entry.request_id == requests[5]]
    assert len(rows) == 1
    detail = json.loads(rows[0].detail)
    assert detail["best"]["tier"] == "large" and detail["given"]["tier"] == "small"
    assert detail["pressure"]["large"][0] >= detail["thresholds"]["enter"]["small_tier"]


def test_degraded_grants_are_held_until_the_commit_and_full_ones_are_not() -> None:
    world = World(tenant("acme"))
    world.held_before_commit = 0
    overload(world, model="large", count=4)
    assert world.held_before_commit == 0
    overload(world, model="large", count=2)
    world.advance(1.0)
    degraded = [m for _, m in world.sent if isinstance(m, Granted) and m.grant.offer.degraded]
    assert len(degraded) == world.held_before_commit == 2


def test_a_degraded_grant_that_is_sent_again_waits_for_the_commit_like_the_first() -> None:
    world = World(tenant("acme"))
    last = overload(world, model="large", count=6)[-1]
    world.advance(1.0)
    assert world.grant(last).offer.degraded
    world.core.gateway_hello("g1", [Flight(world.cell.flights[last].ask)], world.now)
    effects = world.take()
    assert [message for _, message in effects.held] == [Granted(world.grant(last))]
    assert not any(isinstance(message, Granted) for _, message in effects.sends)


def test_every_downgrade_has_exactly_one_audit_row_and_no_full_answer_has_one() -> None:
    world = World(tenant("acme"), tenant("beta", tenant_class=TenantClass.STANDARD))
    for _ in range(6):
        overload(world, model="large", count=5)
        overload(world, "beta", model="auto", count=3, best_of=3)
        world.advance(1.2)
        for request in list(world.cell.flights):
            answer = world.answer(request)
            if isinstance(answer, Grant) and answer.replica_id:
                world.complete(request)
            elif isinstance(answer, Grant):
                world.client_end(request, "template")
    grants = {m.grant.request_id: m.grant for _, m in world.sent if isinstance(m, Granted)}
    audited = Counter(entry.request_id for entry in world.audit if entry.kind == "downgrade")
    assert set(audited) == {r for r, g in grants.items() if g.offer.degraded}
    assert set(audited.values()) == {1}


def test_the_tenant_over_its_share_walks_down_and_its_neighbour_does_not() -> None:
    world = World(tenant("hog"), tenant("victim"))
    overload(world, "hog", count=12)
    for _ in range(40):
        victim = world.submit("victim")
        world.advance(0.1)
        granted = [r for r in world.cell.flights if isinstance(world.answer(r), Grant)]
        for request in granted[:4]:
            if world.grant(request).replica_id:
                world.complete(request)
            else:
                world.client_end(request, "template")
        world.submit("hog")
        world.submit("hog")
        answer = world.answer(victim)
        assert not isinstance(answer, Grant) or answer.offer.degraded == ()
    rungs = {(e["side"]) for e in map(json.loads, (a.detail for a in world.audit if a.kind == "rung"))}
    assert rungs == {"over"}


def test_high_risk_waits_at_every_rung() -> None:
    world = World(tenant("acme", slo=Slo(ttft_ms_p99=10, tpot_ms_p99=60, availability=0.999)))
    overload(world, count=4)
    risky = world.submit(risk=Risk.HIGH)
    plain = world.submit()
    world.advance(2)
    assert world.answer(risky) is None
    answer = world.answer(plain)
    assert answer is not None and (not isinstance(answer, Grant) or answer.offer.kind is OfferKind.TEMPLATE)


def test_a_floor_and_an_opt_out_hold_under_any_pressure() -> None:
    world = World(tenant("acme", ladder=LadderTerms(floor="best_of_1")))
    requests = overload(world, model="large", count=8, best_of=2)
    world.advance(5)
    for request in requests:
        answer = world.answer(request)
        assert answer is None or (isinstance(answer, Grant) and answer.offer.tier == "large")


def test_a_write_gets_no_canned_text() -> None:
    world = World(tenant("acme", slo=Slo(ttft_ms_p99=10, tpot_ms_p99=60, availability=0.999)))
    overload(world, count=4)
    write = world.submit(action=Action.NON_IDEMPOTENT_WRITE)
    world.advance(1)
    answer = world.answer(write)
    assert not isinstance(answer, Grant) or answer.offer.kind is OfferKind.MODEL


def test_a_cached_answer_is_a_downgrade_only_when_the_client_did_not_ask_for_it() -> None:
    world = World(tenant("acme"))
    asked = world.grant(world.submit(cached=True, cache_wanted=True))
    assert asked.offer.kind is OfferKind.CACHE and asked.offer.degraded == ()
    assert world.grant(world.submit(cached=True)).offer.kind is OfferKind.MODEL


def test_the_ladder_comes_back_one_rung_at_a_time() -> None:
    ladder = msgspec.structs.replace(LADDER, dwell_up_s=1.0, dwell_down_s=2.0)
    world = World(tenant("acme"), ladder=ladder)
    requests = overload(world, model="large", count=8)
    world.advance(1.5)
    scope = ("interactive", "within")
    top = world.cell.pools["large"].scopes[scope].in_force
    assert top >= 3  # those who were late at `large` went to `small` one by one
    for request in requests:
        if request in world.cell.flights and world.grant(request).replica_id:
            world.complete(request)
    seen = [top]
    for _ in range(40):
        world.advance(0.5)
        rung = world.cell.pools["large"].scopes[scope].in_force
        if rung != seen[-1]:
            seen.append(rung)
    assert seen == list(range(top, -1, -1))
    transitions = [e for e in world.audit if e.kind == "rung"]
    assert len(transitions) >= top + 1


def test_deferral_says_when_to_come_back() -> None:
    world = World(tenant("acme"))
    pool = world.cell.pools["small"]
    for scope in pool.scopes:
        pool.scopes[scope], _ = set_override(pool.scopes[scope], 7, world.mono_ns + 10**12, LADDER)
    refusal = world.refusal(world.submit())
    assert refusal.code == "deferred" and refusal.retry_after_s is not None and refusal.rung == 7
    entry = [e for e in world.audit if e.kind == "refusal"][-1]
    assert json.loads(entry.detail)["tried"]


def test_a_missing_large_tier_is_said_to_be_the_cause() -> None:
    world = World(tenant("acme"), replicas=("small",))
    grant = world.grant(world.submit(model="auto", features=()))
    if grant.offer.degraded:
        assert grant.reason == "no_replicas"


def test_a_rung_held_by_hand_is_the_reason_that_is_given() -> None:
    world = World(tenant("acme"))
    pool = world.cell.pools["large"]
    world.advance(1.0)
    for scope in pool.scopes:
        pool.scopes[scope], _ = set_override(pool.scopes[scope], 4, world.mono_ns + 10**12, LADDER)
    grant = world.grant(world.submit(model="large", tiers=("large",)))
    assert (grant.offer.tier, grant.offer.degraded, grant.reason) == ("small", ("small_tier",), "override")


def test_a_better_offer_for_who_waits_stays_within_its_tenants_tokens() -> None:
    """Seen in seed 2813: the rung that had shortened a prompt was left, and the whole prompt was held beyond the quota."""
    quotas = msgspec.structs.replace(NO_LIMITS, tokens_per_minute=3000)
    world = World(tenant("acme", quotas=quotas), tenant("beta"), replicas=("small",))
    for _ in range(4):
        world.submit("beta")
    pool, state = world.cell.pools["small"], world.cell.tenants["acme"]
    names = [rung.name for rung in LADDER.rungs]
    for scope in pool.scopes:
        pool.scopes[scope], _ = set_override(
            pool.scopes[scope], names.index("context_trim"), world.mono_ns + 10**12, LADDER
        )
    waiting = world.submit(prompt=2000)
    assert world.cell.flights[waiting].held_tokens < 1100
    other = world.submit(prompt=1000)
    for scope in pool.scopes:
        pool.scopes[scope], _ = clear_override(pool.scopes[scope])
    world.core.reoffer_all(world.now)
    assert state.tokens.fits(0, world.mono_ns), "more is held than the quota"
    assert world.cell.flights[waiting].held_tokens < 1100 and world.cell.flights[waiting].entry is not None
    world.core.withdraw(other, "client_cancelled", world.now)
    world.core.reoffer_all(world.now)
    assert world.cell.flights[waiting].held_tokens > 2000, "now there is enough for the whole prompt"
