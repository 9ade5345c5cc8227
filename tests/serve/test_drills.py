"""A short form of a drill against a real platform; the full ones are `rungway drill`, whose bars need minutes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from rungway.chaos import fair_shares, stage
from rungway.chaos.course import Course
from rungway.chaos.stage import Stage

pytestmark = pytest.mark.serve

ROOT = Path(__file__).parents[2]
MEASURED_S = 20.0


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    with stage.own(ROOT / "config" / "drill-fairness.yaml", tmp_path_factory.mktemp("drill") / "state") as running:
        yield running


def test_four_backlogged_tenants_are_served_by_their_weights(place: Stage) -> None:
    with Course(place, print) as course:
        samples, start_ns = fair_shares.together(course, MEASURED_S)
        report = course.report("short", [], [])
    # How late a busy machine sends is no matter here: who always waits is served by weight, not by arrival.
    assert [verdict for verdict in report.verdicts if not verdict.ok and verdict.what != "load sent as planned"] == []
    window = (fair_shares.WARM_S, fair_shares.WARM_S + MEASURED_S)
    assert fair_shares.least_waiting(samples, *window, start_ns) > 0
    # In 20 s the smallest share is about 35 answers, as its clients saw them: one more or less at each end is 5 %, and on a
    # busy machine they see one late. By how much they ask it would be 2.5 for all.
    found = fair_shares.ratios(fair_shares.served(samples, *window, start_ns))
    assert found == pytest.approx({name: float(weight) for name, weight in fair_shares.WEIGHTS.items()}, rel=0.12)
