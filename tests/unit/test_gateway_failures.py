"""Clients that leave, replicas that die, engines that fail or hang, a controller that goes away: one settlement each."""

from __future__ import annotations

import asyncio
import contextlib
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from rungway.contracts import GatewaySpec
from rungway.gateway import core
from rungway.messages import Refused
from rungway.types import Ask, Grant, Refusal
from unit.gateway_rig import KEY, WAIT_S, frames, listening, platform, running, said, until, version

TWO = {"small-1": version("small", "v1"), "small-2": version("small", "v1"), "large-1": version("large", "v1")}


def request_bytes(content: str, **body: Any) -> bytes:
    raw = json.dumps({"model": "small", "max_tokens": 500, "messages": [{"role": "user", "content": content}], **body})
    return (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(raw)}\r\n\r\n{raw}"
    ).encode()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_closed_connection_stops_the_engine(tmp_path: Path, stream: bool) -> None:
    async with running(tmp_path) as rig, listening(rig) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        # 40 s long: however slow the machine is, it is the closed connection that ends it
        writer.write(request_bytes("go [[tokens=400]] [[tpot_ms=100]]", stream=stream))
        if stream:
            for _ in range(3):
                await asyncio.wait_for(reader.readuntil(b"data: "), WAIT_S)
        else:
            await until(lambda: rig.running() == 1)
        writer.close()
        await until(lambda: rig.running() == 0)
        [finish] = await rig.settled()
        await until(lambda: rig.controller.ends)
        end = rig.controller.ends[0]
        assert (finish.outcome, finish.code) == ("client_cancelled", "cancelled")
        assert end.finish == "cancelled"
        assert end.usage.output_tokens < 400
        assert finish.delivered[1] <= end.usage.output_tokens
        assert rig.gateway.flights == {}
        assert (await rig.chat()).status_code == 200


async def test_what_no_engine_would_run_is_tried_on_one_only(tmp_path: Path) -> None:
    """Another try would end the same way, and would count against healthy replicas."""
    async with running(tmp_path, platform(), TWO) as rig:
        error = await rig.chat("go [[tokens=many]]")
        assert (error.status_code, error.json()["error"]["code"]) == (500, "internal")
        [finish] = await rig.settled()
        assert (finish.outcome, finish.attempts, rig.controller.retries) == ("error", 1, [])


async def test_a_client_that_leaves_the_queue_never_reaches_an_engine(tmp_path: Path) -> None:
    async with running(tmp_path) as rig, listening(rig) as port:
        rig.controller.decide = lambda ask, attempt, avoid: None
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request_bytes("go"))
        await until(lambda: rig.controller.asks)
        writer.close()
        await until(lambda: rig.controller.withdrawn)
        assert rig.controller.withdrawn[0].outcome == "client_cancelled"
        # A grant that was already on its way is handed back by a settlement without attempts.
        rig.controller.decide = rig.controller.grant
        rig.controller.rule(rig.controller.asks[0], 1)
        [finish] = await rig.settled()
        assert (finish.outcome, finish.attempts, finish.delivered) == ("client_cancelled", 0, {})
        assert rig.controller.ends == []


async def test_a_lost_replica_does_not_show_in_the_stream(tmp_path: Path) -> None:
    async with running(tmp_path, replicas=TWO) as rig:
        content = "story [[tpot_ms=20]] [[tokens=100]]"
        rig.controller.decide = lambda ask, attempt, avoid: rig.controller.grant_on(ask, attempt, avoid, max_tokens=150)
        reference = (await rig.chat(content, n=2)).json()
        tasks = [
            asyncio.create_task(rig.chat(content, n=2, stream=True, stream_options={"include_usage": True})),
            asyncio.create_task(rig.chat(content, n=2)),
        ]
        await until(lambda: len(rig.gateway.flights) == 2)
        await until(
            lambda: all(
                len(f.progress.emitted) and len(f.progress.emitted[0]) > 8 for f in rig.gateway.flights.values()
            )
        )
        await rig.replicas["small-1"]._server.stop()
        streamed, whole = await asyncio.gather(*tasks)
        events = frames(streamed.text)
        assert events[-1] == "[DONE]"
        for index in range(2):
            text = reference["choices"][index]["message"]["content"]
            assert said(events, index) == whole.json()["choices"][index]["message"]["content"] == text
        assert events[-2]["usage"] == whole.json()["usage"] == reference["usage"]
        finishes = await rig.settled(3)
        assert [(f.outcome, f.attempts) for f in finishes] == [("completed", 1), ("completed", 2), ("completed", 2)]
        for finish in finishes[1:]:
            assert finish.delivered[1] > 8
            assert finish.delivered[1] + finish.delivered[2] == 200
        assert {(r.why, r.attempt, r.replica_id) for r in rig.controller.retries} == {("replica_lost", 1, "small-1")}


