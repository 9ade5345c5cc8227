"""The controller as a process: held sends wait for the commit, quotas survive a restart, queries confine tenants."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from control.harness import World, billed, platform, tenant
from rungway.channel import Client
from rungway.contracts import Budget, Platform, Quotas
from rungway.control import queries, service
from rungway.control.service import ControllerService, with_running_engines
from rungway.engine.protocol import EngineStats
from rungway.ledger import writer
from rungway.messages import (
    Answer,
    AttemptAck,
    AttemptEnded,
    FinishAck,
    Finished,
    GatewayHello,
    Granted,
    Message,
    Query,
    Refused,
    ReplicaHello,
    ReplicaInfo,
    Report,
    Submit,
    ToGateway,
    ToReplica,
)
from rungway.types import Ask, AttemptEnd, Finish, Grant, Usage

WAIT_S = 60.0


class Peer:
    """A gateway or replica of the test's own, on a real channel."""

    def __init__(self, name: str, service: ControllerService, accept: Any, hello: Message) -> None:
        async def resolve() -> str:
            return service.address

        self.seen: list[Message] = []
        self.client = Client(name, resolve, service.platform.channel, accept, self.seen.append, self._up, lambda: None)
        self.hello = hello

    def _up(self) -> None:
        self.client.send(self.hello)

    async def wait(self, kind: type[Message], count: int = 1) -> list[Any]:
        async with asyncio.timeout(WAIT_S):
            while sum(isinstance(m, kind) for m in self.seen) < count:
                await asyncio.sleep(0.005)
        return [m for m in self.seen if isinstance(m, kind)]


class Cellar:
    """A controller with one gateway and one replica peer."""

    def __init__(self, config: Platform) -> None:
        self.config = config

    async def start(self) -> None:
        self.service = ControllerService(self.config, None, Path(self.config.state_dir))
        await self.service.start()
        self.gateway = Peer("g1", self.service, ToGateway, GatewayHello("g1", []))
        info = ReplicaInfo("small-r1", "tcp://127.0.0.1:1", "small", "small-v1", 4, 100_000)
        self.replica = Peer("small-r1", self.service, ToReplica, ReplicaHello(info, []))
        await self.gateway.client.start()
        await self.replica.client.start()
        async with asyncio.timeout(WAIT_S):
            while "small-r1" not in self.service.core.cell.replicas or not self.service.core.cell.gateways:
                await asyncio.sleep(0.005)

    async def stop(self) -> None:
        await self.gateway.client.stop()
        await self.replica.client.stop()
        await self.service.stop()

    def ask(self, number: int, **changes: Any) -> Ask:
        world = World(tenant("acme"))
        return msgspec.structs.replace(world.ask(), request_id=f"q{number}", **changes)

    def report(self) -> None:
        self.replica.client.send(Report("small-r1", EngineStats(0, 0, 0, 100, 100, 0), []))

    async def serve(self, number: int, output: int = 20) -> Grant:
        self.report()
        self.gateway.client.send(Submit(self.ask(number)))
        grants = await self.gateway.wait(Granted, number)
        grant: Grant = grants[-1].grant
        self.replica.client.send(AttemptEnded(ended(grant, self, output)))
        self.gateway.client.send(
            Finished(
                Finish(request_id=grant.request_id, outcome="completed", attempts=1, delivered={1: output}, ttft_ms=3.0)
            )
        )
        await self.gateway.wait(FinishAck, number)
        return grant

    async def query(self, name: str, *, who: str = "platform", admin: bool = True, **args: object) -> tuple[int, Any]:
        query_id = len(self.gateway.seen) + 1000
        self.gateway.client.send(Query(query_id, name, json.dumps(args).encode(), who, admin))
        async with asyncio.timeout(WAIT_S):
            while True:
                for message in self.gateway.seen:
                    if isinstance(message, Answer) and message.query_id == query_id:
                        text = message.body.decode()
                        return message.status, json.loads(text) if message.content_type.startswith("app") else text
                await asyncio.sleep(0.005)


