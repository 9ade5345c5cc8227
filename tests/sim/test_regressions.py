"""What the simulator found in the controller, each as a short story on the core alone."""

from __future__ import annotations

import pytest

from control.harness import World, tenant
from rungway.messages import AttemptAck, FinishAck, Flight, Refused
from rungway.types import Ask, Finish


def acknowledged(world: World, kind: type[AttemptAck]) -> list[tuple[str, int]]:
    return [key for _, message in world.sent if isinstance(message, kind) for key in message.attempts]


def test_late_engine_output_is_waste_only_beyond_what_the_row_counted() -> None:
    """Seen: by progress 6, by the client 4; the log of the killed replica says 9. The row has 4 paid, 2 wasted."""
    from rungway.control import settle

    world = World(tenant("acme"))
    request = world.submit()
    grant = world.grant(request)
    settle.progress(world.cell, request, 1, 6, world.now)
    world.lose(grant.replica_id)
    world.client_end(request, "replica_lost", attempts=1, delivered={1: 4})
    assert (world.row(request).output_tokens, world.row(request).wasted_tokens) == (4, 2)
    world.engine_end(request, 9, finish="lost")
    assert world.waste == [(request, 3)]


def test_a_grant_that_died_with_its_gateway_gives_its_place_back() -> None:
    world = World(tenant("acme"), lost_wait_s=5.0)
    request = world.submit()
    world.core.gateway_lost("g1", world.now)
    world.advance(4)
    assert world.cell.pools["small"].views["small-r1"].running == 1, "its engine may still speak up"
    world.advance(2)
    assert world.row(request).outcome == "gateway_lost"
    world.at_rest()


def test_an_engines_side_is_acknowledged_with_the_row_and_not_before() -> None:
    world = World(tenant("acme"))
    request = world.submit()
    world.engine_end(request, 20)
    assert acknowledged(world, AttemptAck) == [], "if this controller died now, nobody would know"
    world.client_end(request, delivered={1: 20})
    assert acknowledged(world, AttemptAck) == [(request, 1)]


def restarted(old: World) -> World:
    new = World(tenant("acme"))
    new.sent += old.sent
    return new


def test_a_request_that_ended_while_no_controller_was_there_keeps_its_outcome() -> None:
    old = World(tenant("acme"))
    request = old.submit()
    new = restarted(old)
    finish = Finish(request_id=request, outcome="completed", attempts=1, delivered={1: 9}, ttft_ms=7.0)
    new.core.finished("g1", finish, new.now)
    new.engine_end(request, 9)
    assert not any(isinstance(message, FinishAck) for _, message in new.sent), "not written yet"
    new.advance(11)
    row = new.row(request)
    assert (row.outcome, row.output_tokens, row.ttft_ms) == ("completed", 9, 7.0)
    assert any(isinstance(message, FinishAck) for _, message in new.sent)


def test_a_finish_that_no_engine_answers_is_let_go() -> None:
    new = World(tenant("acme"))
    new.core.finished("g1", Finish(request_id="old", outcome="completed", delivered={1: 9}), new.now)
    new.advance(21)
    assert not new.rows and not new.cell.strays
    assert any(isinstance(message, FinishAck) for _, message in new.sent)


def test_all_tries_of_an_unclaimed_request_are_one_row() -> None:
    old = World(tenant("acme"))
    for number in range(2):
        old.replica("small", f"small-x{number}")
    request = old.submit()
    old.retry(request, why="replica_lost", emitted=5)
    new = restarted(old)
    new.engine_end(request, 5, attempt=1, finish="lost")
    new.advance(3)
    finish = Finish(request_id=request, outcome="completed", attempts=2, delivered={1: 5, 2: 15})
    new.core.finished("g1", finish, new.now)
    new.engine_end(request, 15, attempt=2)
    new.advance(11)
    row = new.row(request)
    assert (row.outcome, row.output_tokens, row.wasted_tokens, row.attempts) == ("completed", 20, 0, 2)


def restarted_after_a_retry() -> tuple[World, Flight]:
    """A new controller, and what its gateway says of a request: the first grant only, though a second try was made."""
    old = World(tenant("acme"))
    for number in range(2):
        old.replica("small", f"small-x{number}")
    request = old.submit()
    known = Flight(old.cell.flights[request].ask, old.grant(request))
    old.retry(request, why="replica_lost", emitted=5)
    return restarted(old), known


@pytest.mark.parametrize("ends_first", [True, False])
def test_a_later_try_than_the_adopted_one_is_on_the_same_row(ends_first: bool) -> None:
    """Seen: of what it had admitted from a lease a gateway named the first grant, though a second try had ended it."""
    new, known = restarted_after_a_retry()
    request = known.ask.request_id
    finish = Finish(request_id=request, outcome="completed", attempts=2, delivered={1: 5, 2: 15})

    def engines() -> None:
        new.engine_end(request, 7, attempt=1, finish="lost")
        new.engine_end(request, 15, attempt=2)

    if ends_first:
        engines()
    new.core.gateway_hello("g1", [known], new.now)
    new.core.finished("g1", finish, new.now)
    new.take()
    if not ends_first:
        assert not new.rows, "two engines have not spoken yet"
        engines()
    row = new.row(request)
    assert (row.output_tokens, row.wasted_tokens, row.attempts) == (20, 2, 2)
    new.advance(30)
    assert len(new.rows) == 1 and not new.cell.orphans and not new.waste
    new.at_rest()


