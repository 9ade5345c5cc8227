"""The controller core on a virtual clock: limits, holds, the queue, settlement on every path."""

from __future__ import annotations

import msgspec
import pytest

from control.harness import SECOND, World, tenant
from rungway.contracts import Budget, Isolation, LadderTerms, Quotas, TenantClass
from rungway.engine.chain import chain_keys
from rungway.engine.protocol import EngineStats, PrefixNews
from rungway.messages import Directory, FinishAck, Flight, Granted, Peers, Refused, Report, Retry
from rungway.types import Grant, OfferKind, Refusal, Risk


def quotas(**changes: int | None) -> Quotas:
    base = Quotas(requests_per_minute=None, tokens_per_minute=None, concurrent_requests=None, queue_max=1000)
    return msgspec.structs.replace(base, **changes)


def test_a_request_is_granted_billed_once_and_leaves_nothing_behind() -> None:
    world = World(tenant("acme"))
    request = world.submit()
    grant = world.grant(request)
    assert (grant.offer.tier, grant.offer.rung, grant.offer.degraded, grant.reason) == ("small", 0, (), "ok")
    world.complete(request, output=20)
    row = world.row(request)
    assert (row.prompt_tokens, row.output_tokens, row.wasted_tokens) == (10, 20, 0)
    assert row.cost_nusd == (10 * 1_000_000 + 20 * 2_000_000) // 1000
    assert row.outcome == "completed" and row.slo_met == 1
    world.at_rest()
    assert any(isinstance(m, FinishAck) and m.request_ids == [request] for _, m in world.sent)


def test_the_order_of_the_two_sides_does_not_matter() -> None:
    world = World(tenant("acme"))
    request = world.submit()
    grant = world.grant(request)
    world.client_end(request, delivered={grant.attempt: 7})
    assert not world.rows
    world.engine_end(request, 7)
    assert world.row(request).output_tokens == 7
    world.at_rest()


def test_repeated_reports_change_nothing() -> None:
    world = World(tenant("acme"))
    request = world.submit()
    world.complete(request)
    world.client_end(request)
    spent = world.cell.tenants["acme"].budget.spent
    assert len(world.rows) == 1
    world.core.submit(world.ask(request_id=request), world.now)
    world.take()
    assert len(world.rows) == 1 and world.cell.tenants["acme"].budget.spent == spent
    world.at_rest()


@pytest.mark.parametrize(
    ("limits", "code", "retry"),
    [
        ({"requests_per_minute": 2}, "requests_per_minute", True),
        ({"requests_per_minute": 0}, "requests_per_minute", False),
        ({"tokens_per_minute": 70}, "tokens_per_minute", True),
        ({"tokens_per_minute": 0}, "tokens_per_minute", False),
        ({"concurrent_requests": 2}, "concurrent_requests", True),
        ({"concurrent_requests": 0}, "concurrent_requests", False),
    ],
)
def test_own_limits_refuse_with_their_name_and_an_honest_retry(limits: dict[str, int], code: str, retry: bool) -> None:
    world = World(tenant("acme", quotas=quotas(**limits)))
    requests = [world.submit() for _ in range(3)]
    refusal = world.refusal(requests[-1])
    assert refusal.code == code
    assert (refusal.retry_after_s is not None) is retry
    if retry:
        assert refusal.retry_after_s is not None and 1 <= refusal.retry_after_s <= 60
        assert isinstance(world.answer(requests[0]), Grant) and isinstance(world.answer(requests[1]), Grant)
    row = world.row(requests[-1])
    assert (row.outcome, row.code, row.cost_nusd, row.output_tokens) == ("refused", code, 0, 0)


def test_concurrent_reservations_cannot_pass_a_token_limit_together() -> None:
    world = World(tenant("acme", quotas=quotas(tokens_per_minute=600)))
    requests = [world.submit(prompt=50, output_bound=50) for _ in range(20)]
    granted = [r for r in requests if r in world.cell.flights]
    assert len(granted) == 6
    for request in granted:
        if isinstance(world.answer(request), Grant):
            world.complete(request, output=50)
    world.advance(1)
    for request in list(world.cell.flights):
        world.complete(request, output=50)
    world.at_rest()
    world.advance(61, step_s=0.5)
    assert world.cell.tenants["acme"].tokens.remaining(world.mono_ns) == 600


