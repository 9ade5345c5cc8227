"""Leases as pure arithmetic: pieces add up to a share of what is free, and the desk never gives more than its piece."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rungway.contracts import Isolation, Platform
from rungway.leases import Lease, LeaseSpec, PoolLease, ReplicaLease, TenantLease
from rungway.policies import desk as desk_module
from rungway.policies.desk import Desk, Wait
from rungway.policies.lease import Piece, ReplicaFree, TenantFree, replica_lease, tenant_lease
from rungway.simulate import scenario
from rungway.types import Ask, Grant, Risk

S = 1_000_000_000
SPEC = LeaseSpec(ttl_s=30.0, share=0.25, slots_max=4, tokens_max=20_000, requests_max=100)
REACHED = ("small-1", "large-1")


@given(st.integers(0, 10_000_000), st.integers(1, 12))
def test_the_pieces_of_all_gateways_add_up_exactly(total: int, gateways: int) -> None:
    assert sum(Piece(number, gateways).of(total) for number in range(gateways)) == total


@given(
    st.integers(0, 100_000),
    st.integers(0, 1000),
    st.integers(0, 50),
    st.integers(0, 10**12),
    st.integers(1, 8),
    st.floats(0.01, 1.0),
)
def test_all_leases_together_are_at_most_the_share(
    tokens: int, requests: int, places: int, nusd: int, gateways: int, share: float
) -> None:
    spec = msgspec.structs.replace(SPEC, share=share)
    cut = [
        tenant_lease(spec, TenantFree(tokens, requests, places, nusd, 0), Piece(k, gateways)) for k in range(gateways)
    ]
    assert sum(each.tokens for each in cut) <= share * tokens
    assert sum(each.requests for each in cut) <= share * requests
    assert sum(each.places for each in cut) <= share * places
    assert sum(each.nusd or 0 for each in cut) <= share * nusd


def test_without_a_limit_of_its_own_a_tenant_has_the_leases() -> None:
    found = tenant_lease(SPEC, TenantFree(None, None, None, None, 2), Piece(0, 1))
    assert found == TenantLease(20_000, 100, 102, None)


@given(st.integers(-3, 40), st.integers(0, 20), st.integers(1, 5))
def test_places_never_pass_what_the_replica_has(free: int, mine: int, gateways: int) -> None:
    rooms = [ReplicaFree("r", "small", "v", free, 1000, mine, 0, True)] * gateways
    extra = sum(replica_lease(SPEC, room, Piece(k, gateways)).slots - mine for k, room in enumerate(rooms))
    assert 0 <= extra <= max(0, free)
    assert replica_lease(SPEC, rooms[0]._replace(usable=False), Piece(0, 1)).slots == 0


def setting(**contract: Any) -> Platform:
    return scenario.platform(scenario.tenant("acme", **contract), scenario.tenant("beta"))


def lease(acme: TenantLease, *, slots: int = 8, rungs: dict[str, int] | None = None) -> Lease:
    return Lease(
        ttl_s=30.0,
        slots_max=4,
        waiting_max=10,
        tenants={"acme": acme, "beta": TenantLease(10_000, 50, 50, None)},
        replicas=[ReplicaLease(f"{tier}-1", tier, "sim", slots, 50_000) for tier in ("small", "large")],
        pools={tier: PoolLease(0.0, 5000.0, 20.0, rungs or {}) for tier in ("small", "large")},
    )


def ask(number: int, **changes: Any) -> Ask:
    base = Ask(
        request_id=f"q{number}",
        gateway_id="g1",
        tenant="acme",
        key_id="k",
        tenant_class="interactive",  # type: ignore[arg-type]
        model="small",
        tiers=("small",),
        prompt_tokens={"small": 10, "large": 10},
        trimmed_tokens={"small": 10, "large": 10},
        output_bound=40,
        received_wall_ns=0,
    )
    return msgspec.structs.replace(base, **changes)


def desk(given_: Lease) -> Desk:
    found = Desk(scenario.quality())
    found.receive(given_, 0)
    found.lost(())
    return found


PART = TenantLease(tokens=1000, requests=5, places=20, nusd=None)


def why(found: Desk, wanted: Ask, platform: Platform | None = None, **more: Any) -> Grant | Wait:
    values: dict[str, Any] = {"reachable": REACHED, "now_ns": S, "wall_ns": 1, "waited_ms": 0.0, **more}
    return found.admit(wanted, platform or setting(), **values)


def test_a_full_answer_is_granted_with_the_most_it_can_cost() -> None:
    grant = why(desk(lease(PART)), ask(1))
    assert isinstance(grant, Grant)
    assert (grant.reason, grant.replica_id, grant.attempt, grant.reserved_tokens) == ("lease", "small-1", 1, 50)
    assert grant.reserved_nusd == scenario.SMALL.cost_nusd(input_tokens=10, cached_tokens=0, output_tokens=40)
    assert grant.offer.degraded == () and grant.offer.rung == 0


@pytest.mark.parametrize(
    ("changes", "more", "expected"),
    [
        ({}, {"now_ns": 30 * S}, Wait.NO_LEASE),
        ({"tenant": "stranger"}, {}, Wait.TENANT),
        ({"prompt_tokens": {"small": 5000}}, {}, Wait.NO_FULL_OFFER),
        ({"deadline_ms": 10.0}, {}, Wait.NO_FULL_OFFER),
        ({"deadline_ms": 2000.0}, {"waited_ms": 1900.0}, Wait.NO_FULL_OFFER),
        ({"output_bound": 2000}, {}, Wait.SPENT),
        ({}, {"reachable": ()}, Wait.NO_FULL_OFFER),
    ],
)
def test_what_waits_for_the_controller(changes: dict[str, Any], more: dict[str, Any], expected: Wait) -> None:
    assert why(desk(lease(PART)), ask(1, **changes), **more) is expected


def test_where_a_rung_was_in_force_nothing_is_promised() -> None:
    found = desk(lease(PART, rungs={"interactive": 1}))
    assert why(found, ask(1)) is Wait.RUNG
    assert isinstance(why(found, ask(2, tenant_class="batch")), Grant)


def test_a_suspended_tenant_gets_nothing_even_by_an_older_lease() -> None:
    assert why(desk(lease(PART)), ask(1), setting(suspended=True)) is Wait.TENANT


def test_a_lost_best_tier_is_not_replaced_by_a_smaller_one() -> None:
    """That would be a downgrade, and nobody is there to write its audit row."""
    platform = setting()
    wanted = ask(1, model="auto", tiers=("small", "large"))
    chosen = why(desk(lease(PART)), wanted, platform)
    assert isinstance(chosen, Grant)
    others = tuple(name for name in REACHED if name != chosen.replica_id)
    assert why(desk(lease(PART)), wanted, platform, reachable=others) is Wait.NO_FULL_OFFER


def test_high_risk_keeps_its_minimum_tier() -> None:
    platform = setting(risk_high_tier_min="large")
    assert why(desk(lease(PART)), ask(1, risk=Risk.HIGH), platform) is Wait.NO_FULL_OFFER
    grant = why(desk(lease(PART)), ask(1, risk=Risk.HIGH, model="large", tiers=("large",)), platform)
    assert isinstance(grant, Grant) and grant.offer.tier == "large"


def test_places_come_back_and_tokens_do_not() -> None:
    found = desk(lease(msgspec.structs.replace(PART, requests=3), slots=1))
    assert isinstance(why(found, ask(1)), Grant)
    assert why(found, ask(2)) is Wait.NO_ROOM
    assert found.ended("q1") and not found.ended("q1")
    assert isinstance(why(found, ask(3)), Grant)
    found.ended("q3")
    assert isinstance(why(found, ask(4)), Grant)
    found.ended("q4")
    assert why(found, ask(5)) is Wait.SPENT


@pytest.fixture
def quotes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Of which requests offers were made."""
    made: list[str] = []
    quote = desk_module.quote

    def counted(wanted: Ask, *rest: Any, **more: Any) -> Any:
        made.append(wanted.request_id)
        return quote(wanted, *rest, **more)

    monkeypatch.setattr(desk_module, "quote", counted)
    return made


