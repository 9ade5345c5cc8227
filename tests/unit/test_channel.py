"""Server and client over real sockets: loss, death, restarts, slow readers, foreign frames, encryption."""

from __future__ import annotations

import asyncio
import gc
import random
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import uvloop
import zmq

from rungway.channel import Client, CurveKeys, Server
from rungway.channel.frames import Kind, pack
from rungway.channel.port import Port
from rungway.contracts import ChannelSpec
from rungway.errors import ChannelError
from rungway.messages import Cancel

SPEC = ChannelSpec(heartbeat_ms=40, lost_after_ms=1500, window_batches=16, buffer_bytes_max=4_000_000)
ROOT = Path(__file__).parents[2]
WAIT_S = 60.0


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await asyncio.sleep(0.005)


class Pair:
    """A server and its clients, with everything that came out of them."""

    def __init__(self, spec: ChannelSpec = SPEC, curve: CurveKeys | None = None) -> None:
        self.spec, self.curve = spec, curve
        self.address = ""
        self.at_server: list[tuple[str, str]] = []
        self.at_client: list[str] = []
        self.events: list[str] = []
        self.batches = 0
        self.server: Server
        self.clients: list[Client] = []

    async def serve(self) -> Server:
        self.server = Server(
            "127.0.0.1", self.spec, Cancel, self._on_message, self._on_lost, self._on_batch, curve=self.curve
        )
        await self.server.start()
        self.address = self.server.address
        return self.server

    async def connect(self, name: str = "c", curve: CurveKeys | None = None, *, hello: bool = True) -> Client:
        def up() -> None:
            self.events.append(f"{name} up")
            if hello:
                client.send(Cancel("hello"))

        client = Client(
            name,
            self._resolve,
            self.spec,
            Cancel,
            lambda message: self.at_client.append(message.request_id),  # type: ignore[attr-defined]
            up,
            lambda: self.events.append(f"{name} lost"),
            curve=curve or self.curve,
        )
        self.clients.append(client)
        await client.start()
        return client

    async def stop(self) -> None:
        for client in self.clients:
            await client.stop()
        await self.server.stop()

    async def _resolve(self) -> str:
        return self.address

    def _on_message(self, peer: str, message: Any) -> None:
        self.at_server.append((peer, message.request_id))

    def _on_lost(self, peer: str) -> None:
        self.events.append(f"server lost {peer}")

    def _on_batch(self) -> None:
        self.batches += 1


@asynccontextmanager
async def pair(spec: ChannelSpec = SPEC, curve: CurveKeys | None = None) -> AsyncIterator[Pair]:
    both = Pair(spec, curve)
    await both.serve()
    try:
        yield both
    finally:
        await both.stop()
        left = asyncio.all_tasks() - {asyncio.current_task()}
        assert not left, left


@asynccontextmanager
async def raw_peer(address: str) -> AsyncIterator[zmq.Socket[bytes]]:
    """A socket that speaks frames by hand."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
    socket = context.socket(zmq.DEALER)
    socket.connect(address)
    try:
        yield socket
    finally:
        socket.close(linger=0)


def body(*texts: str) -> bytes:
    return msgspec.msgpack.encode([Cancel(text) for text in texts])


@pytest.mark.parametrize("seed", range(3))
async def test_exactly_once_in_order_both_ways_over_a_bad_link(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    rng = random.Random(seed)
    honest = Port.send
    loop = asyncio.get_running_loop()
    lost = 0

    def bad_send(port: Port, route: bytes, frame: bytes) -> bool:
        nonlocal lost
        for _ in range(2 if rng.random() < 0.1 else 1):
            if rng.random() < 0.15:
                lost += 1
            elif rng.random() < 0.3:
                loop.call_later(rng.random() * 0.05, lambda: port.closed or honest(port, route, frame))
            else:
                honest(port, route, frame)
        return True

    async with pair() as both:
        client = await both.connect()
        await until(lambda: len(both.server.peers()) == 1)
        monkeypatch.setattr(Port, "send", bad_send)
        for number in range(1500):
            client.send(Cancel(str(number)))
            both.server.send("c", Cancel(str(number)))
            if rng.random() < 0.2:
                await asyncio.sleep(rng.choice((0, 0, 0.002)))
        await until(lambda: len(both.at_server) >= 1501 and len(both.at_client) >= 1500)
        monkeypatch.setattr(Port, "send", honest)
        assert lost > 10
        assert both.at_server == [("c", "hello")] + [("c", str(number)) for number in range(1500)]
        assert both.at_client == [str(number) for number in range(1500)]
        assert both.events == ["c up"]


SERVER_PROGRAM = """
import asyncio
from rungway.channel import Server
from rungway.contracts import ChannelSpec
from rungway.messages import Cancel

