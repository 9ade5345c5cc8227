"""The replica server over real channels, with a controller and gateways played by the test."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from rungway.channel import Client, Server
from rungway.contracts import ChannelSpec, FakeSpec, Price, TierKind, Version
from rungway.engine.chain import chain_keys, word_ids
from rungway.engine.fake import FakeEngine
from rungway.engine.protocol import Delta, EmbedInput, Engine, Sampling, Work
from rungway.errors import ModelError
from rungway.messages import (
    AttemptAck,
    AttemptEnded,
    Cancel,
    Deltas,
    Evict,
    Message,
    ReplicaHello,
    Report,
    Start,
    ToController,
)
from rungway.policies.prefixes import HeldPrefixes
from rungway.replica.build import build_engine
from rungway.replica.ends import Ends
from rungway.replica.server import ReplicaServer
from rungway.types import AttemptEnd, Billing

SPEC = ChannelSpec(heartbeat_ms=50, lost_after_ms=1500)
WAIT_S = 60.0
_names = itertools.count()


def version(**more: Any) -> Version:
    fields: dict[str, Any] = {
        "name": "fake",
        "tier": "small",
        "model": "none",
        "backend": "fake",
        "replicas_min": 1,
        "replicas_max": 1,
        "replica_cost_nusd_per_hour": 1,
        "max_num_seqs": 16,
        "max_context": 4096,
        "fake": FakeSpec(ttft_ms=2, tpot_ms=2),
    }
    return Version(**(fields | more))


def billing(tenant: str = "acme") -> Billing:
    return Billing(
        tenant=tenant,
        key_id="k",
        tenant_class="standard",
        risk="normal",
        action="read",
        model="auto",
        tier="small",
        version="fake",
        rung=0,
        degraded=(),
        reason="",
        price=Price(input=1, cached_input=1, output=1),
        gateway_id="g",
        received_wall_ns=1,
    )


def start(request_id: str, text: str = "say something", *, attempt: int = 1, max_tokens: int = 8, n: int = 1) -> Start:
    sampling = Sampling(max_tokens=max_tokens)
    work = Work(
        request_id=request_id,
        attempt=attempt,
        prompt_ids=[],
        prompt_text=text,
        sampling=sampling,
        sequences=n,
        share="acme-share",
    )
    return Start(work, billing())


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await asyncio.sleep(0.005)


class Controller:
    def __init__(self) -> None:
        self.acks = True
        self.got: list[Message] = []
        self.lost: list[str] = []
        self.server = Server("127.0.0.1", SPEC, ToController, self._on_message, self.lost.append)

    async def resolve(self) -> str:
        return self.server.address

    def _on_message(self, peer: str, message: Message) -> None:
        self.got.append(message)
        if isinstance(message, AttemptEnded) and self.acks:
            self.server.send(peer, AttemptAck([(message.end.request_id, message.end.attempt)]))

    @property
    def ends(self) -> list[AttemptEnd]:
        return [message.end for message in self.got if isinstance(message, AttemptEnded)]

    def end_of(self, request_id: str) -> list[AttemptEnd]:
        return [end for end in self.ends if end.request_id == request_id]

    @property
    def hellos(self) -> list[ReplicaHello]:
        return [message for message in self.got if isinstance(message, ReplicaHello)]

    @property
    def reports(self) -> list[Report]:
        return [message for message in self.got if isinstance(message, Report)]


class Gateway:
    def __init__(self, address: str) -> None:
        self.messages: list[list[Delta]] = []
        self._address = address
        self._client = Client(
            f"gateway-{next(_names)}", self._resolve, SPEC, Deltas, self._take, lambda: None, lambda: None
        )

    async def _resolve(self) -> str:
        return self._address

    def _take(self, message: Message) -> None:
        assert isinstance(message, Deltas)
        self.messages.append(message.deltas)

    async def up(self) -> Gateway:
        await self._client.start()
        await until(lambda: self._client.connected)
        return self

    def send(self, *messages: Message) -> None:
        for message in messages:
            self._client.send(message)

    async def down(self) -> None:
        await self._client.stop()

    def of(self, request_id: str) -> list[Delta]:
        return [delta for message in self.messages for delta in message if delta.request_id == request_id]

    def tokens(self, request_id: str) -> int:
        return sum(len(delta.token_ids) for delta in self.of(request_id))

    def last(self, request_id: str) -> Delta | None:
        return next((delta for delta in self.of(request_id) if delta.usage is not None), None)


class Rig:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.controller = Controller()
        self.replicas: list[ReplicaServer] = []
        self.gateways: list[Gateway] = []

    async def replica(self, engine: Engine | None = None, name: str = "small/fake/1", **more: Any) -> ReplicaServer:
        settings = version(**more)
        server = ReplicaServer(
            engine=engine or build_engine(settings, self.folder),
            replica_id=name,
            version=settings,
            resolve_controller=lambda: self.controller.resolve(),
            channel=SPEC,
            state_dir=self.folder,
        )
        self.replicas.append(server)
        await server.start()
        return server

    async def gateway(self, server: ReplicaServer) -> Gateway:
        gateway = await Gateway(server.address).up()
        self.gateways.append(gateway)
        return gateway

    def tables(self) -> list[Path]:
        return sorted((self.folder / "engine").glob("*.table"))


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    built = Rig(tmp_path)
    await built.controller.server.start()
    yield built
    for gateway in built.gateways:
        await gateway.down()
    for replica in built.replicas:
        await replica.stop()
    await built.controller.server.stop()


async def test_a_request_from_start_to_acknowledged_end(rig: Rig) -> None:
    server = await rig.replica()
    gateway = await rig.gateway(server)
    assert server.healthy()
    gateway.send(start("r", "one two three", n=2))
    await until(lambda: rig.controller.ends and rig.controller.reports)
    deltas = gateway.of("r")
    assert sum(len(delta.token_ids) for delta in deltas) == 16
    assert [delta.usage for delta in deltas if delta.usage] == [deltas[-1].usage]
    (end,) = rig.controller.ends
    assert (end.finish, end.replica_id, end.billing) == ("length", "small/fake/1", billing())
    assert (end.usage.prompt_tokens, end.usage.output_tokens) == (3, 16)
    assert end.started_wall_ns <= end.ended_wall_ns
    info = rig.controller.hellos[0].info
    assert (info.address, info.tier, info.version, info.state) == (server.address, "small", "fake", "ready")
    assert (info.max_num_seqs, info.kv_tokens) == (16, 4096 * 16)
    await server.stop()
    assert not server.healthy()
    assert rig.tables() == []


async def test_one_message_per_step_and_gateway(rig: Rig) -> None:
    server = await rig.replica()
    one, two = await rig.gateway(server), await rig.gateway(server)
    one.send(*(start(f"a{n}", max_tokens=20) for n in range(5)))
    two.send(start("b", max_tokens=20))
    await until(lambda: len(rig.controller.ends) == 6)
    assert all(delta.request_id.startswith("a") for message in one.messages for delta in message)
    assert all(delta.request_id == "b" for message in two.messages for delta in message)
    assert max(len(message) for message in one.messages) >= 4


async def test_reports_carry_progress_and_stats(rig: Rig) -> None:
    server = await rig.replica()
    gateway = await rig.gateway(server)
    gateway.send(start("r", max_tokens=300))
    await until(lambda: rig.controller.ends)
    seen = [tokens for report in rig.controller.reports for name, _, tokens in report.progress if name == "r"]
    assert len(seen) >= 2 and seen == sorted(set(seen))
    assert any(report.stats.running == 1 for report in rig.controller.reports)


async def test_reports_tell_what_the_prefix_cache_holds_and_a_new_controller_hears_all_of_it(rig: Rig) -> None:
    server = await rig.replica(fake=FakeSpec(ttft_ms=2, tpot_ms=2, prefix_cache=True))
    gateway = await rig.gateway(server)
    words = " ".join(f"w{at}" for at in range(40))
    gateway.send(start("r1", words))
    await until(lambda: rig.controller.end_of("r1"))
    expected = chain_keys("acme-share", word_ids(words), 16)

    def held() -> HeldPrefixes:
        picture = HeldPrefixes()
        for report in rig.controller.reports:
            if report.prefixes is not None:
                picture.apply(report.prefixes.full, report.prefixes.added, report.prefixes.removed)
        return picture

    await until(lambda: held().leading(expected) == 2)
    told = [report.prefixes for report in rig.controller.reports if report.prefixes is not None]
    assert [news.full for news in told] == [True] + [False] * (len(told) - 1)
    await rig.controller.server.stop()
    rig.controller = Controller()
    await rig.controller.server.start()
    await until(lambda: held().leading(expected) == 2)


async def test_a_duplicate_start_is_ignored_while_running_and_after(rig: Rig) -> None:
    server = await rig.replica()
    gateway = await rig.gateway(server)
    gateway.send(start("r"), start("r"))
    await until(lambda: rig.controller.ends)
    gateway.send(start("r"), start("other"))
    await until(lambda: rig.controller.end_of("other"))
    assert len(rig.controller.end_of("r")) == 1
    assert gateway.tokens("r") == 8


async def test_cancel_is_idempotent_and_reports_usage(rig: Rig) -> None:
    server = await rig.replica()
    gateway = await rig.gateway(server)
    gateway.send(start("r", "x [[hang=3]]"))
    await until(lambda: gateway.tokens("r") == 3)
    gateway.send(Cancel("r"), Cancel("r"), Cancel("never heard of"))
    await until(lambda: rig.controller.ends)
    gateway.send(Cancel("r"), start("next"))
    await until(lambda: rig.controller.end_of("next"))
    (end,) = rig.controller.end_of("r")
    assert (end.finish, end.usage.output_tokens) == ("cancelled", 3)


async def test_a_start_cancelled_before_it_came_does_not_run(rig: Rig) -> None:
    server = await rig.replica()
    gateway = await rig.gateway(server)
    gateway.send(Cancel("r"), start("r", n=2))
    await until(lambda: gateway.last("r"))
    assert [(d.finish, d.token_ids) for d in gateway.of("r")] == [("cancelled", [])] * 2
    await until(lambda: rig.controller.end_of("r"))
    (end,) = rig.controller.end_of("r")
    assert (end.finish, end.usage.prompt_tokens, end.usage.output_tokens) == ("cancelled", 0, 0)
    gateway.send(start("r", attempt=2))  # a later attempt is a decision of its own
    await until(lambda: len(rig.controller.end_of("r")) == 2)
    assert rig.controller.end_of("r")[1].finish == "length"


async def test_evict_ends_with_an_error_that_says_so(rig: Rig) -> None:
    server = await rig.replica()
    gateway = await rig.gateway(server)
    gateway.send(start("r", "x [[hang=1]]"))
    await until(lambda: gateway.of("r") and rig.controller.server.peers())
    rig.controller.server.send("small/fake/1", Evict("r"))
    rig.controller.server.send("small/fake/1", Evict("early"))
    await until(lambda: rig.controller.end_of("r"))
    last = gateway.last("r")
    assert last is not None and (last.finish, last.error) == ("error", "evicted")
    assert (rig.controller.ends[0].finish, rig.controller.ends[0].usage.output_tokens) == ("error", 1)
    gateway.send(start("early"))
    await until(lambda: gateway.last("early"))
    early = gateway.last("early")
    assert early is not None and early.error == "evicted"


async def test_a_new_attempt_waits_for_the_end_of_the_old_one(rig: Rig) -> None:
    server = await rig.replica()
    gateway = await rig.gateway(server)
    gateway.send(start("r", "x [[hang=2]]"))
    await until(lambda: gateway.of("r"))
    gateway.send(Cancel("r"), start("r", "x y z", attempt=2))
    await until(lambda: len(rig.controller.ends) == 2)
    assert [(end.attempt, end.finish) for end in rig.controller.ends] == [(1, "cancelled"), (2, "length")]
    gateway.send(start("s", "x [[hang]]"), start("s", "x", attempt=2))
    await until(lambda: len(rig.controller.end_of("s")) == 2)
    assert [(end.attempt, end.finish) for end in rig.controller.end_of("s")] == [(1, "cancelled"), (2, "length")]


async def test_a_lost_gateway_frees_its_work_and_is_still_billed(rig: Rig) -> None:
    engine = build_engine(version(), rig.folder)
    server = await rig.replica(engine)
    gone, stays = await rig.gateway(server), await rig.gateway(server)
    gone.send(start("a", "x [[hang=2]]"), start("b", "x [[hang=2]]"))
    stays.send(start("c", "x [[hang=2]]"))
    await until(lambda: gone.tokens("a") == gone.tokens("b") == stays.tokens("c") == 2)
    await gone.down()
    await until(lambda: len(rig.controller.ends) == 2)
    assert {(end.request_id, end.finish, end.usage.output_tokens) for end in rig.controller.ends} == {
        ("a", "cancelled", 2),
        ("b", "cancelled", 2),
    }
    assert engine.stats().running == 1


async def test_ends_are_sent_until_acknowledged_also_by_a_new_controller(rig: Rig) -> None:
    server = await rig.replica()
    gateway = await rig.gateway(server)
    rig.controller.acks = False
    gateway.send(start("r"), start("h", "x [[hang=1]]"))
    await until(lambda: len(rig.controller.end_of("r")) >= 2)
    first = rig.controller
    rig.controller = Controller()
    await rig.controller.server.start()
    server._link._client._resolve = rig.controller.resolve  # what Ray does when it restarts the controller elsewhere
    await first.server.stop()
    await until(lambda: rig.controller.end_of("r") and rig.controller.hellos)
    assert rig.controller.hellos[0].running == [("h", 1)]
    assert rig.controller.end_of("r")[0] == first.end_of("r")[0]
    count = len(rig.controller.end_of("r"))
    await until(lambda: len(rig.controller.reports) >= 13)  # more than the resend interval
    assert len(rig.controller.end_of("r")) == count


async def test_draining_refuses_new_work_and_lets_the_rest_end(rig: Rig) -> None:
    server = await rig.replica()
    gateway = await rig.gateway(server)
    gateway.send(start("r", max_tokens=150))
    await until(lambda: gateway.of("r"))
    drain = asyncio.create_task(server.drain(WAIT_S))
    await until(lambda: any(report.draining for report in rig.controller.reports))
    gateway.send(start("late"))
    await asyncio.wait_for(drain, WAIT_S)
    await until(lambda: gateway.last("late") and gateway.last("r"))
    late, done = gateway.last("late"), gateway.last("r")
    assert late is not None and (late.finish, late.error) == ("error", "draining")
    assert done is not None and (done.finish, done.usage and done.usage.output_tokens) == ("length", 150)
    assert {end.request_id: end.finish for end in rig.controller.ends} == {"r": "length", "late": "error"}
    assert rig.tables() == []


async def test_a_drain_that_runs_out_of_time_cancels(rig: Rig) -> None:
    server = await rig.replica()
    gateway = await rig.gateway(server)
    gateway.send(start("r", "x [[hang=1]]"))
    await until(lambda: gateway.of("r"))
    await server.drain(0.05)
    await until(lambda: gateway.last("r"))
    assert [(end.finish, end.usage.output_tokens) for end in rig.controller.ends] == [("cancelled", 1)]


async def test_an_engine_that_raises_makes_the_replica_unhealthy_and_settles_all(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = build_engine(version(), rig.folder)
    server = await rig.replica(engine)
    gateway = await rig.gateway(server)
    gateway.send(start("old", "x [[hang=2]]"))
    await until(lambda: gateway.tokens("old") == 2)

    def broken(work: Work) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(engine, "submit", broken)
    gateway.send(start("new"), start("after"))
    await until(lambda: len(rig.controller.ends) == 3)
    assert not server.healthy()
    assert {(end.request_id, end.finish, end.usage.output_tokens) for end in rig.controller.ends} == {
        ("old", "error", 2),
        ("new", "error", 0),
        ("after", "error", 0),
    }
    assert all((last := gateway.last(name)) and last.error == "engine_failed" for name in ("old", "new", "after"))


async def test_a_dead_step_thread_makes_the_replica_unhealthy(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = build_engine(version(), rig.folder)
    server = await rig.replica(engine)
    gateway = await rig.gateway(server)
    gateway.send(start("r", "x [[hang=1]]"))
    await until(lambda: gateway.of("r"))
    monkeypatch.setattr(engine, "check", lambda: ["the engine's thread has died"])
    await until(lambda: rig.controller.ends)
    assert not server.healthy()
    assert (rig.controller.ends[0].finish, rig.controller.ends[0].usage.output_tokens) == ("error", 1)


async def test_without_room_for_accounting_no_work_is_taken(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    server = await rig.replica()
    gateway = await rig.gateway(server)
    monkeypatch.setattr(Ends, "full", True)
    gateway.send(start("r", n=2))
    await until(lambda: gateway.last("r") and rig.controller.ends)
    assert [(delta.finish, delta.error) for delta in gateway.of("r")] == [("error", "accounting_full")] * 2
    assert (rig.controller.ends[0].finish, rig.controller.ends[0].usage.output_tokens) == ("error", 0)
    assert server.healthy()


async def test_a_fake_that_fails_at_start_does_not_register(rig: Rig) -> None:
    with pytest.raises(RuntimeError, match="set to fail"):
        await rig.replica(fake=FakeSpec(fail="start"))
    assert rig.controller.got == []


async def test_unacknowledged_ends_of_a_stopped_replica_are_the_next_ones_to_report(rig: Rig) -> None:
    server = await rig.replica()
    gateway = await rig.gateway(server)
    rig.controller.acks = False
    gateway.send(start("r"))
    await until(lambda: rig.controller.ends)
    await server.stop()
    assert len(rig.tables()) == 1
    rig.controller.got.clear()
    rig.controller.acks = True
    await rig.replica(name="small/fake/2")
    await until(lambda: rig.controller.ends and len(rig.tables()) == 1)
    (end,) = rig.controller.ends
    assert (end.request_id, end.finish, end.replica_id) == ("r", "length", "small/fake/1")


VICTIM = textwrap.dedent(
    """
    import asyncio, sys
    from pathlib import Path
    from test_replica_server import SPEC, Controller, build_engine, version
    from rungway.contracts import TierKind
    from rungway.replica.server import ReplicaServer
    async def main():
        async def resolve():
            return sys.argv[2]
        mine = version(kind=TierKind(sys.argv[3]))
        server = ReplicaServer(engine=build_engine(mine, Path(sys.argv[1])), replica_id="small/fake/victim",
                               version=mine, resolve_controller=resolve, channel=SPEC, state_dir=Path(sys.argv[1]))
        await server.start()
        await asyncio.sleep(60)
    asyncio.run(main())
    """
)


def spawn_victim(rig: Rig, kind: str = "text") -> subprocess.Popen[bytes]:
    path = os.pathsep.join([*sys.path, str(Path(__file__).parent)])
    command = [sys.executable, "-c", VICTIM, str(rig.folder), rig.controller.server.address, kind]
    return subprocess.Popen(command, env={**os.environ, "PYTHONPATH": path})


async def test_a_killed_replica_is_settled_by_the_next_one(rig: Rig) -> None:
    """kill -9 in mid-stream: what was emitted is reported as lost, with the emitted count, once."""
    child = spawn_victim(rig)
    try:
        await until(lambda: rig.controller.hellos)
        victim = await Gateway(rig.controller.hellos[0].info.address).up()
        rig.gateways.append(victim)
        victim.send(start("r", "one two [[hang=5]]"), start("waiting", "x [[hang]]"))
        await until(lambda: victim.tokens("r") == 5)
    finally:
        child.send_signal(signal.SIGKILL)
        assert child.wait(WAIT_S) == -signal.SIGKILL
    await asyncio.gather(rig.replica(name="small/fake/1"), rig.replica(name="small/fake/2"))
    await until(lambda: len(rig.controller.ends) >= 2 and len(rig.tables()) == 2)
    ends = {end.request_id: end for end in rig.controller.ends}
    assert len(rig.controller.ends) == 2
    assert (ends["r"].finish, ends["r"].replica_id, ends["r"].attempt) == ("lost", "small/fake/victim", 1)
    assert (ends["r"].usage.prompt_tokens, ends["r"].usage.output_tokens) == (3, 5)
    assert (ends["waiting"].finish, ends["waiting"].usage.output_tokens) == ("lost", 0)


def embed_start(request_id: str, *texts: str) -> Start:
    inputs = [EmbedInput([], text) for text in texts]
    fields = {"prompt_ids": [], "prompt_text": "", "sampling": Sampling(max_tokens=0), "share": "acme"}
    work = Work(request_id=request_id, attempt=1, sequences=len(texts), kind="embed", inputs=inputs, **fields)
    return Start(work, billing())


async def test_embeddings_are_counted_as_their_vectors_leave(rig: Rig) -> None:
    server = await rig.replica(kind=TierKind.EMBEDDING)
    gateway = await rig.gateway(server)
    gateway.send(embed_start("whole", "one two", "three"), embed_start("cut", "one two", "[[hang]] x"), start("text"))
    await until(lambda: len([delta for delta in gateway.of("cut") if delta.vector is not None]) == 1)
    gateway.send(Cancel("cut"))
    await until(lambda: len(rig.controller.ends) == 3)
    ends = {
        end.request_id: (end.finish, end.usage.prompt_tokens, end.usage.output_tokens) for end in rig.controller.ends
    }
    assert ends == {"whole": ("stop", 3, 0), "cut": ("cancelled", 2, 0), "text": ("error", 0, 0)}
    assert server.healthy() and rig.tables()


async def test_a_killed_replica_owes_the_tokens_of_the_vectors_that_left(rig: Rig) -> None:
    child = spawn_victim(rig, "embedding")
    try:
        await until(lambda: rig.controller.hellos)
        victim = await Gateway(rig.controller.hellos[0].info.address).up()
        rig.gateways.append(victim)
        victim.send(embed_start("r", "one two three", "[[hang]]"), embed_start("waiting", "[[hang]]"))
        await until(lambda: any(delta.vector is not None for delta in victim.of("r")))
    finally:
        child.send_signal(signal.SIGKILL)
        assert child.wait(WAIT_S) == -signal.SIGKILL
    await rig.replica(name="small/fake/1")
    await until(lambda: len(rig.controller.ends) >= 2)
    ends = {end.request_id: (end.finish, end.usage.prompt_tokens) for end in rig.controller.ends}
    assert ends == {"r": ("lost", 3), "waiting": ("lost", 0)}


def test_build_engine_says_what_it_cannot_build(tmp_path: Path) -> None:
    assert isinstance(build_engine(version(), tmp_path), FakeEngine)
    with pytest.raises(ModelError, match=r"small/fake: .*no-such-model"):
        build_engine(version(backend="native", model=f"path:{tmp_path}/no-such-model"), tmp_path)
    with pytest.raises(ModelError, match="vllm is not part of this build"):
        build_engine(version(backend="vllm"), tmp_path)
    with pytest.raises(ModelError, match="small/fake: fake: fail must be"):
        build_engine(version(fake=FakeSpec(fail="often")), tmp_path)