def test_waiting_as_long_as_told_is_enough() -> None:
    world = World(tenant("acme", quotas=quotas(requests_per_minute=6)))
    for _ in range(6):
        world.complete(world.submit())
    refused = world.refusal(world.submit())
    assert refused.code == "requests_per_minute" and refused.retry_after_s is not None
    world.advance(refused.retry_after_s, step_s=0.5)
    world.grant(world.submit())


def test_unused_quota_comes_back_and_overuse_is_taken() -> None:
    world = World(tenant("acme", quotas=quotas(tokens_per_minute=1000)))
    tokens = world.cell.tenants["acme"].tokens
    request = world.submit(prompt=10, output_bound=500)
    assert tokens.remaining(world.mono_ns) == 490
    world.complete(request, output=40)
    assert tokens.remaining(world.mono_ns) == 950


def test_a_prompt_that_no_minute_admits_is_not_retryable() -> None:
    world = World(tenant("acme", quotas=quotas(tokens_per_minute=600)))
    refusal = world.refusal(world.submit(prompt=900))
    assert refusal.code == "context_length_exceeded" and refusal.retry_after_s is None


def test_a_budget_is_never_overspent_and_holds_are_estimates() -> None:
    budget = Budget(nusd=1_000_000_000)
    world = World(tenant("acme", budget=budget))
    price = 10 * 10_000_000 // 1000 + 20 * 20_000_000 // 1000
    served = 0
    while True:
        request = world.submit(model="large")
        if request not in world.cell.flights:
            break
        world.complete(request)
        served += 1
    refusal = world.refusal(request)
    assert refusal.code == "budget_exhausted"
    assert refusal.retry_after_s is not None and refusal.retry_after_s > 60
    assert served == 1_000_000_000 // price
    assert world.cell.tenants["acme"].budget.spent <= budget.nusd


def test_a_spent_budget_that_says_degrade_walks_to_a_cheaper_offer_and_says_so() -> None:
    price_large = 10 * 10_000_000 // 1000 + 20 * 20_000_000 // 1000
    world = World(tenant("acme", budget=Budget(nusd=price_large + 200_000, at_limit="degrade")))
    world.complete(world.submit(model="large"))
    request = world.submit(model="large")
    grant = world.grant(request)
    assert grant.offer.tier == "small" and "small_tier" in grant.offer.degraded and grant.reason == "budget"
    assert [entry.request_id for entry in world.audit if entry.kind == "downgrade"] == [request]


def test_a_suspended_tenant_gets_nothing() -> None:
    world = World(tenant("acme", suspended=True))
    refusal = world.refusal(world.submit())
    assert refusal.code == "tenant_suspended" and refusal.retry_after_s is None


def test_waiting_requests_are_bounded_per_tenant() -> None:
    world = World(tenant("acme", quotas=quotas(queue_max=3)), tenant("beta"))
    requests = [world.submit() for _ in range(8)]
    answers = [world.answer(r) for r in requests]
    assert sum(isinstance(a, Grant) for a in answers) == 4
    assert world.refusal(requests[-1]).code == "queue_full"
    assert world.cell.tenants["acme"].waiting == 3
    world.submit("beta")
    assert world.cell.tenants["beta"].waiting == 1


def test_late_binding_frees_a_place_when_the_engine_reports_the_end() -> None:
    world = World(tenant("acme"))
    requests = [world.submit() for _ in range(5)]
    assert world.answer(requests[4]) is None
    world.engine_end(requests[0], 20)
    assert isinstance(world.answer(requests[4]), Grant)


def test_in_flight_share_caps_a_tenant_only_while_others_are_there() -> None:
    capped = Isolation(in_flight_share_max=0.5)
    world = World(tenant("hog", isolation=capped), tenant("victim", isolation=capped))
    requests = [world.submit("hog") for _ in range(6)]
    assert sum(isinstance(world.answer(r), Grant) for r in requests) == 4
    for request in requests[:4]:
        world.engine_end(request, 20)
    victim = world.submit("victim")
    assert isinstance(world.answer(victim), Grant)
    more = [world.submit("hog") for _ in range(6)]
    running = world.cell.tenants["hog"].pool_running["small"]
    assert running == 2, "half of four slots"
    assert world.answer(more[-1]) is None
    assert isinstance(world.answer(world.submit("victim")), Grant)