async def test_a_draining_replica_hands_its_start_on(tmp_path: Path) -> None:
    async with running(tmp_path, replicas=TWO) as rig:
        rig.replicas["small-1"]._draining = True
        assert (await rig.chat()).status_code == 200
        [finish] = await rig.settled()
        assert (finish.outcome, finish.attempts) == ("completed", 2)
        assert finish.delivered == {1: 0, 2: 3}


async def test_a_replica_that_cannot_be_reached_is_given_up(tmp_path: Path) -> None:
    async with running(tmp_path, replicas=TWO) as rig:
        # Known to the controller only: the gateway never heard of it.
        def decide(ask: Ask, attempt: int, avoid: frozenset[str]) -> Grant | Refusal | None:
            grant = rig.controller.grant_on(ask, attempt, avoid)
            assert isinstance(grant, Grant)
            return rig.controller.shaped(ask, attempt, "ghost", grant.offer) if attempt == 1 else grant

        rig.controller.decide = decide
        assert (await rig.chat()).status_code == 200
        [finish] = await rig.settled()
        assert finish.outcome == "completed"
        assert rig.controller.retries[0].replica_id == "ghost"


async def test_a_replica_that_shuts_down_hands_its_streams_on(tmp_path: Path) -> None:
    async with running(tmp_path, replicas=TWO) as rig:
        content = "story [[tpot_ms=20]] [[tokens=80]]"
        rig.controller.decide = lambda ask, attempt, avoid: rig.controller.grant_on(ask, attempt, avoid, max_tokens=150)
        reference = (await rig.chat(content)).json()["choices"][0]["message"]["content"]
        task = asyncio.create_task(rig.chat(content, stream=True))
        await until(
            lambda: any(f.progress.emitted and len(f.progress.emitted[0]) > 5 for f in rig.gateway.flights.values())
        )
        await rig.replicas["small-1"].stop()
        events = frames((await task).text)
        assert (said(events), events[-1]) == (reference, "[DONE]")
        assert (await rig.settled(2))[1].attempts == 2


async def test_a_cancel_that_came_through_the_controller_stops_the_run(tmp_path: Path) -> None:
    async with running(tmp_path) as rig:
        task = asyncio.create_task(rig.chat("x [[hang]]"))
        await until(lambda: rig.running() == 1)
        [ask] = rig.controller.asks
        rig.controller.server.send(ask.gateway_id, Refused(rig.controller.refusal(ask, "cancelled")))
        assert (await task).status_code == 499
        assert [f.outcome for f in await rig.settled()] == ["client_cancelled"]
        await until(lambda: rig.running() == 0)


@pytest.mark.parametrize("fail_after", [0, 3])
async def test_engine_failures_are_retried_within_the_bound(tmp_path: Path, fail_after: int) -> None:
    async with running(tmp_path) as rig:
        rig.controller.decide = lambda ask, attempt, avoid: rig.controller.grant_on(ask, attempt)
        whole = await rig.chat(f"x [[fail_after={fail_after}]]")
        assert (whole.status_code, whole.json()["error"]["code"]) == (500, "internal")
        streamed = await rig.chat(f"x [[fail_after={fail_after}]]", stream=True)
        if fail_after == 0:
            assert (streamed.status_code, streamed.json()["error"]["code"]) == (500, "internal")
        else:
            events = frames(streamed.text)
            assert streamed.status_code == 200
            assert events[-1]["error"]["code"] == "internal"
            assert len(said(events[:-1]).split()) == 3
        for finish in await rig.settled(2):
            assert (finish.outcome, finish.code, finish.attempts) == ("error", "internal", 3)
        await until(lambda: len(rig.controller.ends) == 6)
        assert len(rig.controller.retries) == 4


