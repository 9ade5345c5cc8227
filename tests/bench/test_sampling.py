"""The sampling benchmark runs every way on the same logits and holds the worst row against its bar."""

from __future__ import annotations

from rungway.chaos.bench.sampling import ASKS, SHAPES, bench_sampling


def test_a_row_for_every_combination() -> None:
    said: list[str] = []
    report = bench_sampling(say=said.append, vocabularies=(500, 900), batches=(1, 2), rounds=1)
    assert len(report.control) == len(said) == 2 * len(SHAPES) * 2 * len(ASKS)
    assert {(row["vocabulary"], row["batch"]) for row in report.control} == {(500, 1), (500, 2), (900, 1), (900, 2)}
    assert report.verdicts[0].measured == min(row["reference / compiled"] for row in report.control)
    assert all(row[name] > 0 for row in report.control for name in ("compiled", "NumPy", "reference"))
