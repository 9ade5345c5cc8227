"""The load client must tell a whole stream from one that lost, repeated or swapped a word, and count what fails."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from rungway.chaos.bench.http_load import closed_loop, learn, open_loop, percentile
from rungway.chaos.bench.http_wire import Answer
from rungway.chaos.bench.shots import Target, compare, judge

WORDS = ["one", " two", " three", " four"]
TEXT = "".join(WORDS)
Respond = Callable[[dict[str, object]], Awaitable[list[bytes]]]


def frame(word: str, finish: str | None = None) -> bytes:
    choice = {"index": 0, "delta": {"content": word}, "finish_reason": finish}
    return f"data: {json.dumps({'choices': [choice]})}\n\n".encode()


def frames(words: list[str], done: bool = True) -> list[bytes]:
    made = [frame(word, "length" if at == len(words) - 1 else None) for at, word in enumerate(words)]
    return [*made, b"data: [DONE]\n\n"] if done else made


def chunked(parts: list[bytes]) -> list[bytes]:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    return [head, *(b"%x\r\n%s\r\n" % (len(part), part) for part in parts), b"0\r\n\r\n"]


def whole(text: str, status: str = "200 OK") -> list[bytes]:
    body = json.dumps({"choices": [{"message": {"content": text}, "finish_reason": "length"}]}).encode()
    return [b"HTTP/1.1 %s\r\ncontent-length: %d\r\n\r\n" % (status.encode(), len(body)), body]


async def good(asked: dict[str, object]) -> list[bytes]:
    return chunked(frames(WORDS)) if asked["stream"] else whole(TEXT)


@asynccontextmanager
async def server(respond: Respond) -> AsyncIterator[Target]:
    """Answers every request with the byte strings of `respond`, each in a write of its own; b"" closes."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                size = int(head.split(b"content-length:")[1].split(b"\r\n")[0])
                for part in await respond(json.loads(await reader.readexactly(size))):
                    if not part:
                        return
                    writer.write(part)
                    await writer.drain()
                    await asyncio.sleep(0)
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        finally:
            writer.close()

    running = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with running:
        yield Target("127.0.0.1", running.sockets[0].getsockname()[1], "m", ("k0", "k1"))


def answer(parts: list[bytes], *, is_chunked: bool) -> Answer:
    made = Answer(0)
    made.status, made.chunked = 200, is_chunked
    made.raw = b"".join(parts[1:])
    return made


async def test_whole_streams_pass() -> None:
    async with server(good) as target:
        assert await learn(target, ["p"], max_tokens=4) == {"p": TEXT}
        shots = [target.shot("p", max_tokens=4, stream=True, text=TEXT)]
        load = await closed_loop(target, shots, connections=3, seconds=0.3, warm_s=0.0)
    assert load.completed > 0
    assert not load.errors
    assert (load.lost, load.misplaced, load.frames) == (0, 0, 4 * load.answers)
    assert len(load.ttft_ms) == load.completed


@pytest.mark.parametrize(
    ("words", "done", "problem", "lost", "misplaced"),
    [
        (["one", " three", " four"], True, "wrong text", 1, 0),
        (["one", " three", " two", " four"], True, "wrong text", 0, 1),
        (["one", " two", " two", " three", " four"], True, "wrong text", 0, 1),
        (["one", " two", " three", " alien"], True, "wrong text", 1, 1),
        (WORDS, False, "no [DONE]", 0, 0),
    ],
)
def test_broken_streams_are_told(words: list[str], done: bool, problem: str, lost: int, misplaced: int) -> None:
    shot = Target("h", 1, "m").shot("p", max_tokens=4, stream=True, text=TEXT)
    verdict = judge(shot, answer(chunked(frames(words, done)), is_chunked=True))
    assert (verdict.problem, verdict.lost, verdict.misplaced) == (problem, lost, misplaced)


def test_a_frame_after_done_and_an_error_frame_are_told() -> None:
    shot = Target("h", 1, "m").shot("p", max_tokens=4, stream=True, text=TEXT)
    late = answer(chunked([*frames(WORDS), frame(" five")]), is_chunked=True)
    assert judge(shot, late).problem == "a frame after [DONE]"
    failed = answer(chunked([frame("one"), b'data: {"error": {"code": "internal"}}\n\n']), is_chunked=True)
    assert judge(shot, failed).problem == "error frame"


def test_compare_counts_by_word() -> None:
    assert compare(["a", "b", "c"], ["a", "b", "c"]) == (0, 0)
    assert compare(["a", "b", "c"], ["c", "a", "b"]) == (0, 2)
    assert compare(["a", "b", "c"], []) == (3, 0)


async def test_statuses_and_cut_connections_are_errors() -> None:
    calls = 0

    async def respond(_: dict[str, object]) -> list[bytes]:
        nonlocal calls
        calls += 1
        if calls % 3 == 1:
            return whole("", "503 Service Unavailable")
        return [chunked(frames(WORDS))[0], b""] if calls % 3 == 2 else whole(TEXT)

    async with server(respond) as target:
        shots = [target.shot("p", max_tokens=1, stream=False)]
        load = await closed_loop(target, shots, connections=1, seconds=0.3, warm_s=0.0)
    assert load.errors["status 503"] > 0
    assert load.errors["connection lost"] > 0
    assert load.reconnects > 0
    assert load.completed <= load.answers - load.errors.total()


async def test_open_loop_counts_the_wait_of_a_stalled_server() -> None:
    """One connection, a server that stalls once: later requests were due during the stall and must show it."""
    calls = 0

    async def respond(_: dict[str, object]) -> list[bytes]:
        nonlocal calls
        calls += 1
        if calls == 1:
            await asyncio.sleep(0.3)
        return whole(TEXT)

    async with server(respond) as target:
        shots = [target.shot("p", max_tokens=1, stream=False)]
        load = await open_loop(target, shots, per_second=100, seconds=0.5, connections_max=1, warm_s=0.0)
    assert not load.errors
    waited = [ms for ms in load.latency_ms if ms > 100]
    assert len(waited) > 5, "only the stalled request itself was seen as slow"


async def test_a_server_that_never_answers_is_an_error_not_a_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rungway.chaos.bench.http_load.GRACE_S", 0.2)

    async def respond(_: dict[str, object]) -> list[bytes]:
        await asyncio.sleep(600)
        return []

    async with asyncio.timeout(60), server(respond) as target:
        shots = [target.shot("p", max_tokens=1, stream=False)]
        load = await closed_loop(target, shots, connections=2, seconds=0.1, warm_s=0.0)
    assert load.errors["unanswered at the end"] == 2


def test_keys_are_taken_in_turn() -> None:
    target = Target("h", 1, "m", ("k0", "k1"))
    assert b"Bearer k0\r\n" in target.shot("p", max_tokens=1, stream=False, key=2).raw
    assert b"Bearer k1\r\n" in target.shot("p", max_tokens=1, stream=False, key=3).raw


def test_percentile_is_a_value_that_was_seen() -> None:
    values = [float(number) for number in range(1, 101)]
    assert percentile(values, 0.5) == 50.0
    assert percentile(values, 0.99) == 99.0
    assert percentile([7.0], 0.99) == 7.0
