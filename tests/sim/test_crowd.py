"""More tenants than the trace has: every copy keeps its client's shape, and together they are the load that was asked for."""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path
from random import Random
from statistics import fmean, pstdev

import pytest

from rungway.simulate import scenario
from rungway.simulate.crowd import Crowd, spread
from rungway.simulate.errors import SimulationError
from rungway.simulate.play import for_tenants
from rungway.simulate.traces import read_trace
from rungway.simulate.workload import Arrival

SPAN_S = 400.0


def client(name: str, per_s: float, rng: Random) -> list[Arrival]:
    """Bursts: gaps with a coefficient of variation of 2."""
    made, at_s = [], 0.0
    while (at_s := at_s + rng.gammavariate(0.25, 4.0 / per_s)) < SPAN_S:
        made.append(Arrival(at_s, name, rng.randint(1, 10_000), rng.randint(1, 1000)))
    return made


@pytest.fixture
def trace() -> list[Arrival]:
    rng = Random(1)
    return sorted(client("big", 20.0, rng) + client("small", 5.0, rng), key=lambda arrival: arrival.at_s)


def lengths(arrivals: list[Arrival]) -> Counter[tuple[int, int]]:
    return Counter((arrival.input_tokens, arrival.output_tokens) for arrival in arrivals)


def burstiness(arrivals: list[Arrival]) -> float:
    gaps = [after.at_s - before.at_s for before, after in pairwise(arrivals)]
    return pstdev(gaps) / fmean(gaps)


def test_with_the_traces_own_load_every_request_is_played_once(trace: list[Arrival]) -> None:
    dealt = spread(trace, Crowd(7), SPAN_S)
    assert lengths(dealt) == lengths(trace)
    assert {arrival.tenant for arrival in dealt} == {f"big.{n}" for n in (1, 2, 3, 4)} | {
        f"small.{n}" for n in (1, 2, 3)
    }
    assert all(before.at_s <= after.at_s for before, after in pairwise(dealt))
    assert dealt[0].at_s >= 0 and dealt[-1].at_s < SPAN_S


def test_copies_keep_the_skew_and_the_bursts_of_their_client(trace: list[Arrival]) -> None:
    dealt = spread(trace, Crowd(6), SPAN_S)
    sizes = Counter(arrival.tenant for arrival in dealt)
    of_trace = Counter(arrival.tenant for arrival in trace)
    for name in ("big", "small"):
        own = [arrival for arrival in trace if arrival.tenant == name]
        for copy in (1, 2, 3):
            mine = [arrival for arrival in dealt if arrival.tenant == f"{name}.{copy}"]
            assert sizes[f"{name}.{copy}"] == pytest.approx(of_trace[name] / 3, rel=0.2)
            assert burstiness(mine) == pytest.approx(burstiness(own), rel=0.2)


@pytest.mark.parametrize("load", [0.5, 2.5, 11.0])
def test_the_load_is_what_was_asked_for(trace: list[Arrival], load: float) -> None:
    dealt = spread(trace, Crowd(4, load), SPAN_S)
    assert len(dealt) == pytest.approx(load * len(trace), rel=0.06)
    assert dealt[-1].at_s < SPAN_S and len({arrival.tenant for arrival in dealt}) == 4


def test_fewer_tenants_than_clients_and_senseless_crowds_are_refused(trace: list[Arrival]) -> None:
    for tenants in (1, 10**9):
        with pytest.raises(SimulationError, match="--tenants"):
            spread(trace, Crowd(tenants), SPAN_S)


def servegen(folder: Path, rate: float, cv: float) -> Path:
    for number, of_client in ((1, rate), (2, 0.0)):
        lines = "".join(f"{600 * window},{of_client},{cv},Gamma,1,1\n" for window in range(10))
        (folder / f"chunk-{number}-trace.csv").write_text(lines)
        tables = {"0": {"input_tokens": "{10: 0.5, 20: 0.5}", "output_tokens": "{7: 1.0}", "reason_ratio": "{}"}}
        (folder / f"chunk-{number}-dataset.json").write_text(json.dumps(tables))
    return folder


@pytest.mark.parametrize("cv", [0.3, 1.0, 4.0])
def test_copies_of_drawn_clients_share_the_rate_however_small_their_shares(tmp_path: Path, cv: float) -> None:
    """Were each window begun at a request, or at none, few requests per window would show it."""
    found = read_trace(servegen(tmp_path, 2.0, cv), Random(3), crowd=Crowd(400, 2.0))
    assert len(found) == pytest.approx(2 * 2.0 * 6000, rel=0.08)
    names = {arrival.tenant for arrival in found}
    assert len(names) >= 390 and all(name.startswith("client-1.") for name in names), "who says nothing is not copied"
    assert {arrival.input_tokens for arrival in found} == {10, 20}


def test_the_same_seed_makes_the_same_crowd(tmp_path: Path) -> None:
    folder = servegen(tmp_path, 0.5, 1.0)
    first, again, other = (read_trace(folder, Random(seed), crowd=Crowd(30)) for seed in (1, 1, 2))
    assert first == again != other


def test_contracts_are_dealt_in_turn_and_share_one_reserve() -> None:
    kept = scenario.tenant("kept", isolation=scenario.Isolation(reserved_share=0.2))
    plain = scenario.tenant("plain", weight=3.0)
    made = for_tenants(scenario.platform(kept, plain), ["a", "b", "c", "d", "plain"], "kept,plain")
    assert [(t.name, t.weight) for t in made.tenants] == [("a", 1), ("b", 3), ("c", 1), ("d", 3), ("plain", 3)]
    assert sum(t.isolation.reserved_share for t in made.tenants) == pytest.approx(0.2)
    with pytest.raises(SimulationError, match="nobody"):
        for_tenants(scenario.platform(kept), ["a"], "kept,nobody")
