"""The drill's own arithmetic: plans, percentiles, goodput and the verdicts, each shown to fail when it should."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rungway.chaos import invariants, stage
from rungway.chaos.course import Report, Target, goodput, ttft_p99_ms
from rungway.chaos.invariants import Admin, Verdict
from rungway.chaos.load import Phase, Sample, Stream, arrivals, percentile
from rungway.chaos.stage import StageError
from rungway.settings import load_platform

ROOT = Path(__file__).parents[2]
TARGET = Target(ttft_ms=1000.0, tpot_ms=200.0)


def stream(**changes: Any) -> Stream:
    base = Stream(name="s", key="k", model="m", max_tokens=4, phases=(Phase("a", 0.0, 10.0, 5.0),))
    return msgspec.structs.replace(base, **changes)


def sample(**changes: Any) -> Sample:
    base = Sample(
        stream="victim",
        phase="a",
        planned_wall_ns=0,
        lag_ms=0.0,
        status=200,
        request_id="r1",
        ttft_ms=100.0,
        e2e_ms=500.0,
        tokens=5,
        done=True,
        first_wall_ns=10,
    )
    return msgspec.structs.replace(base, **changes)


# --- the plan


def test_even_arrivals_keep_their_rate_and_their_phase() -> None:
    planned = arrivals(stream(phases=(Phase("a", 0.0, 2.0, 4.0), Phase("b", 5.0, 1.0, 2.0))))
    assert [at for at, _ in planned] == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 5.5])
    assert [name for _, name in planned] == ["a"] * 7 + ["b"]


def test_random_arrivals_are_the_same_every_time_and_near_their_rate() -> None:
    flood = stream(poisson=True, phases=(Phase("a", 3.0, 100.0, 50.0),))
    planned = arrivals(flood)
    assert planned == arrivals(flood) != arrivals(msgspec.structs.replace(flood, seed=2))
    assert len(planned) == pytest.approx(5000, rel=0.05)
    assert all(3.0 <= at < 103.0 for at, _ in planned)


def test_percentiles_are_nearest_ranks() -> None:
    values = [float(value) for value in range(100, 0, -1)]
    assert (percentile(values, 50), percentile(values, 99), percentile(values, 100)) == (50.0, 99.0, 100.0)
    assert percentile([7.0], 99) == 7.0
    assert math.isnan(percentile([], 99))


# --- goodput


@pytest.mark.parametrize(
    "change",
    [{"done": False}, {"degraded": "small_tier"}, {"ttft_ms": 1001.0}, {"ttft_ms": None}, {"e2e_ms": 5000.0}],
)
def test_an_answer_is_good_only_if_whole_full_and_in_time(change: dict[str, Any]) -> None:
    assert TARGET.met(sample())
    assert not TARGET.met(sample(**change))


def test_goodput_counts_refusals_and_ttft_does_not() -> None:
    samples = [sample(), sample(), sample(), sample(status=429, done=False, ttft_ms=None)]
    assert goodput(samples, TARGET) == 0.75
    assert ttft_p99_ms(samples) == 100.0


# --- verdicts


def row(request_id: str, wall_ns: int = 5) -> dict[str, Any]:
    return {"request_id": request_id, "wall_ns": wall_ns}


def test_downgrades_must_be_the_same_requests_not_only_as_many() -> None:
    seen = [sample(request_id="a", degraded="small_tier"), sample(request_id="b")]
    assert invariants.downgrades_match(seen, [row("a")]).ok
    assert not invariants.downgrades_match(seen, [row("b")]).ok
    assert not invariants.downgrades_match(seen, []).ok
    assert not invariants.downgrades_match(seen, [row("a"), row("c")]).ok


@pytest.mark.parametrize(
    ("logged", "committed", "ok"),
    [([row("a", 9)], None, True), ([row("a", 9)], True, True), ([row("a", 9)], False, False), ([row("a", 10)], None, False), ([], None, False)],
)  # fmt: skip
def test_a_downgrade_must_be_durable_before_the_first_byte(
    logged: list[dict[str, Any]], committed: bool | None, ok: bool
) -> None:
    seen = [sample(request_id="a", degraded="small_tier", committed=committed)]
    assert invariants.downgrades_first(seen, logged).ok is ok


class Books(Admin):
    """Answers reads from a table."""

    def __init__(self, answers: dict[str, Any]) -> None:
        self.answers = answers

    def get(self, path: str, **params: Any) -> Any:
        return self.answers[path]


def books(billed: int, emitted: int, **more: Any) -> Books:
    tenants = {"t": {"billed_output_tokens": billed, "wasted_tokens": 1, "engine_output_tokens": emitted}}
    reconcile = {"ok": True, "mismatches": 0, "unsettled": 0, "tenants": tenants} | more
    return Books({"/admin/engine-truth": {"reconcile": reconcile}})


def test_bills_must_equal_the_engines_to_the_token() -> None:
    assert invariants.bills_equal_engines(books(9, 10), 0.0).ok
    assert not invariants.bills_equal_engines(books(10, 10), 0.0).ok
    assert not invariants.bills_equal_engines(books(9, 10, ok=False, mismatches=1), 0.0).ok
    assert not invariants.bills_equal_engines(books(9, 10, unsettled=2), 0.0).ok


def test_anything_held_at_rest_is_named() -> None:
    tenant = {
        "running": 0,
        "waiting": 0,
        "held_tokens": 0,
        "in_flight_tokens": {"small": 0},
        "budget": {"held_usd": 0.0},
    }
    pool = {"in_flight": 0, "queue_depth": 0}
    live = {"flights": 0, "tenants": {"t": tenant}, "pools": {"small": pool}}
    assert invariants.nothing_held(Books({"/admin/live": live}), 0.0).ok
    leaky = live | {"tenants": {"t": tenant | {"held_tokens": 7}}}
    verdict = invariants.nothing_held(Books({"/admin/live": leaky}), 0.0)
    assert not verdict.ok and verdict.measured == "t held tokens 7"


def test_rows_and_tokens_must_be_as_many_as_clients_saw() -> None:
    usage = {"tenants": {"victim": {"requests": 2, "output_tokens": 5}}}
    samples = [sample(), sample(status=429, tokens=0)]
    assert invariants.one_row_each(Books({"/admin/usage": usage}), samples, ["victim"], 0).ok
    assert not invariants.one_row_each(Books({"/admin/usage": usage}), samples[:1], ["victim"], 0).ok


def test_each_try_has_a_row_and_a_cut_answer_may_cost_more_than_was_told() -> None:
    usage = {"tenants": {"victim": {"requests": 3, "output_tokens": 9}}}
    admin = Books({"/admin/usage": usage})
    whole, given_up = sample(), sample(status=0, code="gave_up", tokens=0, done=False, tries=2)
    assert invariants.one_row_each(admin, [whole, given_up], ["victim"], 0).ok
    assert not invariants.one_row_each(admin, [whole, whole, whole], ["victim"], 0).ok, "billed more than was delivered"
    assert not invariants.one_row_each(admin, [whole, whole, given_up], ["victim"], 0).ok, "a row is missing"
    low = Books({"/admin/usage": {"tenants": {"victim": {"requests": 3, "output_tokens": 4}}}})
    assert not invariants.one_row_each(low, [whole, given_up], ["victim"], 0).ok, "billed less than was delivered"


def test_a_report_holds_only_if_verdicts_and_control_do() -> None:
    yes, no = Verdict("w", "m", "b", True), Verdict("w", "m", "b", False)
    assert Report("d", [yes], [yes]).ok
    assert not Report("d", [yes, no], [yes]).ok
    assert not Report("d", [yes], [no]).ok


# --- the stage


def test_keys_of_a_given_platform_come_from_a_file(tmp_path: Path) -> None:
    keys = tmp_path / "ready.json"
    keys.write_text(json.dumps({"url": "http://x", "keys": {"victim": "k"}}))
    place = stage.given("http://127.0.0.1:1/", keys)
    assert (place.url, place.key("victim"), place.ledger) == ("http://127.0.0.1:1", "k", None)
    with pytest.raises(StageError, match="aggressor"):
        place.key("aggressor")
    keys.write_text("{}")
    with pytest.raises(StageError, match="no keys"):
        stage.given("http://127.0.0.1:1", keys)


def test_the_drills_configuration_is_what_the_drill_assumes() -> None:
    platform = load_platform(ROOT / "config" / "drill.yaml")
    tenants = {tenant.name: tenant for tenant in platform.tenants}
    assert set(platform.demo_keys) == {"victim", "aggressor", "undivided"}
    assert tenants["victim"].tenant_class == tenants["aggressor"].tenant_class
    assert tenants["aggressor"].ladder.floor == "small_tier"
    assert tenants["aggressor"].quotas.requests_per_minute is None, "only isolation may stand in its way"
    undivided = tenants["undivided"]
    assert (undivided.ladder.floor, undivided.isolation.in_flight_share_max) == ("full", 1.0)
    default = load_platform(ROOT / "config" / "fake.yaml").ladder
    assert [(rung.name, rung.enter) for rung in platform.ladder.rungs] == [(r.name, r.enter) for r in default.rungs]