async def test_a_write_that_must_not_be_repeated_is_not(tmp_path: Path) -> None:
    async with running(tmp_path) as rig:
        answer = await rig.post(
            {"model": "small", "messages": [{"role": "user", "content": "x [[fail_after=0]]"}]},
            x_rungway_action="non_idempotent_write",
        )
        assert answer.status_code == 500
        assert rig.controller.retries == []


async def test_a_hanging_try_is_cancelled_before_the_next_one_starts(tmp_path: Path) -> None:
    configuration = platform(gateway=GatewaySpec(inter_token_timeout_s=0.2))
    async with running(tmp_path, configuration) as rig:
        seen: list[int] = []

        def decide(ask: Ask, attempt: int, avoid: frozenset[str]) -> Grant | Refusal | None:
            seen.append(rig.running())
            return rig.controller.grant_on(ask, attempt)

        rig.controller.decide = decide
        answer = await rig.chat("x [[hang=2]]")
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, "timeout")
        assert seen == [0, 0, 0]
        [finish] = await rig.settled()
        assert (finish.outcome, finish.attempts) == ("timeout", 3)
        await until(lambda: rig.running() == 0)
        assert [r.why for r in rig.controller.retries] == ["timeout", "timeout"]


async def test_a_refused_retry_ends_the_request_by_what_broke_it(tmp_path: Path) -> None:
    async with running(tmp_path) as rig:
        rig.controller.decide = lambda ask, attempt, avoid: (
            rig.controller.grant_on(ask, attempt)
            if attempt == 1
            else rig.controller.refusal(ask, "replica_lost", retry_after_s=2)
        )
        answer = await rig.chat("x [[fail_after=0]]")
        assert (answer.status_code, answer.headers["retry-after"]) == (502, "2")
        [finish] = await rig.settled()
        assert (finish.outcome, finish.code, finish.attempts) == ("error", "replica_lost", 1)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_deadline_ends_the_wait_and_the_run(tmp_path: Path, stream: bool) -> None:
    async with running(tmp_path) as rig:
        body = {"model": "small", "stream": stream, "messages": [{"role": "user", "content": "x [[hang]]"}]}
        answer = await rig.post(body, x_rungway_deadline_ms="150")
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, "timeout")
        [finish] = await rig.settled()
        assert finish.outcome == "deadline"
        await until(lambda: rig.running() == 0)
        rig.controller.decide = lambda ask, attempt, avoid: None
        answer = await rig.post(body, x_rungway_deadline_ms="100")
        assert answer.status_code == 504
        await until(lambda: rig.controller.withdrawn)
        assert rig.controller.withdrawn[0].outcome == "deadline"
        assert rig.controller.retries == []


async def test_the_server_bounds_every_request(tmp_path: Path) -> None:
    async with running(tmp_path, platform(gateway=GatewaySpec(request_timeout_s=1.0))) as rig:
        answer = await rig.chat("x [[hang=2]]", stream=True)
        events = frames(answer.text)
        assert events[-1]["error"]["code"] == "timeout"
        [finish] = await rig.settled()
        assert finish.outcome == "timeout"
        await until(lambda: rig.running() == 0)