def test_batch_waits_for_interactive_but_trickles() -> None:
    world = World(tenant("live"), tenant("bulk", tenant_class=TenantClass.BATCH))
    flood = [world.submit("live") for _ in range(60)]
    bulk = [world.submit("bulk") for _ in range(10)]
    order: list[str] = []
    for _ in range(60):
        running = [r for r in flood + bulk if isinstance(world.answer(r), Grant) and r in world.cell.flights]
        order += [r for r in running if r not in order]
        world.complete(running[0])
    served = [r in bulk for r in order]
    assert 3 <= sum(served[:50]) <= 10
    assert not served[4]


def test_a_deadline_that_passes_in_the_queue_is_refused_without_engine_work() -> None:
    world = World(tenant("acme"))
    for _ in range(4):
        world.submit()
    request = world.submit(deadline_ms=400.0)
    assert world.answer(request) is None
    world.advance(1)
    assert world.refusal(request).code == "deadline_unreachable"
    assert world.row(request).attempts == 0


def test_the_queue_has_a_time_limit() -> None:
    world = World(tenant("acme", ladder=LadderTerms(floor="full")), queue_timeout_s=5.0)
    for _ in range(4):
        world.submit()
    request = world.submit()
    world.advance(6)
    refusal = world.refusal(request)
    assert refusal.code == "overloaded" and refusal.retry_after_s is not None


def test_a_client_that_leaves_the_queue_costs_nothing() -> None:
    world = World(tenant("acme", quotas=quotas(tokens_per_minute=1000)))
    running = [world.submit() for _ in range(4)]
    before = world.cell.tenants["acme"].tokens.remaining(world.mono_ns)
    request = world.submit()
    world.core.withdraw(request, "client_cancelled", world.now)
    world.take()
    assert world.row(request).outcome == "client_cancelled" and world.row(request).cost_nusd == 0
    assert world.cell.tenants["acme"].tokens.remaining(world.mono_ns) == before
    for r in running:
        world.complete(r)
    world.at_rest()


def test_a_cancelled_answer_costs_what_the_engine_emitted() -> None:
    world = World(tenant("acme"))
    request = world.submit(output_bound=500)
    world.client_end(request, "client_cancelled", delivered={1: 9})
    world.engine_end(request, 11, finish="cancelled")
    assert (world.row(request).output_tokens, world.row(request).outcome) == (11, "client_cancelled")
    world.at_rest()


def test_a_lost_replica_is_replaced_and_its_undelivered_tokens_are_nobodys() -> None:
    world = World(tenant("acme"), replicas=("small",))
    world.replica("small", "small-r2")
    request = world.submit(output_bound=50)
    first = world.grant(request)
    world.lose(first.replica_id)
    world.retry(request, emitted=12)
    second = world.grant(request)
    assert second.attempt == 2 and second.replica_id != first.replica_id
    assert second.offer == first.offer
    world.engine_end(request, 38)
    world.client_end(request, delivered={1: 12, 2: 38})
    row = world.row(request)
    assert (row.prompt_tokens, row.output_tokens, row.attempts) == (10, 50, 2)
    world.at_rest()


def test_output_of_a_lost_replica_found_later_is_waste_not_a_second_bill() -> None:
    world = World(tenant("acme"), replicas=("small",))
    world.replica("small", "small-r2")
    request = world.submit(output_bound=50)
    first = world.grant(request)
    world.lose(first.replica_id)
    world.retry(request, emitted=12)
    world.engine_end(request, 38)
    world.client_end(request, delivered={1: 12, 2: 38})
    spent = world.cell.tenants["acme"].budget.spent
    world.engine_end(request, 15, attempt=1, finish="lost")
    assert world.waste == [(request, 3)]
    assert world.cell.tenants["acme"].budget.spent == spent
    world.engine_end(request, 15, attempt=1, finish="lost")
    assert world.waste == [(request, 3)], "the same report again adds nothing"


def test_retries_are_bounded_by_the_tenants_budget() -> None:
    world = World(tenant("acme"), replicas=())
    for n in range(8):
        world.replica("small", f"small-r{n}")
    requests = [world.submit() for _ in range(8)]
    for request in requests:
        world.retry(request, why="error")
    refused = [
        r for r in requests if isinstance(world.answer(r), Refused) or (r and not isinstance(world.answer(r), Grant))
    ]
    retried = [r for r in requests if len(world.cell.flights[r].attempts) == 2]
    assert len(retried) == 3, "floor of three"
    assert len(refused) == 5


