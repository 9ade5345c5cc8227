"""The load that a capacity plan is for: given in numbers, or measured on a trace."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from rungway.simulate.errors import SimulationError
from rungway.simulate.traces import read_trace
from rungway.simulate.workload import Arrival

PEAK_WINDOW_S = 60.0


@dataclass(frozen=True, slots=True)
class Load:
    """Replicas are sized for the peak, bills for the mean. Tokens per request are means; `prompt_squares` is the mean of
    the squares, `left_out` counts requests that are longer than the context."""

    peak_per_s: float
    mean_per_s: float
    prompt_tokens: float
    output_tokens: float
    prompt_squares: float
    prompt_p99: int
    left_out: int = 0


def steady_load(per_s: float, prompt_tokens: int, output_tokens: int) -> Load:
    """Requests of one length. Raises SimulationError."""
    given = {"--requests-per-s": per_s, "--prompt-tokens": prompt_tokens, "--output-tokens": output_tokens}
    for name, value in given.items():
        if not math.isfinite(value) or value <= 0:
            raise SimulationError(f"{name} must be a number above 0, not {value}")
    square = float(prompt_tokens) ** 2
    return Load(per_s, per_s, float(prompt_tokens), float(output_tokens), square, prompt_tokens)


def trace_load(path: Path, context: int) -> Load:
    """Raises SimulationError for a trace that cannot be read or holds too little to be a rate."""
    return measure_load(read_trace(path, Random(0)), context)


def measure_load(arrivals: Sequence[Arrival], context: int) -> Load:
    """Of arrivals in order of time. The peak is the busiest minute (of a shorter trace: all of it)."""
    fitting = [each for each in arrivals if each.input_tokens + each.output_tokens <= context]
    if not fitting:
        raise SimulationError(f"the trace has no request that fits a context of {context} tokens")
    span_s = fitting[-1].at_s - fitting[0].at_s
    if span_s <= 0:
        raise SimulationError("the trace's requests all come at one moment: that is no rate")
    prompts = sorted(each.input_tokens for each in fitting)
    count = len(fitting)
    mean = count / span_s
    return Load(
        peak_per_s=max(mean, _peak(fitting, min(PEAK_WINDOW_S, span_s))),
        mean_per_s=mean,
        prompt_tokens=sum(prompts) / count,
        output_tokens=sum(each.output_tokens for each in fitting) / count,
        prompt_squares=sum(float(tokens) ** 2 for tokens in prompts) / count,
        prompt_p99=prompts[min(count - 1, int(0.99 * count))],
        left_out=len(arrivals) - count,
    )


def _peak(arrivals: Sequence[Arrival], window_s: float) -> float:
    recent: deque[float] = deque()
    most = 0
    for each in arrivals:
        recent.append(each.at_s)
        while recent[0] <= each.at_s - window_s:
            recent.popleft()
        most = max(most, len(recent))
    return most / window_s