def ended(grant: Grant, cellar: Cellar, output: int = 20) -> AttemptEnd:
    return AttemptEnd(
        request_id=grant.request_id,
        attempt=1,
        replica_id="small-r1",
        usage=Usage(prompt_tokens=10, output_tokens=output),
        finish="stop",
        billing=billed(grant),
        started_wall_ns=1,
        ended_wall_ns=cellar.service.core.cell.tenants["acme"].budget.bounds[0] + 1,
    )


def config(state_dir: Path, **changes: Any) -> Platform:
    quotas = Quotas(requests_per_minute=3, tokens_per_minute=1000, concurrent_requests=None, queue_max=10)
    acme = tenant("acme", quotas=quotas, budget=Budget(nusd=10_000_000_000), **changes)
    return msgspec.structs.replace(platform(acme, tenant("beta")), state_dir=str(state_dir))


@pytest.fixture
async def cellar(tmp_path: Path) -> AsyncIterator[Cellar]:
    running = Cellar(config(tmp_path))
    await running.start()
    yield running
    await running.stop()


async def test_a_request_is_settled_and_both_sides_are_acknowledged_after_the_commit(cellar: Cellar) -> None:
    await cellar.serve(1)
    await cellar.replica.wait(AttemptAck)
    row = cellar.service.reader.row("q1")
    assert row is not None and (row.outcome, row.output_tokens) == ("completed", 20)
    status, truth = await cellar.query("engine_truth", since=0)
    assert status == 200 and truth["totals"]["output_tokens"] == 20 and truth["reconcile"]["ok"]


async def test_a_repeated_end_is_not_acknowledged_before_the_row_of_the_first(
    cellar: Cellar, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "GATHER_S", 10 * WAIT_S)  # the disk takes longer than the test may last
    cellar.report()
    cellar.gateway.client.send(Submit(cellar.ask(1)))
    grant = (await cellar.gateway.wait(Granted))[0].grant
    cellar.replica.client.send(AttemptEnded(ended(grant, cellar)))
    finish = Finished(Finish(request_id="q1", outcome="completed", attempts=1, delivered={1: 20}))
    cellar.gateway.client.send(finish)
    async with asyncio.timeout(WAIT_S):
        while "q1" not in cellar.service.core.cell.settled:
            await asyncio.sleep(0.005)
    cellar.gateway.client.send(finish)  # a turn that writes nothing
    cellar.gateway.client.send(Submit(cellar.ask(2)))
    await cellar.gateway.wait(Granted, 2)
    assert cellar.service.reader.row("q1") is None
    assert not any(isinstance(message, FinishAck) for message in cellar.gateway.seen)
    cellar.service.writer.hurry()
    await cellar.gateway.wait(FinishAck, 2)
    assert cellar.service.reader.row("q1") is not None


async def test_a_replica_that_was_cut_off_says_what_it_runs(cellar: Cellar) -> None:
    cellar.report()
    cellar.gateway.client.send(Submit(cellar.ask(1)))
    await cellar.gateway.wait(Granted)
    await cellar.replica.client.stop()
    cell = cellar.service.core.cell
    async with asyncio.timeout(WAIT_S):
        while cell.replicas:
            await asyncio.sleep(0.005)
    cellar.replica = Peer(
        "small-r1", cellar.service, ToReplica, msgspec.structs.replace(cellar.replica.hello, running=[("q1", 1)])
    )
    await cellar.replica.client.start()
    async with asyncio.timeout(WAIT_S):
        while not cell.replicas:
            await asyncio.sleep(0.005)
    assert cell.pools["small"].views["small-r1"].running == 1


async def test_quotas_and_budget_survive_a_restart(tmp_path: Path) -> None:
    first = Cellar(config(tmp_path))
    await first.start()
    for number in (1, 2, 3):
        await first.serve(number)
    spent = first.service.core.cell.tenants["acme"].budget.spent
    await first.stop()
    second = Cellar(config(tmp_path))
    await second.start()
    try:
        assert second.service.core.cell.tenants["acme"].budget.spent == spent > 0
        second.report()
        second.gateway.client.send(Submit(second.ask(9)))
        refused = await second.gateway.wait(Refused)
        assert refused[0].refusal.code == "requests_per_minute"
    finally:
        await second.stop()


