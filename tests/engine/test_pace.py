"""When drafts are made, and how many: on a virtual clock, with machines and texts of known kinds."""

from __future__ import annotations

import random

import pytest

from rungway.engine.pace import GAIN_MIN, PLAIN_AFTER, PROBE_AFTER_MAX, PROBE_STEPS, Costs, Pace


class Machine:
    """Steps of a known cost by rows, drafts of a known cost, and texts in which a draft is right with a known chance."""

    def __init__(self, pace: Pace, fixed: float, per_row: float, *, draft: float = 0.0, made: bool = True) -> None:
        self.pace = pace
        self.fixed, self.per_row, self.draft, self.made = fixed, per_row, draft, made
        self.rng = random.Random(1)
        self.spent = self.tokens = 0.0
        self.lengths: list[int] = []

    def run(self, steps: int, chance: float, batch: int = 1) -> float:
        """Tokens for the time, in units of decoding without drafts."""
        spent = tokens = 0.0
        for _ in range(steps):
            count = self.pace.choose(batch, [(0, 8)] * batch, made=self.made)
            self.lengths.append(count)
            cost = self.fixed + self.per_row * batch * (1 + count)
            self.pace.steps.learn(batch * (1 + count), int(cost * self.rng.uniform(0.97, 1.1)))
            if count and not self.made:
                self.pace.drafts.learn(batch, int(self.draft))
            for _ in range(batch):
                right = next((at for at in range(count) if self.rng.random() >= chance), count)
                tokens += 1 + right
                if count:
                    self.pace.judge(0, count, right)
            spent += cost + (0.0 if self.made else count * self.draft)
        return tokens / spent * (self.fixed + self.per_row * batch) / batch


@pytest.mark.parametrize(("chance", "least", "most"), [(0.9, 2.0, 9.0), (0.6, 1.3, 3.0), (0.02, 0.97, 1.03)])
def test_it_gains_where_drafts_are_right_and_loses_next_to_nothing_where_not(
    chance: float, least: float, most: float
) -> None:
    machine = Machine(Pace(6, 4), fixed=60_000, per_row=3_000)
    machine.run(200, chance)
    assert least <= machine.run(3000, chance) <= most


def test_it_switches_off_when_texts_change_and_on_again_when_they_change_back() -> None:
    machine = Machine(Pace(5, 4), fixed=60_000, per_row=6_000)
    machine.run(300, 0.85)
    assert sum(map(bool, machine.lengths[-100:])) > 90
    machine.run(600, 0.01)
    assert sum(map(bool, machine.lengths[-200:])) < 40
    machine.run(2 * PROBE_AFTER_MAX, 0.85)
    assert sum(map(bool, machine.lengths[-100:])) > 90


def test_looks_that_find_nothing_become_rare() -> None:
    machine = Machine(Pace(5, 4), fixed=20_000, per_row=20_000)
    machine.run(2000, 0.1)
    del machine.lengths[:]
    machine.run(8 * PROBE_AFTER_MAX, 0.1)
    assert 0 < sum(map(bool, machine.lengths)) <= 9 * PROBE_STEPS


def test_a_draft_model_has_to_earn_its_own_time() -> None:
    dear = Machine(Pace(4, 4), fixed=60_000, per_row=3_000, draft=45_000, made=False)
    cheap = Machine(Pace(4, 4), fixed=60_000, per_row=3_000, draft=12_000, made=False)
    assert 0.95 < dear.run(3000, 0.6) < 1.03
    assert cheap.run(3000, 0.8) > 1.4
    assert sum(map(bool, dear.lengths[-500:])) < 50 < 400 < sum(map(bool, cheap.lengths[-500:]))


def test_reading_new_texts_counts_against_a_draft_model() -> None:
    pace = Pace(4, 4)
    machine = Machine(pace, fixed=60_000, per_row=3_000, draft=12_000, made=False)
    machine.run(300, 0.8)
    for _ in range(200):
        pace.prepared(400_000)
    del machine.lengths[:]
    machine.run(50, 0.8)
    assert not any(machine.lengths)


def test_rows_that_cost_as_much_as_steps_get_no_drafts() -> None:
    """A full batch: the machine is busy with the rows themselves."""
    machine = Machine(Pace(5, 64), fixed=1_000, per_row=10_000)
    machine.run(500, 0.5, batch=8)
    assert sum(map(bool, machine.lengths[-100:])) <= PROBE_STEPS


def test_none_beyond_the_batch_that_was_set() -> None:
    pace = Pace(5, 4)
    assert pace.choose(5, [(8, 5)] * 5, made=True) == 0 and pace.choose(4, [(8, 5)] * 4, made=True) > 0


def test_a_step_without_drafts_now_and_then_keeps_the_comparison_fresh() -> None:
    machine = Machine(Pace(5, 4), fixed=60_000, per_row=1_000)
    machine.run(10 * PLAIN_AFTER, 0.95)
    assert machine.lengths[PLAIN_AFTER:].count(0) in range(8, 11)


def test_the_longest_that_pays_is_not_always_the_longest() -> None:
    machine = Machine(Pace(8, 4), fixed=50_000, per_row=10_000)
    machine.run(1500, 0.5)
    tail = [length for length in machine.lengths[-200:] if length]
    assert 1 <= sum(tail) / len(tail) <= 3


def test_costs_between_known_sizes_and_outliers() -> None:
    costs = Costs()
    assert costs.of(3) == 1.0
    costs.learn(1, 100)
    assert costs.of(8) == 100, "what was never measured is tried"
    costs.learn(5, 180)
    assert costs.of(3) == pytest.approx(140) and costs.of(9) == 180
    for _ in range(20):
        costs.learn(1, 100)
    costs.learn(1, 10**9)
    assert costs.of(1) < 120


def test_a_grade_learns_from_what_was_judged_only() -> None:
    pace = Pace(5, 4)
    before = pace.rate(7)
    for _ in range(50):
        pace.judge(2, 5, 1)
    assert pace.rate(2) > 0.95 and pace.rate(3) < 0.05 and pace.rate(7) == before
    assert GAIN_MIN > 1.0