def test_a_request_is_never_tried_more_often_than_configured() -> None:
    world = World(tenant("acme"), replicas=())
    for n in range(6):
        world.replica("small", f"small-r{n}")
    request = world.submit()
    for _ in range(5):
        if isinstance(world.answer(request), Grant):
            world.retry(request, why="error")
    assert len(world.cell.flights[request].attempts) == 3


def test_a_gateway_that_dies_mid_stream_is_billed_by_the_engine() -> None:
    world = World(tenant("acme"))
    request = world.submit()
    world.core.gateway_lost("g1", world.now)
    world.take()
    assert not world.rows
    world.engine_end(request, 6, finish="cancelled")
    assert (world.row(request).outcome, world.row(request).output_tokens) == ("gateway_lost", 6)
    world.at_rest()


def test_a_gateway_that_comes_back_finds_its_requests() -> None:
    world = World(tenant("acme"))
    running = [world.submit() for _ in range(4)]
    queued = world.submit()
    asks = {r: world.cell.flights[r].ask for r in [*running, queued]}
    world.core.gateway_lost("g1", world.now)
    world.engine_end(running[0], 20)
    assert world.answer(queued) is None, "nothing is granted to a gateway that is away"
    flights = [Flight(asks[r], world.grant(r)) for r in running[1:]] + [Flight(asks[queued])]
    world.core.gateway_hello("g1", flights, world.now)
    world.core.settle_turn(world.now)
    world.take()
    assert isinstance(world.answer(queued), Grant)
    for r in [*running[1:], queued]:
        world.complete(r)
    assert world.row(running[0]).outcome == "gateway_lost"
    world.at_rest()


@pytest.mark.parametrize("why", ["replica_lost", "timeout", "evicted"])
def test_a_repeated_word_about_a_failed_try_repeats_the_grant_that_answered_it(why: str) -> None:
    world = World(tenant("acme", isolation=Isolation(retry_budget_ratio=0.0)), retry_budget_floor=1, breaker_failures=2)
    world.replica("small", "small-r2")
    request = world.submit()
    first, ask = world.grant(request), world.cell.flights[request].ask
    world.retry(request, why)
    second = world.grant(request)
    assert second.attempt == 2
    world.core.gateway_lost("g1", world.now)  # with it the second grant
    world.core.gateway_hello("g1", [Flight(ask, first)], world.now)
    world.core.retry("g1", Retry(request, 1, first.replica_id, why, 0), world.now)
    world.core.settle_turn(world.now)
    assert [message for _, message in world.take().sends if isinstance(message, Granted)] == [Granted(second)]
    assert sum(view.running for view in world.cell.pools["small"].views.values()) == 1
    assert world.cell.pools["small"].breakers[first.replica_id].state == "closed", (
        "it failed once, whoever says so again"
    )
    world.engine_end(request, 0, attempt=1, finish="lost")
    world.complete(request)
    assert world.row(request).outcome == "completed"
    world.at_rest()


@pytest.mark.parametrize("told_by", ["hello", "report"])
def test_what_a_replica_that_was_only_cut_off_still_runs_fills_its_places(told_by: str) -> None:
    world = World(tenant("acme"))
    running = [world.submit() for _ in range(4)]
    waiting = world.submit()
    world.lose("small-r1")
    listed = tuple((request, 1) for request in running)
    world.replica("small", "small-r1", running=listed if told_by == "hello" else ())
    if told_by == "report":
        progress = [(request, 1, 3) for request in running]
        world.core.report(Report("small-r1", EngineStats(0, 0, 0, 1000, 1000, 0), progress), world.now)
    world.core.settle_turn(world.now)
    world.take()
    assert world.cell.pools["small"].views["small-r1"].running == 4
    assert world.answer(waiting) is None, "the batch is full"
    world.complete(running[0])
    assert world.row(running[0]).output_tokens == 20 and world.grant(waiting).replica_id == "small-r1"
    for request in [*running[1:], waiting]:
        world.complete(request)
    world.at_rest()