def test_who_waits_for_a_place_is_offered_once_what_a_newcomer_would_be(quotes: list[str]) -> None:
    platform = setting()
    found = desk(lease(PART, slots=1))
    assert isinstance(why(found, ask(1), platform), Grant)
    assert [why(found, ask(2), platform, waited_ms=100.0 * look) for look in range(5)] == [Wait.NO_ROOM] * 5
    found.ended("q1")
    grant = why(found, ask(2), platform, waited_ms=700.0)
    assert quotes == ["q1", "q2"]
    assert isinstance(grant, Grant)
    newcomer = why(desk(lease(PART, slots=1)), ask(2), platform, waited_ms=700.0)
    assert isinstance(newcomer, Grant) and grant.offer == newcomer.offer and grant.queue_wait_ms == 700.0


@pytest.mark.parametrize("news", ["lease", "platform", "tiers", "deadline", "ended"])
def test_an_offer_is_made_anew_when_what_it_rests_on_is(news: str, quotes: list[str]) -> None:
    platform, reachable = setting(), REACHED
    wanted = ask(2, deadline_ms=60_000.0) if news == "deadline" else ask(2)
    found = desk(lease(PART, slots=1))
    why(found, ask(1), platform)
    assert why(found, wanted, platform) is Wait.NO_ROOM
    if news == "lease":
        found.receive(lease(PART, slots=1), 0)
        assert isinstance(why(found, ask(3), platform), Grant)
    elif news == "platform":
        platform = setting(weight=2.0)
    elif news == "tiers":
        reachable = REACHED[:1]
    elif news == "ended":
        found.ended("q2")
    assert why(found, wanted, platform, reachable=reachable) is Wait.NO_ROOM
    assert quotes.count("q2") == 2