async def main():
    spec = ChannelSpec(heartbeat_ms=40, lost_after_ms=1500)
    server = Server("127.0.0.1", spec, Cancel, lambda peer, m: server.send(peer, m), lambda peer: None)
    await server.start()
    print(server.address, flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""

CLIENT_PROGRAM = """
import asyncio, sys
from rungway.channel import Client
from rungway.contracts import ChannelSpec
from rungway.messages import Cancel

async def main():
    async def resolve():
        return sys.argv[1]
    spec = ChannelSpec(heartbeat_ms=40, lost_after_ms=1500)
    client = Client("child", resolve, spec, Cancel, lambda m: None, lambda: client.send(Cancel("hello")), lambda: None)
    await client.start()
    await asyncio.sleep(60)

asyncio.run(main())
"""


@asynccontextmanager
async def child(program: str, *args: str) -> AsyncIterator[asyncio.subprocess.Process]:
    path = "import sys; sys.path[:0] = ['platform', 'replicas']\n"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", path + program, *args, stdout=asyncio.subprocess.PIPE, cwd=ROOT
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def test_a_killed_server_is_noticed_once_and_its_successor_found() -> None:
    both = Pair()
    async with child(SERVER_PROGRAM) as first:
        assert first.stdout is not None
        both.address = (await asyncio.wait_for(first.stdout.readline(), WAIT_S)).decode().strip()
        client = await both.connect()
        await until(lambda: both.at_client == ["hello"])
        first.kill()
        await until(lambda: not client.connected)
    await until(lambda: "c lost" in both.events)
    with pytest.raises(ChannelError):
        client.send(Cancel("nobody there"))
    await both.serve()
    await until(lambda: both.at_server == [("c", "hello")])
    assert both.events == ["c up", "c lost", "c up"]
    await both.stop()


async def test_a_killed_client_is_noticed_once() -> None:
    async with pair() as both, child(CLIENT_PROGRAM, both.address) as process:
        await until(lambda: both.at_server == [("child", "hello")])
        process.kill()
        await until(lambda: both.events != [])
        await asyncio.sleep(0.2)
        assert both.events == ["server lost child"]
        assert both.server.peers() == []
        with pytest.raises(ChannelError):
            both.server.send("child", Cancel("x"))


async def test_a_restarted_server_at_another_port_is_found() -> None:
    async with pair() as both:
        client = await both.connect()
        await until(lambda: len(both.at_server) == 1)
        old = both.address
        await both.server.stop()
        await both.serve()
        assert both.address != old
        await until(lambda: len(both.at_server) == 2)
        client.send(Cancel("again"))
        both.server.send("c", Cancel("back"))
        await until(lambda: both.at_client == ["back"] and both.at_server[-1] == ("c", "again"))
        assert both.events == ["c up", "c lost", "c up"]


async def test_a_client_of_the_same_name_starts_a_new_life() -> None:
    async with pair() as both:
        await both.connect("same")
        await until(lambda: len(both.at_server) == 1)
        old, both.clients = both.clients[0], []
        await both.connect("same")
        await until(lambda: len(both.at_server) >= 2)
        assert "server lost same" in both.events
        assert both.server.peers() == ["same"]
        await old.stop()
        both.server.send("same", Cancel("to the living"))
        await until(lambda: both.at_client == ["to the living"])


async def test_a_peer_that_never_acknowledges_is_dropped_in_bounded_memory() -> None:
    spec = ChannelSpec(heartbeat_ms=40, lost_after_ms=60_000, window_batches=8, buffer_bytes_max=200_000)
    async with pair(spec) as both, raw_peer(both.address) as slow:
        await both.connect("quick")
        slow.send(pack(Kind.OPEN, 77, 0, 0, b"slow"))
        slow.send(pack(Kind.DATA, 77, 1, 0, body("hello")))
        await until(lambda: set(both.server.peers()) == {"quick", "slow"})
        taken = 0

        async def send_many() -> None:
            nonlocal taken
            for _ in range(10_000):
                both.server.send("slow", Cancel("x" * 1000))
                taken += 1
                if taken % 20 == 0:
                    slow.send(pack(Kind.BEAT, 77, 1, 0))
                    await asyncio.sleep(0)

        with pytest.raises(ChannelError, match="slow"):
            await send_many()
        assert 150 <= taken <= 200
        assert both.server.peers() == ["quick"]
        await until(lambda: "server lost slow" in both.events)
        both.server.send("quick", Cancel("unharmed"))
        await until(lambda: both.at_client == ["unharmed"])
        slow.send(pack(Kind.DATA, 77, 2, 0, body("too late")))
        await asyncio.sleep(0.1)
        assert ("slow", "too late") not in both.at_server
        assert both.events.count("server lost slow") == 1


async def test_a_client_drops_a_server_that_never_acknowledges() -> None:
    spec = ChannelSpec(heartbeat_ms=40, lost_after_ms=60_000, window_batches=8, buffer_bytes_max=100_000)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
    silent = context.socket(zmq.ROUTER)
    both = Pair(spec)
    try:
        both.address = f"tcp://127.0.0.1:{silent.bind_to_random_port('tcp://127.0.0.1')}"
        client = await both.connect(hello=False)
        await until(lambda: bool(silent.poll(0)))
        route, frame = silent.recv_multipart()
        silent.send_multipart([route, pack(Kind.OPENED, int.from_bytes(frame[4:12], "little"), 0, 0)])
        await until(lambda: client.connected)
        for _ in range(80):
            client.send(Cancel("x" * 1000))
        with pytest.raises(ChannelError, match="slowly"):
            client.send(Cancel("x" * 20_000))
        assert not client.connected
        await until(lambda: both.events[:2] == ["c up", "c lost"])
        await client.stop()
    finally:
        silent.close(linger=0)


async def test_bad_frames_are_counted_and_harm_nobody() -> None:
    async with pair() as both, raw_peer(both.address) as raw:
        await both.connect()
        raw.send(b"GET / HTTP/1.1")
        raw.send_multipart([b"many", b"parts", b""])
        raw.send(pack(Kind.OPEN, 5, 0, 0, b"raw"))
        raw.send(pack(Kind.DATA, 5, 1, 0, b"\xc1 not msgpack"))
        raw.send(pack(Kind.DATA, 5, 2, 0, msgspec.msgpack.encode([["Unknown", 1]])))
        raw.send(pack(Kind.DATA, 5, 3, 0, body("still works")))
        await until(lambda: ("raw", "still works") in both.at_server)
        assert both.server.bad_frames == 4
        await until(lambda: set(both.server.peers()) == {"c", "raw"})


async def test_a_frame_of_an_unknown_session_is_told_so() -> None:
    async with pair() as both, raw_peer(both.address) as raw:
        raw.send(pack(Kind.DATA, 1234, 1, 0, body("who are you")))
        await until(lambda: bool(raw.poll(0)))
        assert raw.recv() == pack(Kind.CLOSE, 1234, 0, 0)
        assert both.at_server == []


async def test_a_raising_handler_loses_only_its_own_message() -> None:
    raised: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: raised.append(context["exception"]))
    async with pair() as both:
        keep = both.at_server.append

        def handler(peer: str, message: Any) -> None:
            if message.request_id == "3":
                raise ZeroDivisionError
            keep((peer, message.request_id))

        both.server._on_message = handler
        client = await both.connect(hello=False)
        await until(lambda: client.connected)
        for number in range(6):
            client.send(Cancel(str(number)))
        await until(lambda: len(both.at_server) == 5)
        assert [text for _, text in both.at_server] == ["0", "1", "2", "4", "5"]
        assert [type(error) for error in raised] == [ZeroDivisionError]


