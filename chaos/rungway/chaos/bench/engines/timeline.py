"""What an engine was asked to do and when its tokens came; rates, first tokens and gaps from that. Pure.

Times are seconds since the job was handed over, by the clock; `cpu_s` is the processor time that the engine's process had
used by then, over all its threads.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import NamedTuple


class Event(NamedTuple):
    """`tokens` of a stream arrived together."""

    stream: int
    at_s: float
    tokens: int
    cpu_s: float


@dataclass(frozen=True)
class Job:
    """Prompts that arrive together, each answered with exactly `max_tokens` tokens, end tokens ignored.

    `late`: a prompt that arrives when each stream has `late_after` tokens; with its first token the job is over and what
    still runs is cancelled. `share`: whose prefix cache the prompts are looked up in, where an engine knows owners.
    """

    prompts: list[list[int]]
    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    late: list[int] = field(default_factory=list)
    late_after: int = 0
    share: str = "bench"


@dataclass(frozen=True)
class Timeline:
    """`late_at_s` is when the late prompt was handed over, nan without one; its stream's number is that of the prompts."""

    events: list[Event]
    late_at_s: float = math.nan

    def of(self, stream: int) -> list[Event]:
        return [event for event in self.events if event.stream == stream]

    def first_s(self, stream: int) -> float:
        """When a stream's first token came; nan where none did."""
        return next((event.at_s for event in self.events if event.stream == stream), math.nan)

    def reached_s(self, stream: int, tokens: int) -> float:
        """When a stream had so many tokens; nan where it never had."""
        totals = accumulate(event.tokens for event in self.of(stream))
        return next((event.at_s for event, got in zip(self.of(stream), totals, strict=True) if got >= tokens), math.nan)


class Rate(NamedTuple):
    """Tokens a second, by the clock and by processor time; nan where there was nothing to measure."""

    clock: float
    cpu: float

    def over(self, other: Rate) -> Rate:
        return Rate(ratio(self.clock, other.clock), ratio(self.cpu, other.cpu))


def decode_rate(line: Timeline, streams: int) -> Rate:
    """While all `streams` are decoding: from the last one's first token to the first one's last token."""
    ends = [(found[0], found[-1]) for stream in range(streams) if (found := line.of(stream))]
    if len(ends) < streams:
        return Rate(math.nan, math.nan)
    start = max((first for first, _ in ends), key=lambda event: event.at_s)
    stop = min((last for _, last in ends), key=lambda event: event.at_s)
    tokens = sum(event.tokens for event in line.events if start.at_s < event.at_s <= stop.at_s)
    return Rate(ratio(tokens, stop.at_s - start.at_s), ratio(tokens, stop.cpu_s - start.cpu_s))


def prefill_rate(line: Timeline, prompts: Sequence[Sequence[int]], cpu_before_s: float) -> Rate:
    """Prompt tokens of all prompts over the time until the last one's first token."""
    firsts = [next(iter(line.of(stream)), None) for stream in range(len(prompts))]
    known = [first for first in firsts if first is not None]
    if len(known) < len(prompts):
        return Rate(math.nan, math.nan)
    last = max(known, key=lambda event: event.at_s)
    tokens = sum(map(len, prompts))
    return Rate(ratio(tokens, last.at_s), ratio(tokens, last.cpu_s - cpu_before_s))


def gaps_s(line: Timeline, streams: int, since_s: float, until_s: float, by: str = "clock") -> list[float]:
    """Between a stream's neighbouring events whose later one lies in (since, until]. `by`: clock, or cpu for the processor time
    that the engine spent in between."""
    found = []
    for stream in range(streams):
        for before, after in pairwise(line.of(stream)):
            if since_s < after.at_s <= until_s:
                found.append(after.at_s - before.at_s if by == "clock" else after.cpu_s - before.cpu_s)
    return found


class Starved(NamedTuple):
    """p99 gaps of streams, seconds: once all had begun and before a late prompt came; from then to its first token; and of the
    same streams, the same tokens of each, without it."""

    before: float
    during: float
    alone: float


def tokens_beside(line: Timeline, streams: int) -> int:
    """Tokens that each of the streams had at least when the late prompt had its first."""
    until_s = line.first_s(streams)
    return min(sum(event.tokens for event in line.of(stream) if event.at_s <= until_s) for stream in range(streams))


def starvation(line: Timeline, alone: Timeline, streams: int, late_after: int, by: str = "clock") -> Starved:
    """`alone`: the same job without the late prompt, which came when each stream had `late_after` tokens."""
    every = range(streams)
    begun = max((line.first_s(stream) for stream in every), default=math.nan)
    after = max((alone.reached_s(stream, late_after) for stream in every), default=math.nan)
    spans = (
        (line, begun, line.late_at_s),
        (line, line.late_at_s, line.first_s(streams)),
        (alone, after, math.inf),
    )
    return Starved(*(percentile(gaps_s(whole, streams, since, until, by), 0.99) for whole, since, until in spans))


def percentile(values: Sequence[float], share: float) -> float:
    """Nearest rank; nan of nothing."""
    if not values:
        return math.nan
    return sorted(values)[min(len(values) - 1, math.ceil(share * len(values)) - 1)]


def ratio(part: float, whole: float) -> float:
    """nan where the whole is nothing: a side that measured nothing proves nothing."""
    return part / whole if whole > 0 else math.nan


def median(values: Iterable[float]) -> float:
    """Of the rounds that measured something; nan where none did."""
    known = [value for value in values if not math.isnan(value)]
    return statistics.median(known) if known else math.nan