def test_a_later_try_whose_gateway_dies_before_it_names_it_makes_no_second_row() -> None:
    new, known = restarted_after_a_retry()
    request = known.ask.request_id
    new.engine_end(request, 15, attempt=2)
    new.core.gateway_hello("g1", [known], new.now)
    new.core.gateway_lost("g1", new.now)
    new.advance(2)
    new.engine_end(request, 7, attempt=1, finish="lost")
    new.advance(60)
    row = new.row(request)
    assert (row.outcome, row.output_tokens, row.wasted_tokens) == ("gateway_lost", 15, 7)
    assert new.cell.tenants["acme"].budget.spent == row.cost_nusd and not new.waste
    new.at_rest()


def test_a_client_side_waits_for_the_engine_that_has_spoken_up() -> None:
    """Seen: an engine spoke up shortly before its client's side was given up; the row said that the gateway was lost."""
    old = World(tenant("acme"))
    request = old.submit()
    new = World(tenant("acme"), orphan_wait_s=3.0)
    new.sent += old.sent
    new.core.finished("g1", Finish(request_id=request, outcome="completed", delivered={1: 20}), new.now)
    new.advance(5)
    new.engine_end(request, 20)
    new.advance(10)
    assert (new.row(request).outcome, new.row(request).output_tokens) == ("completed", 20)
    assert not new.cell.strays and not new.cell.orphans


def test_a_missed_try_whose_engine_is_gone_does_not_hold_the_row_for_ever() -> None:
    old = World(tenant("acme"))
    request = old.submit()
    new = World(tenant("acme"), lost_wait_s=5.0)
    new.sent += old.sent
    new.core.gateway_hello("g1", [Flight(old.cell.flights[request].ask, old.grant(request))], new.now)
    finish = Finish(request_id=request, outcome="completed", attempts=2, delivered={1: 5, 2: 15})
    new.core.finished("g1", finish, new.now)
    new.engine_end(request, 5, attempt=1, finish="lost")
    new.advance(6)
    assert (new.row(request).output_tokens, new.row(request).outcome) == (20, "completed")
    new.at_rest()


def test_an_earlier_try_of_an_adopted_request_is_on_its_bill() -> None:
    old = World(tenant("acme"))
    for number in range(2):
        old.replica("small", f"small-x{number}")
    request = old.submit()
    ask = old.cell.flights[request].ask
    old.retry(request, why="replica_lost", emitted=5)
    new = restarted(old)
    new.core.gateway_hello("g1", [Flight(ask, old.grant(request))], new.now)
    new.take()
    new.engine_end(request, 7, attempt=1, finish="lost")
    new.engine_end(request, 15, attempt=2)
    new.client_end(request, attempts=2, delivered={1: 5, 2: 15})
    row = new.row(request)
    assert (row.output_tokens, row.wasted_tokens) == (20, 2)
    new.at_rest()


def refused_codes(world: World, request: str) -> list[str]:
    return [
        message.refusal.code
        for _, message in world.sent
        if isinstance(message, Refused) and message.refusal.request_id == request
    ]


def test_a_refusal_that_was_lost_is_said_again_and_not_judged_again() -> None:
    from rungway.contracts import Quotas

    none = Quotas(requests_per_minute=0, tokens_per_minute=None, concurrent_requests=None, queue_max=10)
    world = World(tenant("acme", quotas=none))
    ask: Ask = world.ask()
    world.core.submit(ask, world.now)
    world.take()
    world.core.gateway_hello("g1", [Flight(ask)], world.now)
    world.take()
    assert refused_codes(world, ask.request_id) == ["requests_per_minute"] * 2
    assert len(world.rows) == 1


def test_a_long_queue_of_a_lower_class_makes_no_deadline_of_a_higher_one_unreachable() -> None:
    from rungway.contracts import TenantClass

    world = World(tenant("acme"), tenant("bulk", tenant_class=TenantClass.BATCH))
    running = [world.submit("bulk") for _ in range(4)]
    waiting = [world.submit("bulk", output_bound=2000, prompt=100) for _ in range(40)]
    for request in running:
        world.advance(0.5)
        world.complete(request)
    assert waiting
    pool = world.cell.pools["small"]
    assert pool.expected_wait_s(world.cell.tenants["bulk"], 2, world.mono_ns, late=True) > 5.0
    assert pool.expected_wait_s(world.cell.tenants["acme"], 0, world.mono_ns) == 0.0
    urgent = world.submit("acme", deadline_ms=3000.0)
    assert refused_codes(world, urgent) == []


def test_what_can_not_end_by_its_deadline_is_not_begun() -> None:
    """Four slots are taken; the fifth needs 20 tokens x 5 ms and has 200 ms: after 100 ms of waiting it is too late."""
    world = World(tenant("acme"))
    running = [world.submit() for _ in range(4)]
    late = world.submit(deadline_ms=200.0)
    world.advance(0.15)
    assert refused_codes(world, late) == ["deadline_unreachable"]
    for request in running:
        world.complete(request)
    world.at_rest()