def test_no_more_offers_are_kept_than_may_wait(quotes: list[str]) -> None:
    platform = setting()
    found = desk(msgspec.structs.replace(lease(PART, slots=1), waiting_max=3))
    why(found, ask(1), platform)
    for _ in range(2):
        for number in range(2, 8):
            assert why(found, ask(number), platform) is Wait.NO_ROOM
    assert [quotes.count(f"q{number}") for number in range(2, 8)] == [1, 1, 1, 2, 2, 2]


def test_what_runs_already_fills_places() -> None:
    first = desk(lease(PART, slots=2))
    running = why(first, ask(1))
    assert isinstance(running, Grant)
    first.receive(lease(PART, slots=2), 0)
    first.lost([("acme", running)])
    assert isinstance(why(first, ask(2)), Grant)
    assert why(first, ask(3)) is Wait.NO_ROOM


def test_a_burst_of_one_tenant_leaves_the_others_places() -> None:
    platform = setting(isolation=Isolation(in_flight_share_max=0.5))
    found = desk(lease(TenantLease(10_000, 50, 50, None), slots=4))
    answers = [why(found, ask(number), platform) for number in range(4)]
    assert [isinstance(each, Grant) for each in answers] == [True, True, False, False]
    assert isinstance(why(found, ask(9, tenant="beta"), platform), Grant)


@given(st.lists(st.tuples(st.integers(1, 400), st.integers(1, 300), st.booleans()), max_size=60), st.integers(0, 10**9))
def test_whatever_is_asked_a_lease_is_never_overdrawn(asked: list[tuple[int, int, bool]], nusd: int) -> None:
    part = TenantLease(tokens=2000, requests=12, places=6, nusd=nusd)
    found = desk(lease(part))
    spent: Counter[str] = Counter()
    running: set[str] = set()
    for number, (prompt, output, end) in enumerate(asked):
        answer = why(found, ask(number, prompt_tokens={"small": prompt}, output_bound=output))
        if isinstance(answer, Grant):
            running.add(answer.request_id)
            spent.update(tokens=answer.reserved_tokens, requests=1, nusd=answer.reserved_nusd)
        if end and running:
            found.ended(running.pop())
        assert len(running) <= part.places
    assert spent["tokens"] <= part.tokens and spent["requests"] <= part.requests and spent["nusd"] <= nusd