def test_an_engine_that_makes_more_than_expected_while_its_request_waits_again_moves_no_sum() -> None:
    world = World(tenant("acme"), replicas=("small",))
    running = [world.submit(output_bound=10) for _ in range(4)]
    others = [world.submit(output_bound=10) for _ in range(2)]
    pool, state = world.cell.pools["small"], world.cell.tenants["acme"]
    before = pool.queued_tokens
    world.core.retry("g1", Retry(running[0], 1, "small-r1", "evicted", 2), world.now)
    world.core.report(Report("small-r1", EngineStats(0, 0, 0, 1000, 1000, 0), [(running[0], 1, 25)]), world.now)
    world.take()
    world.core.withdraw(others[0], "client_cancelled", world.now)
    world.core.settle_turn(world.now)
    assert world.cell.flights[running[0]].entry is None, "it goes on, before what is new"
    world.take()
    assert pool.queued_tokens == state.queued_tokens["small"] == sum(pool.queued_bands) == before // 2
    for request in running[1:]:
        world.complete(request, output=10)
    world.engine_end(running[0], 25, attempt=1, finish="error")
    world.complete(running[0], output=3)
    world.complete(others[1], output=10)
    world.at_rest()


def test_a_try_that_was_given_up_for_another_gets_no_place_back() -> None:
    world = World(tenant("acme"))
    world.replica("small", "small-r2")
    request = world.submit()
    first = world.grant(request).replica_id
    world.lose(first)
    world.retry(request)
    assert world.grant(request).attempt == 2
    world.replica("small", first, running=((request, 1),))
    assert world.cell.pools["small"].views[first].running == 0
    world.engine_end(request, 0, attempt=1, finish="cancelled")
    world.complete(request)
    world.at_rest()


def test_a_gateway_that_stays_away_leaves_no_flight() -> None:
    world = World(tenant("acme"))
    running = [world.submit() for _ in range(4)]
    queued = world.submit()
    world.core.gateway_lost("g1", world.now)
    for r in running:
        world.engine_end(r, 3, finish="cancelled")
    world.advance(12)
    assert world.row(queued).outcome == "gateway_lost" and world.row(queued).attempts == 0
    world.at_rest()


def test_a_new_controller_takes_over_what_gateways_hold() -> None:
    old = World(tenant("acme", quotas=quotas(tokens_per_minute=1000)))
    request = old.submit(output_bound=90)
    flight = Flight(old.cell.flights[request].ask, old.grant(request))
    new = World(tenant("acme", quotas=quotas(tokens_per_minute=1000)))
    new.sent += old.sent
    new.core.gateway_hello("g1", [flight], new.now)
    new.take()
    assert new.cell.tenants["acme"].tokens.remaining(new.mono_ns) == 900
    assert new.cell.pools["small"].views["small-r1"].running == 1
    new.complete(request, output=30)
    assert new.row(request).output_tokens == 30
    new.at_rest()


def test_usage_that_nobody_claims_is_billed_from_the_replicas_own_report() -> None:
    old = World(tenant("acme"))
    request = old.submit()
    new = World(tenant("acme"))
    new.sent += old.sent
    new.engine_end(request, 9, finish="cancelled")
    assert not new.rows
    new.advance(11)
    row = new.row(request)
    assert (row.outcome, row.output_tokens, row.tenant) == ("gateway_lost", 9, "acme")
    assert new.cell.tenants["acme"].budget.spent == row.cost_nusd


def test_a_silent_engine_side_does_not_hold_a_request_for_ever() -> None:
    world = World(tenant("acme"), lost_wait_s=5.0)
    request = world.submit()
    world.client_end(request, "timeout", delivered={1: 4})
    world.advance(6)
    assert world.row(request).output_tokens == 4
    world.at_rest()


def test_no_replica_is_said_at_once() -> None:
    world = World(tenant("acme"), replicas=("large",))
    assert world.refusal(world.submit()).code == "starting"
    world.replica("small", "small-r1")
    world.lose("small-r1")
    assert world.refusal(world.submit()).code == "no_capacity"


def test_stale_replicas_get_no_work() -> None:
    world = World(tenant("acme"))
    world.mono_ns += 3 * SECOND
    request = world.submit()
    assert world.answer(request) is None
    world.report_all()
    world.core.settle_turn(world.now)
    world.take()
    assert isinstance(world.answer(request), Grant)


def test_cancel_reaches_queued_and_running_but_not_other_tenants() -> None:
    world = World(tenant("acme"), tenant("beta"))
    running = [world.submit() for _ in range(4)]
    queued = world.submit()
    assert not world.core.cancel(queued, "beta", world.now)
    assert world.core.cancel(queued, "acme", world.now)
    assert world.core.cancel(running[0], None, world.now)
    world.take()
    assert world.refusal(queued).code == world.refusal(running[0]).code == "cancelled"
    assert world.row(queued).outcome == "refused"
    assert running[0] in world.cell.flights, "a running one is settled by its gateway and its replica"


