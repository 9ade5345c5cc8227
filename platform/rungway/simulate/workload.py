"""What clients want: one `Arrival` per logical request, in order of time. Files come through `traces.py`; the rest is made
here from a seed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from random import Random

from rungway.contracts import TenantClass
from rungway.types import Action, Risk

TOKENS_MAX = 1 << 30


@dataclass(frozen=True, slots=True)
class Arrival:
    """`output_tokens` is how long the answer will be; `output_bound` what the client allows (`max_tokens`, None = it does
    not say). `blocks`: hashes of the prompt's 512-token blocks. `leaves_ms`: the client hangs up that long after."""

    at_s: float
    tenant: str
    input_tokens: int
    output_tokens: int
    output_bound: int | None = None
    tenant_class: TenantClass | None = None
    risk: Risk = Risk.NORMAL
    action: Action = Action.READ
    model: str = ""
    deadline_ms: float | None = None
    leaves_ms: float | None = None
    session: str | None = None
    blocks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Stream:
    """A tenant's steady wish: Poisson arrivals (`even` = evenly spaced instead), lengths uniform in their ranges."""

    tenant: str
    per_s: float
    input_tokens: tuple[int, int]
    output_tokens: tuple[int, int]
    start_s: float = 0.0
    end_s: float = 60.0
    even: bool = False
    tenant_class: TenantClass | None = None
    risk_high_share: float = 0.0
    deadline_ms: float | None = None
    cancel_share: float = 0.0
    model: str = ""


def arrivals(streams: Iterable[Stream], rng: Random) -> list[Arrival]:
    """All streams merged, in order of time."""
    made = [arrival for stream in streams for arrival in _of(stream, rng)]
    made.sort(key=lambda arrival: arrival.at_s)
    return made


def _of(stream: Stream, rng: Random) -> Iterator[Arrival]:
    at_s = stream.start_s
    while stream.per_s > 0:
        at_s += 1.0 / stream.per_s if stream.even else rng.expovariate(stream.per_s)
        if at_s >= stream.end_s:
            return
        output = rng.randint(*stream.output_tokens)
        yield Arrival(
            at_s,
            stream.tenant,
            rng.randint(*stream.input_tokens),
            output,
            output_bound=output,
            tenant_class=stream.tenant_class,
            risk=Risk.HIGH if rng.random() < stream.risk_high_share else Risk.NORMAL,
            deadline_ms=stream.deadline_ms,
            leaves_ms=rng.uniform(1.0, 3000.0) if rng.random() < stream.cancel_share else None,
            model=stream.model,
        )


def arrival(at_s: float, tenant: str, prompt: int, output: int, blocks: tuple[int, ...] = ()) -> Arrival:
    """One of a trace: at least a token each way, and a plausible bound."""
    output = max(1, output)
    return Arrival(at_s, tenant, max(1, prompt), output, bound_for(output), blocks=blocks)


def tokens(value: object) -> int:
    """A trace's number of tokens. Raises ValueError for what is none, or more than any model reads."""
    text = str(value)
    if not (text.strip().isdecimal() and int(text) <= TOKENS_MAX):
        raise ValueError(f"{text[:30]!r} is no number of tokens")
    return int(text)


def bound_for(output_tokens: int) -> int:
    """A plausible `max_tokens` of a client whose answer turns out `output_tokens` long: the next power of two."""
    return max(16, 1 << math.ceil(math.log2(max(1, output_tokens))))


def speed_up(items: Iterable[Arrival], speed: float, duration_s: float | None = None) -> list[Arrival]:
    """Time compressed by `speed`, cut after `duration_s` of the compressed time."""
    squeezed = (replace(item, at_s=item.at_s / speed) for item in items)
    return [item for item in squeezed if duration_s is None or item.at_s < duration_s]
