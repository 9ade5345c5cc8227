"""The load of the drills about overload: one tenant of each class, who ask in equal parts, and how much the platform serves."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from rungway.chaos.course import Course, Target
from rungway.chaos.load import LoadError, Phase, Stream
from rungway.chaos.service import tokens_between, zero_ns

MODEL = "large"
CLASSES = ("interactive", "standard", "nightly")  # tenants, most urgent class first
TARGETS = {
    "interactive": Target(ttft_ms=2000.0, tpot_ms=100.0),
    "standard": Target(ttft_ms=4500.0, tpot_ms=100.0),
    "nightly": Target(ttft_ms=8000.0, tpot_ms=100.0),
}
PACE_MS = 50.0  # a step of the engine, and so a token
WAY_MS = (
    100.0  # what a client keeps back for the way to it, or an answer just inside its deadline would miss the target
)
MEASURED_PER_S = 15.0  # twice what it can serve
PROMPT = "Explain how a lock on a canal works."


def capacity_per_s(course: Course, answer_tokens: int, seconds: float) -> float:
    """Answers a second when there is always somebody waiting: measured in the second half of `seconds`. Raises LoadError where
    there is none: nothing can be said of a multiple of it."""
    stream = Stream(
        name="capacity",
        key=course.stage.key("undivided"),
        model=MODEL,
        max_tokens=answer_tokens,
        phases=(Phase("capacity", 0.0, seconds, MEASURED_PER_S),),
        patience_s=seconds,
    )
    samples = course.send(f"capacity: {MEASURED_PER_S:g}/s of {answer_tokens} tokens for {seconds:.0f} s", [stream])
    course.at_rest()
    start_ns = zero_ns(samples, [stream])
    tokens = tokens_between(samples, seconds / 2, seconds, start_ns)
    if not tokens:
        raise LoadError(
            f"no token came between {seconds / 2:g} and {seconds:g} s of the load that measures the capacity"
        )
    return tokens / (seconds / 2) / answer_tokens


def asking(course: Course, phases: Sequence[Phase], *, answer_tokens: int, retries: int = 0) -> list[Stream]:
    """The phases' rates in three equal parts, each under its tenant's key, with the deadline that its class implies."""
    return [
        msgspec.structs.replace(
            stream,
            key=course.stage.key(stream.name),
            deadline_ms=TARGETS[stream.name].ttft_ms + PACE_MS * (answer_tokens - 1) - WAY_MS,
        )
        for stream in _thirds(phases, answer_tokens, retries)
    ]


def undivided(
    course: Course, phases: Sequence[Phase], *, answer_tokens: int, patience_s: float, retries: int = 0
) -> list[Stream]:
    """The same arrivals without what the platform does about overload: one queue in order of arrival, no deadlines, no
    class, and no bound on the queue that matters. Clients leave when their patience ends."""
    key = course.stage.key("undivided")
    streams = _thirds(phases, answer_tokens, retries)
    return [msgspec.structs.replace(stream, key=key, patience_s=patience_s) for stream in streams]


def _thirds(phases: Sequence[Phase], answer_tokens: int, retries: int) -> list[Stream]:
    """A third of the phases' rates for each class, still without a key."""
    third = tuple(Phase(phase.name, phase.start_s, phase.seconds, phase.rate / len(CLASSES)) for phase in phases)
    return [
        Stream(
            name=name,
            key="",
            model=MODEL,
            max_tokens=answer_tokens,
            phases=third,
            poisson=True,
            prompt=PROMPT,
            seed=seed,
            retries=retries,
        )
        for seed, name in enumerate(CLASSES, 1)
    ]