def test_a_grant_that_crosses_the_clients_leaving_holds_nothing() -> None:
    world = World(tenant("acme"))
    request = world.submit()
    world.client_end(request, "client_cancelled", attempts=0)
    assert (world.row(request).outcome, world.row(request).cost_nusd) == ("client_cancelled", 0)
    world.at_rest()


def test_reload_takes_effect_on_the_next_request_and_reaches_gateways() -> None:
    world = World(tenant("acme", quotas=quotas(requests_per_minute=60)))
    running = world.submit()
    changed = tenant("acme", quotas=quotas(requests_per_minute=0))
    world.core.reload(msgspec.structs.replace(world.cell.platform, tenants=(changed,), digest="new"), world.now)
    effects = world.take()
    assert any(isinstance(m, Directory) and m.version == 2 for _, m in effects.sends)
    assert world.refusal(world.submit()).code == "requests_per_minute"
    world.complete(running)
    assert world.row(running).outcome == "completed"
    assert [e.kind for e in world.audit if e.kind == "reload"] == ["reload"]


def test_a_reload_changes_how_the_pools_are_shared_out() -> None:
    world = World(tenant("acme"), tenant("globex", tenant_class=TenantClass.BATCH))
    for _ in range(4):
        world.submit("globex")
    before = world.cell.platform
    spec = msgspec.structs.replace(before.controller, in_flight_factor=2.0, class_shares={"batch": 1.0})
    world.core.reload(msgspec.structs.replace(before, controller=spec, digest="new"), world.now)
    last, first = world.submit("acme"), [world.submit("globex") for _ in range(3)]
    assert all(isinstance(world.answer(request), Grant) for request in (last, *first))  # eight places, no longer four
    assert world.answer(world.submit("globex")) is None
    assert world.cell.pools["small"].queue.claimed_below(0) == 1.0


def test_an_idle_replica_teaches_nothing_about_pace() -> None:
    """Its rate is that of a batch that is over: with nothing running, a token would seem eight times as fast after a batch
    of eight, and deadlines and prices would follow."""
    world = World(tenant("acme"))
    busy = EngineStats(8, 0, 0, 1000, 1000, 0, decode_tokens_per_s=400.0)
    for stats in (busy, *[msgspec.structs.replace(busy, running=0)] * 100):
        world.core.report(Report("small-r1", stats, []), world.now)
    assert world.cell.pools["small"].pace.decode_ms == 20.0


def test_every_gateway_learns_of_replicas_that_come_and_go() -> None:
    world = World(tenant("acme"))
    world.core.gateway_hello("g2", [], world.now)
    world.replica("small", "small-r2")
    world.lose("small-r1")
    world.take()
    last = {peer: m for peer, m in world.sent if isinstance(m, Peers)}
    assert {r.replica_id for r in last["g1"].replicas} == {"small-r2", "large-r1"}
    assert {r.replica_id for r in last["g2"].replicas} == {"small-r2", "large-r1"}


def test_a_failing_tenant_is_paused_and_others_are_not() -> None:
    world = World(tenant("acme"), tenant("beta"), breaker_failures=3)
    for _ in range(3):
        request = world.submit()
        world.engine_end(request, 0, finish="error")
        world.client_end(request, "error", code="internal")
    paused = world.refusal(world.submit())
    assert paused.code == "tenant_suspended" and paused.retry_after_s is not None
    world.grant(world.submit("beta"))
    world.advance(2.1)
    probe = world.submit()
    assert isinstance(world.answer(probe), Grant)
    world.complete(probe)
    world.grant(world.submit())


@pytest.mark.parametrize(("why", "code"), [("error", "internal"), ("replica_lost", "replica_lost")])
def test_a_spent_retry_budget_hides_no_failure_of_the_tenants_own(why: str, code: str) -> None:
    world = World(tenant("acme"), breaker_failures=3)
    for number in range(2, 8):
        world.replica("small", f"small-r{number}")  # so that none of them has a breaker open
    for _ in range(3):
        request = world.submit()
        while isinstance(world.answer(request), Grant):
            world.retry(request, why=why)
        assert world.refusal(request).code == code
        world.client_end(request, "error", code=code)
    follower = world.answer(world.submit())
    if why == "error":
        assert isinstance(follower, Refusal) and follower.code == "tenant_suspended"
    else:
        assert isinstance(follower, Grant), "losing a replica is not the tenant's fault"


