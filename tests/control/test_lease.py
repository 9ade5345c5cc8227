"""The controller's side of leases: what it cuts, and that what was admitted without it is in its books exactly once, whether it
is a new process or was only cut off."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from control.harness import NO_LIMITS, SECOND, World, billed, tenant
from rungway.contracts import Budget, Quotas
from rungway.control.early import restarted
from rungway.leases import Lease, LeaseSpec
from rungway.messages import Flight as WireFlight
from rungway.messages import Leased, Refused, Retry
from rungway.policies.desk import Desk
from rungway.policies.ladder import set_override
from rungway.simulate import scenario
from rungway.types import AttemptEnd, Finish, Grant, Usage

LIMITS = Quotas(requests_per_minute=100, tokens_per_minute=4000, concurrent_requests=8, queue_max=100)
OUTPUT = 20


def world(**changes: Any) -> World:
    acme = tenant("acme", quotas=LIMITS, budget=Budget(nusd=10**9, per="day"), **changes)
    found = World(acme, tenant("beta"), lease=LeaseSpec(share=0.5, ttl_s=30.0))
    found.advance(0.1)
    return found


def leases(found: World, gateway: str = "g1") -> list[Lease]:
    return [message.lease for peer, message in found.sent if peer == gateway and isinstance(message, Leased)]


def admitted(found: World, count: int = 1) -> list[tuple[Any, Grant]]:
    """What a gateway admits from its newest lease while the controller does not hear of it."""
    desk = Desk(scenario.quality())
    desk.receive(leases(found)[-1], 0)
    desk.lost(())
    given = []
    for _ in range(count):
        ask = found.ask()
        grant = desk.admit(ask, found.cell.platform, ["small-r1", "large-r1"], 1, found.wall_ns, 0.0)
        assert isinstance(grant, Grant), grant
        given.append((ask, grant))
    return given


def engine_ends(found: World, grant: Grant, output: int = OUTPUT, finish: str = "stop") -> None:
    end = AttemptEnd(
        request_id=grant.request_id,
        attempt=1,
        replica_id=grant.replica_id,
        usage=Usage(prompt_tokens=10, output_tokens=output),
        finish=finish,
        billing=billed(grant),
        started_wall_ns=found.wall_ns,
        ended_wall_ns=found.wall_ns,
    )
    found.core.attempt_ended(grant.replica_id, end, found.now)
    found.take()


def hello(found: World, given: list[tuple[Any, Grant]]) -> None:
    found.core.gateway_hello("g1", [WireFlight(ask, grant) for ask, grant in given], found.now)
    found.take()


def client_ends(found: World, grant: Grant, output: int = OUTPUT) -> None:
    finish = Finish(request_id=grant.request_id, outcome="completed", attempts=1, delivered={1: output}, e2e_ms=9.0)
    found.core.finished("g1", finish, found.now)
    found.take()


def used(found: World) -> tuple[int | None, int | None, int, int]:
    """Requests and tokens left, money spent and held."""
    state, now = found.cell.tenants["acme"], found.now.mono_ns
    return state.requests.remaining(now), state.tokens.remaining(now), state.budget.spent, state.budget.held


def test_a_lease_is_a_share_of_what_is_free_and_comes_again() -> None:
    found = world()
    first = leases(found)[0]
    part = first.tenants["acme"]
    assert (part.requests, part.tokens, part.places, part.nusd) == (
        25,
        1000,
        2,
        250_000_000,
    )  # one of two gateways: half of the share
    assert {each.replica_id: each.slots for each in first.replicas} == {"small-r1": 1, "large-r1": 1}
    before = len(leases(found))
    found.advance(9.0)
    assert len(leases(found)) == before
    found.advance(2.0)
    assert len(leases(found)) == before + 1


def test_two_gateways_hold_half_each() -> None:
    found = world()
    found.core.gateway_hello("g2", [], found.now)
    found.core.gateway_hello("g1", [], found.now)
    found.advance(0.1)
    both = [leases(found, name)[-1].tenants["acme"] for name in ("g1", "g2")]
    assert sum(part.tokens for part in both) == 2000 and sum(part.places for part in both) == 4


def test_a_moved_rung_is_told_at_once() -> None:
    found = world()
    before = len(leases(found))
    pool = found.cell.pools["small"]
    pool.scopes[("interactive", "over")], _ = set_override(
        pool.scopes[("interactive", "over")], 1, found.mono_ns + 60 * SECOND, found.cell.platform.ladder
    )
    found.advance(0.1)
    assert len(leases(found)) == before + 1
    assert leases(found)[-1].pools["small"].rungs["interactive"] == 1


def test_suspended_tenants_and_a_share_of_zero_get_none() -> None:
    found = world(suspended=True)
    assert "acme" not in leases(found)[-1].tenants
    off = World(tenant("acme"), lease=LeaseSpec(share=0.0))
    off.advance(0.2)
    assert leases(off) == []


@pytest.mark.parametrize("new_process", [True, False])
@pytest.mark.parametrize("told_first", ["engine", "gateway"])
def test_what_ended_during_the_outage_is_billed_and_debited_once(new_process: bool, told_first: str) -> None:
    found = world()
    [(ask, grant)] = given = admitted(found)
    if new_process:
        restarted = world()
        found = restarted
    else:
        found.core.gateway_lost("g1", found.now)
    before = used(found)
    if told_first == "engine":
        engine_ends(found, grant)
        hello(found, given)
        client_ends(found, grant)
    else:
        hello(found, given)
        client_ends(found, grant)
        engine_ends(found, grant)
    row = found.row(ask.request_id)
    assert (row.output_tokens, row.reason, row.outcome) == (OUTPUT, "lease", "completed")
    after = used(found)
    assert before[0] is not None and after[0] == before[0] - 1
    assert before[1] is not None and after[1] == before[1] - 10 - OUTPUT
    assert (after[2], after[3]) == (before[2] + row.cost_nusd, 0)
    hello(found, given)  # the acknowledgement was lost: everything is told again
    client_ends(found, grant)
    engine_ends(found, grant)
    assert used(found) == after and found.waste == []
    found.row(ask.request_id)
    found.at_rest()


def test_a_long_partition_closes_it_by_the_engines_word_alone_and_once() -> None:
    found = world()
    [(ask, grant)] = given = admitted(found)
    found.core.gateway_lost("g1", found.now)
    engine_ends(found, grant)
    found.advance(found.cell.platform.controller.orphan_wait_s + 1, 0.5)
    row = found.row(ask.request_id)
    assert (row.output_tokens, row.outcome) == (OUTPUT, "gateway_lost")
    spent = used(found)[2:]
    assert spent == (row.cost_nusd, 0)
    hello(found, given)
    client_ends(found, grant)
    found.row(ask.request_id)
    assert used(found)[2:] == spent
    found.at_rest()


def test_the_engines_word_alone_debits_the_buckets_too() -> None:
    found = world()
    [(_, grant)] = admitted(found)
    found.core.gateway_lost("g1", found.now)
    engine_ends(found, grant)
    for _ in range(30):
        if found.rows:
            break
        assert used(found)[:2] == (100, 4000)
        found.advance(0.5, 0.5)
    assert used(found)[:2] == (99, 4000 - 10 - OUTPUT)


def test_a_further_try_of_a_closed_request_is_refused_and_does_not_hang() -> None:
    found = world()
    [(ask, grant)] = given = admitted(found)
    found.core.gateway_lost("g1", found.now)
    engine_ends(found, grant, output=3, finish="lost")
    found.advance(found.cell.platform.controller.orphan_wait_s + 1, 0.5)
    hello(found, given)
    found.core.retry("g1", Retry(ask.request_id, 1, grant.replica_id, "replica_lost", 3), found.now)
    found.take()
    assert isinstance(found.sent[-1][1], Refused) and found.sent[-1][1].refusal.code == "replica_lost"


def test_overspend_is_at_most_the_lease_and_is_paid_back() -> None:
    """The quota is used up by another gateway while this one admits from its lease."""
    found = world()
    given = admitted(found)
    found.core.gateway_lost("g1", found.now)
    state = found.cell.tenants["acme"]
    state.tokens.take(4000, found.mono_ns)
    hello(found, given)
    assert state.tokens.remaining(found.mono_ns) == 0
    reserved = sum(grant.reserved_tokens for _, grant in given)
    lease = leases(found)[-1].tenants["acme"]
    assert reserved <= 1000 and state.tokens.wait_s(1, found.mono_ns) == pytest.approx((reserved + 1) * 60 / 4000)
    found.advance(0.1)
    assert leases(found)[-1].tenants["acme"].tokens == 0 < lease.tokens


def test_asks_that_come_before_the_replicas_wait_for_them_and_not_for_ever() -> None:
    found = World(tenant("acme"), replicas=())
    restarted(found.cell, found.now)
    first, second = found.submit(), found.submit(model="large")
    assert found.answer(first) is None and found.answer(second) is None
    found.replica("small", "small-r1")
    found.advance(0.1)
    assert found.grant(first).replica_id == "small-r1" and found.answer(second) is None
    found.advance(found.cell.platform.controller.orphan_wait_s, 0.5)
    assert found.refusal(second).code == "starting"
    assert found.cell.early == {}


def test_no_tenant_has_more_waiting_for_replicas_than_its_line_may_hold() -> None:
    few = msgspec.structs.replace(NO_LIMITS, queue_max=2)
    found = World(tenant("acme", quotas=few), tenant("globex"), replicas=(), lease=LeaseSpec(waiting_max=1))
    restarted(found.cell, found.now)
    kept = [found.submit() for _ in range(2)]
    assert found.refusal(found.submit()).code == "starting"
    found.core.submit(found.cell.early[kept[0]][0], found.now)  # said again: it waits on
    others = [found.submit("globex") for _ in range(3)]
    found.core.withdraw(kept.pop(), "client_cancelled", found.now)
    kept.append(found.submit())
    assert found.refusal(found.submit()).code == "starting"
    found.replica("small", "small-r1", slots=8)
    found.advance(0.1)
    assert {found.grant(request).replica_id for request in (*kept, *others)} == {"small-r1"}
    assert found.cell.early == {} and not +found.cell.early_of


def test_an_ask_that_waits_for_replicas_can_be_withdrawn() -> None:
    found = World(tenant("acme"), replicas=())
    restarted(found.cell, found.now)
    request_id = found.submit()
    found.core.withdraw(request_id, "client_cancelled", found.now)
    found.replica("small", "small-r1")
    found.advance(0.1)
    assert found.answer(request_id) is None and found.cell.early == {}
