"""A real gateway, real channels, and a controller that goes away: what it admits from its lease, and what it tells afterwards."""

from __future__ import annotations

import asyncio
from pathlib import Path

from rungway.contracts import GatewaySpec, Platform
from rungway.leases import Lease, PoolLease, ReplicaLease, TenantLease
from rungway.messages import Leased
from unit.gateway_rig import WAIT_S, Rig, frames, platform, running, said, until


def lease(**changes: object) -> Lease:
    values = {"tokens": 5000, "requests": 3, "places": 8, "nusd": None} | changes
    return Lease(
        ttl_s=30.0,
        slots_max=4,
        waiting_max=10,
        tenants={"acme": TenantLease(**values)},  # type: ignore[arg-type]
        replicas=[ReplicaLease(f"{tier}-1", tier, "v1", 4, 4000) for tier in ("small", "large")],
        pools={tier: PoolLease(0.0, 5000.0, 5.0, {}) for tier in ("small", "large")},
    )


async def alone(rig: Rig, given: Lease) -> None:
    """The gateway holds the lease and has lost its controller."""
    rig.controller.broadcast(Leased(given))
    await until(lambda: rig.gateway._leases._desk.open(0))
    await rig.controller.stop()
    await until(lambda: rig.gateway._leases._away)


def setting(wait_s: float = WAIT_S) -> Platform:
    return platform(gateway=GatewaySpec(controller_wait_s=wait_s))


async def test_a_new_request_is_answered_from_the_lease_and_settled_afterwards(tmp_path: Path) -> None:
    async with running(tmp_path, setting()) as rig:
        await alone(rig, lease())
        answer = await rig.chat()
        assert answer.status_code == 200
        assert answer.headers["x-rungway-reason"] == "lease" and answer.headers["x-rungway-degraded"] == "none"
        assert answer.headers["x-ratelimit-remaining-requests"] == "2"
        scrape = await rig.http.get("/metrics")
        assert scrape.status_code == 200 and "\nrungway_quota_degraded 1\n" in scrape.text
        assert rig.gateway.flights == {}
        await rig.controller.restart()
        [finish] = await rig.settled()
        [flight] = rig.controller.hellos[-1].flights
        assert flight.grant is not None and flight.grant.reason == "lease"
        assert flight.ask.request_id == finish.request_id and finish.delivered.keys() == {1}
        await until(lambda: not rig.gateway._leases.owed)
        assert not rig.gateway.admitting()


async def test_beyond_the_lease_requests_wait_and_then_get_503(tmp_path: Path) -> None:
    async with running(tmp_path, setting(0.3)) as rig:
        await alone(rig, lease(requests=1))
        assert (await rig.chat()).status_code == 200
        refused = await rig.chat()
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "starting")
        assert int(refused.headers["retry-after"]) >= 1
        await rig.controller.restart()


async def test_who_waits_for_a_place_gets_the_next_one(tmp_path: Path) -> None:
    async with running(tmp_path, setting()) as rig:
        await alone(rig, lease(places=1))
        first = asyncio.create_task(rig.chat("story [[tpot_ms=20]] [[tokens=20]]", stream=True))
        await until(lambda: rig.running() == 1)
        second = asyncio.create_task(rig.chat())
        await until(lambda: len(rig.gateway._leases._waiting) == 1)
        assert len(said(frames((await first).text)).split()) > 0
        answer = await second
        assert answer.status_code == 200 and answer.headers["x-rungway-reason"] == "lease"
        await rig.controller.restart()
        assert len(await rig.settled(2)) == 2


async def test_an_ask_that_was_submitted_before_the_loss_is_not_admitted_twice(tmp_path: Path) -> None:
    """The controller may have granted it: only it can say."""
    async with running(tmp_path, setting()) as rig:
        grant = rig.controller.decide
        rig.controller.decide = lambda ask, attempt, avoid: None
        waiting = asyncio.create_task(rig.chat())
        await until(lambda: rig.controller.asks)
        await alone(rig, lease())
        assert rig.gateway._leases.owed == {} and not waiting.done()
        rig.controller.decide = grant
        await rig.controller.restart()
        answer = await waiting
        assert answer.status_code == 200 and answer.headers["x-rungway-reason"] != "lease"