@pytest.mark.parametrize("code", ["invalid_schema", "starting"])
def test_what_is_no_fault_of_an_engine_suspends_nobody(code: str) -> None:
    """A request that asks for what cannot be, a gateway that stops under its requests."""
    world = World(tenant("acme"), breaker_failures=2)
    for _ in range(4):
        request = world.submit()
        world.engine_end(request, 0, finish="error")
        world.client_end(request, "error", code=code)
    world.grant(world.submit())


def test_high_risk_waits_for_its_tier() -> None:
    world = World(tenant("acme", risk_high_tier_min="large"))
    request = world.submit(model="auto", risk=Risk.HIGH)
    assert world.grant(request).offer.tier == "large"
    assert world.grant(request).offer.kind is OfferKind.MODEL
    assert not any(isinstance(m, Granted) and m.grant.offer.degraded for _, m in world.sent)


def test_a_grant_that_came_after_its_client_had_left_holds_no_place() -> None:
    """The gateway never began that try, so no engine will ever report its end."""
    world = World(tenant("acme"), tenant("globex"))
    requests = [world.submit() for _ in range(4)]
    for request in requests:
        world.grant(request)
        world.client_end(request, "client_cancelled", delivered={})
    for request in requests:
        row = world.row(request)
        assert (row.outcome, row.output_tokens, row.cost_nusd) == ("client_cancelled", 0, 0)
    world.at_rest()
    world.grant(world.submit("globex"))


def test_a_pool_knows_what_each_of_its_replicas_caches_until_the_replica_is_lost() -> None:
    world = World(tenant("acme"), replicas=("small",))
    pool = world.cell.pools["small"]
    (replica_id,) = pool.views
    keys = chain_keys("acme", list(range(80)), 16)

    def report(news: PrefixNews | None) -> None:
        world.core.report(Report(replica_id, EngineStats(0, 0, 0, 1000, 1000, 0), [], prefixes=news), world.now)

    report(PrefixNews(True, list(keys[:3]), []))
    report(None)
    assert pool.prefixes[replica_id].leading(keys) == 3
    report(PrefixNews(False, [keys[3]], [keys[1]]))
    assert pool.prefixes[replica_id].leading(keys) == 1
    world.lose(replica_id)
    assert pool.prefixes == {} and pool.where == {}


@pytest.mark.parametrize("deadline_ms", [1e-6, 9.3e12, 1e18])
def test_no_deadline_is_too_far_away_or_too_near(deadline_ms: float) -> None:
    world = World(tenant("acme"))
    running = [world.submit() for _ in range(4)]
    waiting = world.submit(deadline_ms=deadline_ms)
    pool = world.cell.pools["small"]
    assert (pool.late, pool.late_bands) == (0, [0, 0, 0])
    world.complete(running[0])
    for request in (*running[1:], waiting):
        if isinstance(world.answer(request), Grant):
            world.complete(request)
    assert (pool.late, pool.late_bands) == (0, [0, 0, 0])
    world.at_rest()


def test_tokens_that_are_told_of_while_an_answer_waits_to_go_on_do_not_spoil_the_lines_sum() -> None:
    """The replica's last report of a try may come after the gateway's word that it was stopped."""
    world = World(tenant("acme"), tenant("globex"))
    request, *others = (world.submit() for _ in range(4))
    other = world.submit("globex")
    grant, stats = world.grant(request), EngineStats(0, 0, 0, 1000, 1000, 0)
    world.core.report(Report(grant.replica_id, stats, [(request, 1, 15)]), world.now)  # globex is before acme by now
    world.retry(request, "evicted", 15)
    flight = world.cell.flights[request]
    assert flight.entry is not None and isinstance(world.answer(other), Grant)
    world.core.report(Report(grant.replica_id, stats, [(request, 1, 400)]), world.now)
    world.engine_end(request, 400, attempt=1, finish="cancelled")
    for each in (other, *others):
        world.complete(each)
    world.engine_end(request, 5)
    world.client_end(request, delivered={1: 20, 2: 5})
    world.at_rest()
