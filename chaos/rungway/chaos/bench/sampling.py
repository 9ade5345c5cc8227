"""What drawing a batch of tokens costs: the compiled way, NumPy's, and the reference, which sorts the whole vocabulary.

Processor time of one thread, the three one after the other in every round, on the same random logits.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import numpy as np
import torch

from rungway.chaos.bench.report import Report, Say, surroundings
from rungway.clock import NS_PER_MS
from rungway.kernels import sampling_reference
from rungway.kernels.cpu import draw

VOCABULARIES, BATCHES = (49_152, 151_936), (1, 8, 16)
SHAPES = {"peaked": 3.0, "flat": 0.5}  # deviation of the logits; peaked ones have five tokens far above
FAR_ABOVE = 12.0
ASKS: dict[str, dict[str, float]] = {
    "temperature": {},
    "top-p 0.95": {"top_p": 0.95},
    "top-k 50, top-p 0.95": {"top_k": 50, "top_p": 0.95},
    "min-p 0.05": {"min_p": 0.05},
}
BAR = 1.0  # times as fast as the reference, in the worst row
ROUNDS = 5


def bench_sampling(
    *, say: Say, vocabularies: tuple[int, ...] = VOCABULARIES, batches: tuple[int, ...] = BATCHES, rounds: int = ROUNDS
) -> Report:
    """A row for each vocabulary, shape, batch and ask; ms per batch, medians over the rounds."""
    report = Report("sampling", notes=[surroundings()])
    for vocabulary in vocabularies:
        for shape, deviation in SHAPES.items():
            for batch in batches:
                logits = torch.randn(batch, vocabulary, generator=torch.Generator().manual_seed(1)) * deviation
                if shape == "peaked":
                    logits[:, :5] += FAR_ABOVE
                for name, ask in ASKS.items():
                    times = _measured(logits, {"top_k": 0, "top_p": 1.0, "min_p": 0.0, **ask}, rounds)
                    row = {"vocabulary": vocabulary, "logits": shape, "batch": batch, "ask": name, **times}
                    report.control.append(row)
                    say(" ".join(map(str, row.values())))
    report.at_least("reference / compiled, the worst", min(row["reference / compiled"] for row in report.control), BAR)
    return report


def _measured(logits: torch.Tensor, ask: dict[str, float], rounds: int) -> dict[str, float]:
    batch = len(logits)
    points = [(at * 2**60 + 12345) % 2**64 for at in range(batch)]
    given = {"temperature": 1.0, "top_k": int(ask["top_k"]), "top_p": ask["top_p"], "min_p": ask["min_p"]}
    asks = np.array([draw.ask(at, point, **given) for at, point in enumerate(points)], dtype=draw.ASK)  # type: ignore[arg-type]
    columns = [torch.full((batch,), float(given[name])) for name in ("temperature", "top_k", "top_p", "min_p")]
    columns.append(torch.tensor([point / 2.0**64 for point in points], dtype=torch.float64))
    ways: dict[str, Callable[[], object]] = {
        "compiled": lambda: draw.draw(logits, asks),
        "NumPy": lambda: draw.draw_plainly(logits, asks),
        "reference": lambda: sampling_reference.sample(logits, *columns),
    }
    spent: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            started = time.thread_time_ns()
            way()
            spent[name].append((time.thread_time_ns() - started) / NS_PER_MS)
    ms = {name: round(median(values), 3) for name, values in spent.items()}
    return ms | {
        f"reference / {name}": round(ms["reference"] / max(ms[name], 1e-3), 1) for name in ("compiled", "NumPy")
    }