async def test_output_found_after_the_bill_is_added_as_waste(cellar: Cellar) -> None:
    grant = await cellar.serve(1)
    late = AttemptEnd(
        request_id=grant.request_id,
        attempt=7,
        replica_id="gone",
        usage=Usage(prompt_tokens=10, output_tokens=5),
        finish="lost",
        billing=billed(grant),
        started_wall_ns=1,
        ended_wall_ns=2,
    )
    cellar.replica.client.send(AttemptEnded(late))
    await cellar.replica.wait(AttemptAck, 2)
    row = cellar.service.reader.row("q1")
    assert row is not None and (row.output_tokens, row.wasted_tokens) == (20, 5)
    assert cellar.service.reader.reconcile()["ok"]


async def test_a_tenant_sees_only_itself(cellar: Cellar) -> None:
    await cellar.serve(1)
    _, mine = await cellar.query("usage", who="acme", admin=False, tenant="beta")
    assert mine["tenant"] == "acme" and mine["totals"]["requests"] == 1
    _, other = await cellar.query("usage", who="beta", admin=False, tenant="acme")
    assert other["totals"]["requests"] == 0
    status, _ = await cellar.query("decision", who="beta", admin=False, request_id="q1")
    assert status == 404
    status, shown = await cellar.query("decision", who="acme", admin=False, request_id="q1")
    assert status == 200 and shown["request"]["decision"]["reason"] == "ok"
    for name in ("pools", "config", "reload", "engine_truth", "ladder_set", "audit_verify"):
        assert (await cellar.query(name, who="acme", admin=False))[0] == 403
    _, live = await cellar.query("live", who="beta", admin=False)
    assert set(live["tenants"]) == {"beta"}


