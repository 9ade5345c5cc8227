"""What clients were served, second by second, from their samples alone. Times in seconds after the start of the load."""

from __future__ import annotations

from collections.abc import Sequence

from rungway.chaos.course import Target
from rungway.chaos.load import Sample, Stream, arrivals

_NS_PER_S = 1_000_000_000


def zero_ns(samples: Sequence[Sample], streams: Sequence[Stream]) -> int:
    """Wall-clock time of the load's start: the earliest plan against the earliest planned moment."""
    first_s = min(at for stream in streams for at, _ in arrivals(stream)[:1])
    return min(sample.planned_wall_ns for sample in samples) - int(first_s * _NS_PER_S)


def done_s(sample: Sample, start_ns: int) -> float:
    return (sample.planned_wall_ns - start_ns) / _NS_PER_S + sample.e2e_ms / 1000.0


def first_s(sample: Sample, start_ns: int) -> float | None:
    """Of the first token; None where there was none."""
    if sample.ttft_ms is None:
        return None
    return (sample.planned_wall_ns - start_ns) / _NS_PER_S + sample.ttft_ms / 1000.0


def tokens_by(sample: Sample, at_s: float, start_ns: int) -> float:
    """Tokens of a whole answer that were out at a moment: the first at the first, the others evenly until the end."""
    began_s, ended_s = first_s(sample, start_ns), done_s(sample, start_ns)
    if began_s is None or not sample.done or at_s < began_s:
        return 0.0
    if at_s >= ended_s or ended_s <= began_s:
        return float(sample.tokens)
    return 1.0 + (sample.tokens - 1) * (at_s - began_s) / (ended_s - began_s)


def tokens_between(samples: Sequence[Sample], from_s: float, to_s: float, start_ns: int) -> float:
    """Of whole answers. By tokens and not by answers, or a short window would be off by whole answers at both its ends."""
    return sum(tokens_by(s, to_s, start_ns) - tokens_by(s, from_s, start_ns) for s in samples)


def good_per_s(
    samples: Sequence[Sample], targets: dict[str, Target], from_s: float, to_s: float, start_ns: int
) -> float:
    """Answers a second within their stream's target that ended in a window, each by the part of it that lies inside."""
    good = [sample for sample in samples if targets[sample.stream].met(sample)]
    parts = sum((tokens_by(s, to_s, start_ns) - tokens_by(s, from_s, start_ns)) / max(1, s.tokens) for s in good)
    return parts / (to_s - from_s)