async def test_messages_of_one_turn_travel_as_one_batch() -> None:
    async with pair() as both:
        client = await both.connect()
        await until(lambda: both.batches == 1)
        for number in range(100):
            client.send(Cancel(str(number)))
        await until(lambda: len(both.at_server) == 101)
        assert both.batches == 2


async def test_failing_to_resolve_is_tried_again() -> None:
    async with pair() as both:
        tries = 0

        async def resolve() -> str:
            nonlocal tries
            tries += 1
            if tries < 3:
                raise RuntimeError("the directory is away")
            return both.address

        client = Client("c", resolve, SPEC, Cancel, print, lambda: both.events.append("up"), lambda: None)
        both.clients.append(client)
        await client.start()
        await until(lambda: client.last_error is not None)
        await until(lambda: both.events == ["up"])
        assert tries == 3
        assert client.last_error is None


async def test_stop_sends_what_is_pending() -> None:
    async with pair() as both:
        client = await both.connect()
        await until(lambda: len(both.at_server) == 1)
        for number in range(2000):
            client.send(Cancel(str(number)))
            both.server.send("c", Cancel(str(number)))
        await client.stop()
        assert len(both.at_server) == 2001
        await until(lambda: both.events[-1] == "server lost c")
        other = await both.connect("d")
        await until(lambda: both.server.peers() == ["d"])
        both.at_client.clear()
        for number in range(2000):
            both.server.send("d", Cancel(str(number)))
        await both.server.stop()
        await until(lambda: len(both.at_client) == 2000 and not other.connected)


