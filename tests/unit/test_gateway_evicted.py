"""An answer that is stopped for other work and goes on later: one text, one bill, however often and whatever the action."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from rungway.messages import Evict
from unit.gateway_rig import frames, platform, running, said, until

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