async def test_a_client_that_does_not_read_is_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core, "CUT_S", 1000.0)
    async with running(tmp_path, platform(gateway=GatewaySpec(stream_buffer_deltas_max=5))) as rig:
        messages = [{"type": "http.request", "body": request_bytes("x", stream=True).split(b"\r\n\r\n")[1]}]

        async def receive() -> dict[str, Any]:
            if messages:
                return messages.pop()
            await asyncio.sleep(10 * WAIT_S)
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            if message["type"] == "http.response.body":
                await asyncio.sleep(10 * WAIT_S)

        headers = [(b"authorization", f"Bearer {KEY}".encode()), (b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": headers}
        task = asyncio.create_task(rig.app(scope, receive, send))  # type: ignore[arg-type]
        # The engine is stopped at once, although the answer still hangs in the socket.
        await until(lambda: rig.controller.ends)
        assert rig.controller.ends[0].usage.output_tokens < 500
        assert rig.controller.finishes == [] and not task.done()
        monkeypatch.setattr(core, "CUT_S", 0.1)
        await asyncio.wait_for(task, WAIT_S)
        [finish] = await rig.settled()
        assert finish.outcome == "client_cancelled"


async def test_a_cancel_call_stops_the_callers_own_request_only(tmp_path: Path) -> None:
    async with running(tmp_path) as rig:
        task = asyncio.create_task(rig.chat("x [[hang]]"))
        await until(lambda: rig.running() == 1)
        request_id = rig.controller.asks[0].request_id
        rig.controller.answer = (404, "application/json", b'{"error":{}}')
        beta = {"authorization": "Bearer rw_beta_0123456789abcdef0123456789abcdef0123456789b"}
        refused = await rig.http.post(f"/v1/requests/{request_id}/cancel", headers=beta)
        assert refused.status_code == 404
        assert rig.controller.queries == [("cancel", {"request_id": request_id}, "beta", False)]
        assert rig.running() == 1
        accepted = await rig.http.post(f"/v1/requests/{request_id}/cancel")
        assert accepted.json() == {"id": request_id, "cancelled": True}
        answer = await task
        assert (answer.status_code, answer.json()["error"]["code"]) == (499, "cancelled")
        [finish] = await rig.settled()
        assert finish.outcome == "client_cancelled"
        await until(lambda: rig.running() == 0)


async def test_streams_outlive_the_controller_and_new_requests_wait_for_it(tmp_path: Path) -> None:
    async with running(tmp_path, platform(gateway=GatewaySpec(controller_wait_s=WAIT_S))) as rig:
        content = "story [[tpot_ms=50]] [[tokens=60]]"
        rig.controller.decide = lambda ask, attempt, avoid: rig.controller.grant_on(ask, attempt, avoid, max_tokens=90)
        stream = asyncio.create_task(rig.chat(content, stream=True))
        await until(lambda: rig.running() == 1)
        await rig.controller.stop()
        await until(lambda: not rig.gateway.ready())
        waiting = asyncio.create_task(rig.chat())
        await until(lambda: len(rig.gateway.flights) == 2)
        await rig.controller.restart()
        assert (await waiting).status_code == 200
        events = frames((await stream).text)
        assert len(said(events).split()) == 60
        assert events[-1] == "[DONE]"
        hello = rig.controller.hellos[-1]
        assert sorted(flight.grant is None for flight in hello.flights) == [False, True]
        assert {f.outcome for f in await rig.settled(2)} == {"completed"}
        assert rig.controller.retries == [], "a controller that knows no replica yet does not cut what streams"


async def test_the_wait_for_a_controller_is_bounded(tmp_path: Path) -> None:
    async with running(tmp_path, platform(gateway=GatewaySpec(controller_wait_s=0.2))) as rig:
        await rig.controller.stop()
        await until(lambda: not rig.gateway.ready())
        for stream in (False, True):
            refused = await rig.chat(stream=stream)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "starting")
            assert int(refused.headers["retry-after"]) >= 1
        assert rig.gateway.flights == {}
        await rig.controller.restart()


async def test_a_retry_that_was_asked_of_a_lost_controller_is_asked_again(tmp_path: Path) -> None:
    configuration = platform(gateway=GatewaySpec(controller_wait_s=WAIT_S))
    async with running(tmp_path, configuration, replicas=TWO) as rig:
        good = rig.controller.decide
        rig.controller.decide = lambda ask, attempt, avoid: good(ask, attempt, avoid) if attempt == 1 else None
        rig.replicas["small-1"]._draining = True
        task = asyncio.create_task(rig.chat())
        await until(lambda: rig.controller.retries)
        await rig.controller.stop()
        await until(lambda: not rig.gateway.ready())
        rig.controller.decide = good
        await rig.controller.restart(replicas=3)
        assert (await task).status_code == 200
        assert len(rig.controller.retries) == 2
        assert (await rig.settled())[0].delivered == {1: 0, 2: 3}


async def test_a_settlement_is_sent_again_until_it_is_acknowledged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core, "RESEND_S", 1000.0)  # so that only the new session makes it come again
    async with running(tmp_path) as rig:
        rig.controller.acknowledge = False
        assert (await rig.chat()).status_code == 200
        [first] = await rig.settled()
        await rig.controller.stop()
        await until(lambda: not rig.gateway.ready())
        rig.controller.acknowledge = True
        await rig.controller.restart()
        assert (await rig.settled(2))[1] == first
        await until(lambda: not rig.gateway._uplink.owes(first.request_id))