async def test_a_query_finds_what_was_settled_before_it(cellar: Cellar, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(1, 4):
        await cellar.serve(number)
    monkeypatch.setattr(writer, "GATHER_S", 10 * WAIT_S)  # rows would stay away far longer than the test may last
    monkeypatch.setattr(service, "WRITTEN_S", WAIT_S)
    cellar.gateway.client.send(Submit(cellar.ask(4)))
    await cellar.gateway.wait(Refused)
    _, usage = await cellar.query("usage", who="acme", admin=False)
    assert usage["totals"]["requests"] == 4


async def test_a_repeated_end_is_acknowledged_no_sooner_than_its_row_is_on_disk(
    cellar: Cellar, monkeypatch: pytest.MonkeyPatch
) -> None:
    await cellar.serve(1)
    monkeypatch.setattr(writer, "GATHER_S", 10 * WAIT_S)
    cellar.gateway.client.send(Submit(cellar.ask(2)))
    await cellar.gateway.wait(Granted, 2)
    end = Finished(Finish(request_id="q2", outcome="client_cancelled"))  # never begun: its row is written at once
    for times in (1, 2):  # each in a turn of its own, and seen by then
        cellar.gateway.client.send(end)
        cellar.gateway.client.send(Submit(cellar.ask(2 + times, tenant="nobody")))
        await cellar.gateway.wait(Refused, times)

    def acknowledged() -> list[str]:
        return [name for m in cellar.gateway.seen if isinstance(m, FinishAck) for name in m.request_ids]

    assert acknowledged() == ["q1"] and cellar.service.reader.row("q2") is None
    await cellar.query("usage", who="acme", admin=False)
    await cellar.gateway.wait(FinishAck, 3)
    assert acknowledged() == ["q1", "q2", "q2"] and cellar.service.reader.row("q2") is not None


async def test_a_reload_remembers_who_was_here_before(cellar: Cellar) -> None:
    await cellar.serve(1)
    core, whole = cellar.service.core, cellar.config
    spent = core.cell.tenants["acme"].budget.spent
    without = msgspec.structs.replace(whole, tenants=tuple(t for t in whole.tenants if t.name != "acme"), digest="2")
    await cellar.service.adopt(without)
    assert "acme" not in core.cell.tenants
    await cellar.service.adopt(whole)
    assert core.cell.tenants["acme"].budget.spent == spent > 0
    assert core.cell.tenants["acme"].requests.remaining(0) == 2


async def test_bad_arguments_are_named(cellar: Cellar) -> None:
    for name, args, param in [
        ("usage", {"since": "x"}, "since"),
        ("usage", {"bucket": 0}, "bucket"),
        ("audit", {"limit": 10**9}, "limit"),
        ("ladder_set", {"rung": "nope"}, "rung"),
        ("ladder_set", {"rung": "defer", "pool": "nope"}, "pool"),
        ("ladder_set", {"rung": "defer", "tenant_class": "nope"}, "tenant_class"),
    ]:
        status, body = await cellar.query(name, **args)
        assert status == 400 and body["error"]["param"] == param, (name, args, body)
    assert "small_tier" in (await cellar.query("ladder_set", rung="nope"))[1]["error"]["message"]
    assert (await cellar.query("nonsense"))[0] == 404


@pytest.mark.parametrize("name", sorted(queries.HANDLERS.keys() - {"metrics", "config", "reload", "live", "pools"}))
async def test_no_argument_breaks_a_query(cellar: Cellar, name: str) -> None:
    """Whatever stands in a URL or a body, each query answers it, or names what is wrong with it."""
    shapes: list[object] = ["x", "", -1, 0, 1 << 40, 1 << 70, 1.5, True, ["x"], {"a": 1}, "9" * 5000, "\x00"]
    names = ["since", "until", "bucket", "limit", "after", "tenant", "kind", "order", "request_id"]
    names += ["pool", "tenant_class", "rung", "ttl_s", "why"]
    for argument in names:
        for shape in shapes:
            rest = {"rung": 1} if name == "ladder_set" else {}
            status, body = await cellar.query(name, **(rest | {argument: shape}))
            assert status in (200, 404) or (status == 400 and body["error"]["param"] == argument), (
                argument,
                shape,
                body,
            )


async def test_a_query_that_fails_is_answered(cellar: Cellar, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(**_: object) -> object:
        raise OSError("the database is gone")

    monkeypatch.setattr(cellar.service.reader, "usage", lost)
    status, body = await cellar.query("usage")
    assert (status, body["error"]["code"], body["error"]["type"]) == (500, "internal", "server_error")


async def test_an_override_is_audited_and_ends(cellar: Cellar) -> None:
    status, body = await cellar.query("ladder_set", rung="defer", pool="small", why="drill", ttl_s=60)
    assert status == 200 and body["changed"] == 6
    cellar.report()
    cellar.gateway.client.send(Submit(cellar.ask(1)))
    refused = await cellar.gateway.wait(Refused)
    assert refused[0].refusal.code == "deferred"
    await cellar.query("ladder_clear")
    _, ladder = await cellar.query("ladder")
    assert not any(scope["override"] for scope in ladder["scopes"])
    _, audit = await cellar.query("audit", kind="override")
    assert [row["detail"]["action"] for row in audit["data"]] == ["set", "clear"]
    assert (await cellar.query("audit_verify"))[1]["ok"]


async def test_metrics_are_parsable_and_bounded(cellar: Cellar) -> None:
    await cellar.serve(1)
    status, text = await cellar.query("metrics", who="", admin=False)
    assert status == 200
    assert 'rungway_requests_total{class="interactive",outcome="completed",tenant="acme",tier="small"} 1.0' in text
    assert 'rungway_rung{pool="small",tenant_class="interactive"} 0.0' in text
    cellar.service.metrics.increments(
        [("rungway_refused_total", (f"junk-{n}", "invalid_request"), 1.0) for n in range(500)]
    )
    _, text = await cellar.query("metrics")
    assert "junk" not in text and 'tenant="other"' in text


def test_a_reload_changes_prices_and_weights_but_not_running_engines() -> None:
    running = config(Path("state"))
    small = running.tier("small")
    changed = msgspec.structs.replace(small.versions[0], backend="native", model="path:/elsewhere", weight=0.25)
    price = msgspec.structs.replace(small.price, output=7)
    new_small = msgspec.structs.replace(small, price=price, versions=(changed,))
    loaded = msgspec.structs.replace(running, tiers=(new_small, running.tier("large")))
    kept = with_running_engines(loaded, running).tier("small")
    assert kept.price == price
    assert (kept.versions[0].backend, kept.versions[0].weight) == ("fake", 0.25)
