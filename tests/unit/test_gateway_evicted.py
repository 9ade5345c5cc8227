"""An answer that is stopped for other work and goes on later: one text, one bill, however often and whatever the action."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from engine.tiny_model import save_tiny_llama
from rungway.contracts import Tier
from rungway.messages import Evict
from rungway.replica.server import ReplicaServer
from unit.gateway_rig import PRICE, WAIT_S, Rig, frames, platform, running, said, until, version

EVICTIONS = 4  # more than `retries_max` failed tries would be forgiven


@pytest.mark.parametrize("action", ["read", "non_idempotent_write"])
async def test_a_stopped_answer_goes_on_where_it_was(tmp_path: Path, action: str) -> None:
    async with running(tmp_path) as rig:
        rig.controller.decide = lambda ask, attempt, avoid: rig.controller.grant_on(ask, attempt, max_tokens=150)
        body = {"model": "small", "messages": [{"role": "user", "content": "story [[tpot_ms=10]] [[tokens=80]]"}]}
        reference = (await rig.post(body)).json()
        task = asyncio.create_task(rig.post({**body, "stream": True}, x_rungway_action=action))
        for attempt in range(1, EVICTIONS + 1):
            await until(
                lambda attempt=attempt: any(
                    flight.grant is not None
                    and flight.grant.attempt == attempt
                    and flight.progress.tokens > 8 * attempt
                    for flight in rig.gateway.flights.values()
                )
            )
            [request_id] = rig.gateway.flights
            rig.controller.server.send("small-1", Evict(request_id, attempt))
            await until(lambda attempt=attempt: len(rig.controller.retries) == attempt)
        events = frames((await task).text)
        assert (said(events), events[-1]) == (reference["choices"][0]["message"]["content"], "[DONE]")
        assert {retry.why for retry in rig.controller.retries} == {"evicted"}
        finish = (await rig.settled(2))[1]
        assert (finish.outcome, finish.attempts) == ("completed", EVICTIONS + 1)
        await until(lambda: len(rig.controller.ends) == EVICTIONS + 2)
        ends = [end for end in rig.controller.ends if end.request_id == finish.request_id]
        assert [end.finish for end in ends] == ["error"] * EVICTIONS + ["stop"]
        emitted = sum(end.usage.output_tokens for end in ends)
        assert emitted == sum(finish.delivered.values()) == reference["usage"]["completion_tokens"]


async def test_an_eviction_of_an_older_try_leaves_the_present_one_alone(tmp_path: Path) -> None:
    async with running(tmp_path, platform()) as rig:
        rig.controller.decide = lambda ask, attempt, avoid: rig.controller.grant_on(ask, attempt, max_tokens=150)
        task = asyncio.create_task(rig.chat("story [[tpot_ms=10]] [[tokens=40]]"))
        await until(lambda: any(flight.progress.tokens > 2 for flight in rig.gateway.flights.values()))
        [request_id] = rig.gateway.flights
        rig.controller.server.send("small-1", Evict(request_id, 1))
        await until(lambda: rig.controller.retries)
        rig.controller.server.send("small-1", Evict(request_id, 1))
        assert (await task).status_code == 200
        assert len(rig.controller.retries) == 1


class Turnstile:
    """An engine's steps wait here for this process's event loop, which lets one pass at a time: whatever the machine does,
    the engine cannot get ahead of those who want to stop it."""

    def __init__(self, server: ReplicaServer) -> None:
        self._passes = threading.Semaphore(0)
        core = server._engine._core  # type: ignore[attr-defined]
        self._step = core.step
        core.step = self._pass

    def _pass(self) -> Any:
        self._passes.acquire(timeout=WAIT_S)
        return self._step()

    async def turn(self) -> None:
        while True:
            self._passes.release()
            await asyncio.sleep(0.001)


@contextlib.asynccontextmanager
async def paced(rig: Rig) -> AsyncIterator[None]:
    turning = [asyncio.create_task(Turnstile(rig.replicas[name]).turn()) for name in ("small-1", "small-2")]
    try:
        yield
    finally:
        for task in turning:
            task.cancel()


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 0.8, "top_p": 0.95, "seed": 7}])
async def test_the_native_engine_goes_on_elsewhere_and_back_with_the_same_tokens(
    tmp_path: Path, sampling: dict[str, Any]
) -> None:
    """Random weights: one wrong position, or a draw from another place of the seed's stream, and the text is another."""
    model = save_tiny_llama(tmp_path / "model")
    native: dict[str, Any] = {"model": f"path:{model}", "backend": "native", "dtype": "float32", "fake": None}
    small = version("small", "v1", **native)
    tiers = (Tier(name="small", rank=0, price=PRICE, versions=(small,)),)
    replicas = {"small-1": small, "small-2": small}
    body = {"model": "small", "prompt": "once upon a time", "max_tokens": 160, "ignore_eos": True, **sampling}
    shown = {"stream": True, "stream_options": {"include_usage": True}}
    async with running(tmp_path, platform(tiers=tiers, models=()), replicas) as rig:
        rig.controller.decide = lambda ask, attempt, avoid: rig.controller.grant_on(
            ask, attempt, frozenset({f"small-{1 + attempt % 2}"}), max_tokens=160
        )
        reference = (await rig.post(body, "/v1/completions")).json()
        async with paced(rig):
            task = asyncio.create_task(rig.post(body | shown, "/v1/completions"))
            for attempt in range(1, EVICTIONS + 1):
                await until(lambda attempt=attempt: _tokens(rig, attempt) > 12 * attempt)
                [request_id] = rig.gateway.flights
                where = f"small-{2 - attempt % 2}"
                rig.controller.server.send(where, Evict(request_id, attempt))
                await until(lambda attempt=attempt: len(rig.controller.retries) == attempt)
            events = frames((await task).text)
            undisturbed, finish = await rig.settled(2)
            await until(lambda: len(rig.controller.ends) == EVICTIONS + 2)
        usage = next(event["usage"] for event in events if event != "[DONE]" and event.get("usage"))
        assert said(events) == reference["choices"][0]["text"] and usage["completion_tokens"] == 160
        assert usage["prompt_tokens"] == reference["usage"]["prompt_tokens"]
        assert (finish.outcome, finish.attempts) == (undisturbed.outcome, EVICTIONS + 1) == ("length", EVICTIONS + 1)
        assert sum(finish.delivered.values()) == sum(undisturbed.delivered.values()) == 160
        ends = [end for end in rig.controller.ends if end.request_id == finish.request_id]
        assert [end.replica_id for end in ends] == [f"small-{2 - attempt % 2}" for attempt in range(1, EVICTIONS + 2)]
        assert sum(end.usage.output_tokens for end in ends) == 160, "what was said is billed once, whoever said it"
        assert all(server._engine.check() == [] for server in rig.replicas.values())


def _tokens(rig: Rig, attempt: int) -> int:
    """That the client has, while this is the attempt that goes on; 0 between two."""
    flights = [flight for flight in rig.gateway.flights.values() if flight.grant is not None]
    return sum(flight.progress.tokens for flight in flights if flight.grant and flight.grant.attempt == attempt)
