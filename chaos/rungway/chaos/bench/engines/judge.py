"""From measured rows to verdicts: ratios inside a round, medians over the rounds, bars. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rungway.chaos.bench.engines.rows import KINDS, STREAMS
from rungway.chaos.bench.engines.timeline import Rate, median
from rungway.chaos.bench.report import Report

# side -> streams -> bar of our decode tokens/s over theirs
DECODE_BARS: dict[str, dict[int, float]] = {
    "vllm": {1: 1.3, 4: 1.3, 8: 1.15, 16: 1.15},
    "llama": {1: 0.75, 4: 1.3, 8: 1.3},
    "transformers": {8: 4.0},
}
PREFILL_BAR = 1.2
BANDWIDTH_BAR = 0.6
PREFIX_BAR = 0.15
STARVATION_BAR = 3.0
NAMES = {"vllm": "vLLM CPU", "llama": "llama.cpp server", "transformers": "transformers.generate"}

Round = dict[str, dict[str, Rate]]  # side -> row -> rate


def decode_row(streams: int, kind: str) -> str:
    return f"decode {streams} {kind}"


def rows_of(side: str) -> list[tuple[int, str]]:
    """(streams, kind) that a side is measured at."""
    at = STREAMS if side in ("ours", "vllm", "llama") else tuple(DECODE_BARS[side])
    return [(streams, kind) for streams in at for kind in KINDS]


def ratio_of(rounds: Sequence[Round], side: str, row: str, by: str) -> float:
    """Median over the rounds of ours / theirs. `by`: clock | cpu."""
    pairs = [(sides.get("ours", {}).get(row), sides.get(side, {}).get(row)) for sides in rounds]
    return median(getattr(ours.over(theirs), by) for ours, theirs in pairs if ours is not None and theirs is not None)


def judge_beside(report: Report, rounds: Sequence[Round], sides: Sequence[str], by: str) -> None:
    """Of greedy and sampled decoding, the lower ratio is held against the bar. A side that was asked for and is not there
    misses its bars: nothing was shown."""
    for side in sides:
        for streams, bar in DECODE_BARS.get(side, {}).items():
            found = [ratio_of(rounds, side, decode_row(streams, kind), by) for kind in KINDS]
            lower = math.nan if any(map(math.isnan, found)) else min(found)
            report.at_least(f"decode tokens/s at {streams} / {NAMES[side]}", lower, bar)
        if side == "vllm":
            report.at_least(f"prefill tokens/s / {NAMES[side]}", ratio_of(rounds, side, "prefill", by), PREFILL_BAR)


def judge_bandwidth(report: Report, rounds: Sequence[Round], weight_bytes: float, dtype: str, by: str) -> None:
    """Weight bytes a second at one stream over what reading a buffer of that size reaches, in the same round."""
    found = [
        getattr(sides["ours"][decode_row(1, "greedy")], by) * weight_bytes / getattr(sides["ours"]["bandwidth"], by)
        for sides in rounds
        if {decode_row(1, "greedy"), "bandwidth"} <= sides.get("ours", {}).keys()
    ]
    report.at_least(f"share of weight-streaming bandwidth at 1 stream ({dtype})", median(found), BANDWIDTH_BAR, "")


def judge_prefix(report: Report, cached: Sequence[Rate], uncached: Sequence[Rate], by: str) -> None:
    pairs = zip(cached, uncached, strict=True)
    report.at_most(
        "TTFT behind a shared 1,000-token prompt, prefix cache on / off",
        median(getattr(on.over(off), by) for on, off in pairs),
        PREFIX_BAR,
    )


def judge_starvation(report: Report, found: Sequence[dict[str, float]]) -> None:
    tokens = int(found[0]["prompt_tokens"]) if found else 0
    report.at_most(
        f"p99 gap of 8 streams while a {tokens:,}-token prompt is read / at the same tokens without it",
        median(row["ratio"] for row in found),
        STARVATION_BAR,
    )