async def test_stopping_ends_what_is_in_flight_with_an_error(tmp_path: Path) -> None:
    async with running(tmp_path) as rig:
        task = asyncio.create_task(rig.chat("x [[hang]]"))
        await until(lambda: rig.running() == 1)
        await rig.gateway.stop()
        answer = await task
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "starting")
        assert (await rig.chat()).status_code == 503
        assert len(await rig.settled()) == 1
        await until(lambda: rig.running() == 0)


async def test_a_server_that_cancels_the_handler_still_settles(tmp_path: Path) -> None:
    async with running(tmp_path) as rig:
        task = asyncio.create_task(rig.chat("x [[hang]]"))
        await until(lambda: rig.running() == 1)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, httpx.HTTPError):
            await task
        [finish] = await rig.settled()
        assert finish.outcome == "client_cancelled"
        await until(lambda: rig.running() == 0)


async def test_a_call_cancelled_at_any_moment_of_its_submission_leaves_nothing_behind(tmp_path: Path) -> None:
    async with running(tmp_path) as rig:
        for turns in range(0, 45, 3):
            task = asyncio.create_task(rig.chat("x [[hang]]"))
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        await until(lambda: not rig.gateway.flights and rig.running() == 0)
        await until(lambda: not rig.replicas["small-1"]._running)
        assert rig.replicas["small-1"]._engine.check() == []
        assert (await rig.chat()).status_code == 200


async def test_calls_that_bear_one_request_id_are_two_requests(tmp_path: Path) -> None:
    """A client's own X-Request-Id names nothing here: two live ones do not meet in the engine."""
    async with running(tmp_path) as rig:
        messages = [{"role": "user", "content": "a b [[tpot_ms=5]] [[tokens=12]]"}]
        body = {"model": "small", "messages": messages}
        both = [asyncio.create_task(rig.post(body, x_request_id="same")) for _ in range(2)]
        await until(lambda: rig.running() == 2)
        first, second = await asyncio.gather(*both)
        assert {first.status_code, second.status_code} == {200}
        assert "same" not in (one := first.headers["x-request-id"]) and one != second.headers["x-request-id"]
        assert len({ask.request_id for ask in rig.controller.asks}) == 2
        assert first.json()["usage"]["completion_tokens"] == second.json()["usage"]["completion_tokens"] == 12


async def test_revoked_keys_stop_working_with_the_next_directory(tmp_path: Path) -> None:
    async with running(tmp_path) as rig:
        assert (await rig.chat()).status_code == 200
        rig.controller.reload(platform(tenants=()))
        await until(lambda: rig.gateway.known().version == 2)
        assert (await rig.chat()).status_code == 401


async def test_ready_needs_a_replica_for_every_tier(tmp_path: Path) -> None:
    async with running(tmp_path) as rig:
        assert (await rig.http.get("/readyz")).status_code == 200
        rig.controller.drop_replica("large-1")
        await until(lambda: not rig.gateway.ready())
        answer = await rig.http.get("/readyz")
        assert (answer.status_code, answer.json()["lacking"]) == (503, ["tier large"])
        assert (await rig.http.get("/livez")).status_code == 200