async def test_stop_before_any_connection_and_twice() -> None:
    async def never() -> str:
        await asyncio.sleep(3600)
        return ""

    client = Client("c", never, SPEC, Cancel, print, lambda: None, lambda: None)
    await client.start()
    await asyncio.sleep(0.01)
    await client.stop()
    await client.stop()
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_a_resolve_that_fails_while_its_client_stops_is_not_reported_as_forgotten() -> None:
    forgotten: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: forgotten.append(context))
    asked = asyncio.Event()

    async def nowhere() -> str:
        asked.set()
        try:
            await asyncio.sleep(3600)
        finally:
            raise OSError("nobody there")

    client = Client("c", nowhere, SPEC, Cancel, print, lambda: None, lambda: None)
    await client.start()
    await asked.wait()
    await client.stop()
    await until(lambda: asyncio.all_tasks() == {asyncio.current_task()})
    gc.collect()
    assert forgotten == []


async def test_a_host_name_is_resolved() -> None:
    server = Server("localhost", SPEC, Cancel, lambda peer, message: None, lambda peer: None)
    await server.start()
    assert server.address.startswith("tcp://127.0.0.1:")
    await server.stop()


@pytest.mark.parametrize("host", ["203.0.113.7", "no-such-host.invalid"])
async def test_an_unusable_host_is_an_operating_error(host: str) -> None:
    server = Server(host, SPEC, Cancel, lambda peer, message: None, lambda peer: None)
    with pytest.raises(ChannelError):
        await server.start()


@pytest.mark.parametrize("factory", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_loop_that_slept_does_not_take_its_peers_for_lost(factory: Callable[[], asyncio.AbstractEventLoop]) -> None:
    async def scenario() -> None:
        spec = ChannelSpec(heartbeat_ms=40, lost_after_ms=400)
        async with pair(spec) as both, raw_peer(both.address) as raw:
            raw.send(pack(Kind.OPEN, 9, 0, 0, b"raw"))
            raw.send(pack(Kind.DATA, 9, 1, 0, body("before")))
            await until(lambda: both.server.peers() == ["raw"])
            raw.send(pack(Kind.BEAT, 9, 1, 0))
            time.sleep(0.6)  # noqa: ASYNC251 - the loop is meant to be blocked; the heartbeat waits in the socket
            raw.send(pack(Kind.DATA, 9, 2, 0, body("after")))
            await until(lambda: both.at_server[-1] == ("raw", "after"))
            assert both.events == []
            await until(lambda: both.events == ["server lost raw"])

    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(scenario())


@pytest.mark.parametrize("factory", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_twenty_thousand_messages_on_either_loop(factory: Callable[[], asyncio.AbstractEventLoop]) -> None:
    async def scenario() -> None:
        async with pair() as both:
            client = await both.connect(hello=False)
            await until(lambda: client.connected)
            for number in range(20_000):
                client.send(Cancel(str(number)))
                if number % 50 == 0:
                    await asyncio.sleep(0)
            await until(lambda: len(both.at_server) == 20_000)
            assert [text for _, text in both.at_server] == [str(number) for number in range(20_000)]

    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(scenario())


class KnowsOnlyTheServer(CurveKeys):
    """A client that has the server's public key but not the cell's secret one."""

    def apply(self, socket: zmq.Socket[bytes], *, server: bool) -> None:
        super().apply(socket, server=server)
        own = CurveKeys.generate()
        socket.set(zmq.CURVE_PUBLICKEY, own.public)
        socket.set(zmq.CURVE_SECRETKEY, own.secret)


async def test_curve_lets_in_only_the_cells_own_key() -> None:
    keys = CurveKeys.generate()
    assert keys.secret.decode() not in repr(keys)
    async with pair(curve=keys) as both:
        await both.connect("friend")
        await until(lambda: both.server.peers() == ["friend"])
        both.server.send("friend", Cancel("secret"))
        await until(lambda: both.at_client == ["secret"])
        stranger = await both.connect("stranger", CurveKeys.generate())
        halfway = await both.connect("halfway", KnowsOnlyTheServer(public=keys.public, secret=keys.secret))
        plain = Client("plain", both._resolve, SPEC, Cancel, print, lambda: None, lambda: None)
        both.clients.append(plain)
        await plain.start()
        await asyncio.sleep(0.5)
        assert not stranger.connected
        assert not halfway.connected
        assert not plain.connected
        assert both.server.peers() == ["friend"]


def test_a_client_that_nobody_stopped_takes_no_other_with_it() -> None:
    """zmq's one thread serves every channel of the process; it must not wait for what the collector has closed."""

    async def abandon() -> None:
        both = Pair()
        await both.serve()
        await both.connect()
        await until(lambda: "c up" in both.events)
        await both.server.stop()  # from here on the client finds nobody, again and again

    async def talk() -> None:
        async with pair() as both:
            await both.connect()
            await until(lambda: both.at_server == [("c", "hello")])

    asyncio.run(abandon())
    with pytest.warns(ResourceWarning, match="channel of c was never stopped"):
        gc.collect()
    time.sleep(0.2)  # longer than zmq waits between two tries
    asyncio.run(talk())
