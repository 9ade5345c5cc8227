"""What the drill controller-loss concludes from what it saw, each verdict shown to fail when it should."""

from __future__ import annotations

from pathlib import Path

import pytest

from rungway.chaos import controller_loss as drill
from rungway.chaos.load import Sample
from rungway.chaos.outage import Outage
from rungway.chaos.stage import Stage, StageError
from rungway.settings.load import load_platform

ROOT = Path(__file__).parents[2]

WHOLE = 'rungway_quota_degraded 0.0\nrungway_pressure{pool="large"} 0.0\n'
OWN = "# TYPE rungway_quota_degraded gauge\nrungway_quota_degraded 1\n"


def sample(planned: int, **changes: object) -> Sample:
    values = {"status": 200, "ttft_ms": 200.0, "tokens": 12, "done": True, "first_wall_ns": planned + 1} | changes
    return Sample(stream="steady", phase="load", planned_wall_ns=planned, lag_ms=0.0, **values)  # type: ignore[arg-type]


def seen(*scrapes: tuple[int, str]) -> Outage:
    outage = Outage("http://127.0.0.1:1")
    outage.begin()
    for scrape in scrapes:
        outage._see(*scrape)
    return outage


def test_an_outage_rises_and_falls_once() -> None:
    outage = seen((200, WHOLE), (503, "{}"), (200, OWN), (200, OWN), (200, WHOLE))
    assert outage.began_ns <= outage.rose_ns <= outage.back_ns
    assert drill._gauge(outage).ok
    inside = [sample(outage.rose_ns), sample(outage.back_ns), sample(outage.began_ns - 1)]
    assert outage.during(inside) == inside[:1]


def test_a_gauge_that_never_rose_or_a_controller_that_never_came_back_fails() -> None:
    assert not drill._gauge(seen((503, "{}"), (200, WHOLE))).ok
    assert not drill._gauge(seen((503, "{}"), (200, OWN))).ok
    assert seen((200, WHOLE)).back_ns == 0, "a scrape before anybody noticed is no return"


def test_the_verdicts_fail_when_they_should() -> None:
    good = [sample(k) for k in range(10)]
    assert all(verdict.ok for verdict in drill._steady(good))
    assert not drill._steady([])[0].ok
    assert not drill._steady([*good, sample(11, ttft_ms=9000.0)])[0].ok
    assert drill._refused(good).ok and not drill._refused([sample(1, done=False, status=503, code="starting")]).ok
    assert not drill._undegraded([sample(1, degraded="small_tier")]).ok
    assert drill._control([sample(1, first_wall_ns=100)], 50)[0].ok
    assert not drill._control([sample(1, first_wall_ns=40)], 50)[0].ok and not drill._control([], 50)[0].ok


def test_a_lease_bounds_requests_tokens_and_money() -> None:
    asked = {"tight": 12, "narrow": 12, "poor": 12}
    within = {limit.tenant: drill.Used(10, 200, 450_000) for limit in drill.LIMITS}

    def oks(leased: dict[str, drill.Used], asked: dict[str, int]) -> list[bool]:
        return [verdict.ok for verdict in drill._bounded(leased, asked)]

    assert oks(within, asked) == [True, True, True]
    assert oks({name: drill.Used(11, 201, 450_001) for name in within}, asked) == [False, False, False]
    assert oks({}, asked) == [False, False, False]
    assert oks(within, dict.fromkeys(asked, 10)) == [False, False, False], "nobody asked for more: nothing is shown"


def test_the_control_arm_is_the_same_platform_without_leases(tmp_path: Path) -> None:
    leased, bare = (
        load_platform(ROOT / "config" / name, state_dir=tmp_path) for name in ("drill-lease.yaml", drill.NO_LEASE.name)
    )
    assert (leased.controller.lease.share, bare.controller.lease.share) == (drill.LEASE_SHARE, 0)
    assert (leased.tiers, leased.gateway, leased.ladder) == (bare.tiers, bare.gateway, bare.ladder)
    contracts = {tenant.name: tenant for tenant in leased.tenants}
    quotas = {limit.tenant: (contracts[limit.tenant].quotas, contracts[limit.tenant].budget) for limit in drill.LIMITS}
    assert quotas["tight"][0].requests_per_minute == drill.LIMITS[0].quota
    assert quotas["narrow"][0].tokens_per_minute == drill.LIMITS[1].quota
    assert quotas["poor"][1].nusd == drill.LIMITS[2].quota


def test_it_hits_only_a_platform_of_its_own() -> None:
    with pytest.raises(StageError):
        drill.controller_loss(Stage("http://127.0.0.1:1", {}), lambda _: None)
