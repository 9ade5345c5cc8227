"""What is reported of a run, against the plain way of counting it."""

from __future__ import annotations

from random import Random

import pytest

from rungway.simulate.measure import Key, Sample, fairness


def gap_by_pairs(samples: list[Sample], weights: dict[str, float]) -> float:
    """The definition: every pair of one tier, from the sample on since which both wait."""
    worst = 0.0
    keys = sorted({key for sample in samples for key in sample.backlogged})
    for a, b in ((a, b) for a in keys for b in keys if a < b and a[0] == b[0]):
        first: Sample | None = None
        for sample in samples:
            first = (first or sample) if {a, b} <= sample.backlogged else None
            if first is not None:
                gains = [(sample.served[key] - first.served[key]) / weights[key[1]] for key in (a, b)]
                worst = max(worst, abs(gains[0] - gains[1]))
    return worst


@pytest.mark.parametrize("seed", range(20))
def test_the_gap_is_the_largest_of_any_two_that_wait_together(seed: int) -> None:
    rng = Random(seed)
    keys: list[Key] = [(tier, f"t{number}") for tier in ("small", "large") for number in range(6)]
    weights = {f"t{number}": float(rng.randint(1, 4)) for number in range(6)}
    served = dict.fromkeys(keys, 0.0)
    waiting: set[Key] = set()
    samples = []
    for second in range(40):
        served = {key: value + rng.randint(0, 100) for key, value in served.items()}
        waiting ^= {key for key in keys if rng.random() < 0.15}
        samples.append(Sample(float(second), served, frozenset(waiting), {}, {}, {}))
    found = fairness(samples, weights, bound=0.0).gap_max
    assert found == pytest.approx(gap_by_pairs(samples, weights)) and found > 0
