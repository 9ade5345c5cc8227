"""How many replicas a load needs to meet its targets, and what a token costs on them.

A replica with b sequences in its batch computes, per step, one token of each and on average the b x prompt / output prompt
tokens that the finished ones make room for. The mean time of that step is the TPOT; b / (output x step) is the replica's
capacity. TTFT at the 99th percentile is taken as the sum of

    prefill of the 99th-percentile prompt, alone on the replica
    wait for the prompts ahead     M/G/1 (Pollaczek-Khinchine mean), exponential tail, at the replica's utilization
    wait for a place in the batch  M/M/b (Erlang C)

which is pessimistic twice (two tails added, arrivals spread blindly instead of to the least loaded) and optimistic once
(a step under way when the prompt arrives is not counted).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from rungway.errors import RungwayError
from rungway.simulate.errors import SimulationError
from rungway.simulate.load import Load
from rungway.simulate.rig import Rig, largest

REPLICAS_MAX = 1_000_000
TAIL = 100.0  # one request in so many may be later than the target


class SloError(RungwayError):
    """No number of replicas meets the targets."""


@dataclass(frozen=True, slots=True)
class Slo:
    """`headroom`: share of the capacity that stays free at the peak."""

    ttft_ms: float
    tpot_ms: float
    headroom: float = 0.3


@dataclass(frozen=True, slots=True)
class Fleet:
    """`hours_per_m_*`: device hours per million tokens at the load's mean rate. `prefill_share`: of a replica's work."""

    batch: int
    batch_limit: str
    tpot_ms: float
    capacity_per_s: float
    replicas: int
    devices: int
    utilization: float
    utilization_one_lost: float | None
    prefill_p99_ms: float
    wait_p99_ms: float
    prefill_share: float
    hours_per_m_input: float
    hours_per_m_output: float

    @property
    def ttft_p99_ms(self) -> float:
        return self.prefill_p99_ms + self.wait_p99_ms


def size_fleet(rig: Rig, load: Load, slo: Slo) -> Fleet:
    """Raises SloError when no number of replicas would do, SimulationError for a load past `REPLICAS_MAX`."""
    prompt, output = load.prompt_tokens, load.output_tokens
    room = rig.sessions(prompt + output)
    batch = largest(lambda count: mixed_step_ms(rig, load, count) <= slo.tpot_ms, room)
    if batch == 0:
        told = f"a step of one sequence and its share of prompts takes {mixed_step_ms(rig, load, 1):.1f} ms"
        raise SloError(f"TPOT {slo.tpot_ms:g} ms cannot be met: {told}; give more --devices or a faster device")
    prefill_ms = rig.prefill_ms(float(load.prompt_p99))
    if prefill_ms > slo.ttft_ms:
        told = f"the prefill of {load.prompt_p99} tokens alone takes {prefill_ms:.0f} ms"
        raise SloError(f"TTFT {slo.ttft_ms:g} ms cannot be met: {told}; give more --devices or a faster device")
    step_ms = mixed_step_ms(rig, load, batch)
    capacity = 1e3 * batch / (output * step_ms)

    def wait_ms(replicas: int) -> float:
        busy = load.peak_per_s / (replicas * capacity)
        if busy >= 1.0:
            return math.inf
        return prompt_wait_ms(rig, load, busy) + place_wait_ms(batch, output * step_ms, busy)

    replicas = max(1, math.ceil(load.peak_per_s / (capacity * (1.0 - slo.headroom)) - 1e-9))
    replicas = _smallest(replicas, lambda count: prefill_ms + wait_ms(count) <= slo.ttft_ms)
    one_lost = load.peak_per_s / ((replicas - 1) * capacity) if replicas > 1 else None
    per_request_ms = output * step_ms / batch
    prefill_share = (prompt * rig.cost(batch).token_ms + rig.attention_ms(load.prompt_squares)) / per_request_ms
    hours_per_request = replicas * rig.devices / (3600.0 * load.mean_per_s)
    return Fleet(
        batch=batch,
        batch_limit="memory" if batch == room else "TPOT",
        tpot_ms=step_ms,
        capacity_per_s=capacity,
        replicas=replicas,
        devices=replicas * rig.devices,
        utilization=load.peak_per_s / (replicas * capacity),
        utilization_one_lost=one_lost,
        prefill_p99_ms=prefill_ms,
        wait_p99_ms=wait_ms(replicas),
        prefill_share=prefill_share,
        hours_per_m_input=1e6 * hours_per_request * prefill_share / prompt,
        hours_per_m_output=1e6 * hours_per_request * (1.0 - prefill_share) / output,
    )


def mixed_step_ms(rig: Rig, load: Load, batch: int) -> float:
    """Mean step with `batch` sequences and their share of prompts; a sequence is half written on average."""
    tokens = batch * (1.0 + load.prompt_tokens / load.output_tokens)
    cache = batch * (load.prompt_tokens + load.output_tokens / 2.0)
    attention = rig.attention_ms(load.prompt_squares) * batch / load.output_tokens
    return rig.step_ms(tokens, cache) + attention


def prompt_wait_ms(rig: Rig, load: Load, busy: float) -> float:
    """99th percentile of the wait in M/G/1: with probability `busy` one waits, exponentially with the mean of those who do,
    service x (1 + cv^2) / (2 (1 - busy))."""
    if busy * TAIL <= 1.0:
        return 0.0
    service_ms = rig.prefill_ms(load.prompt_tokens, load.prompt_squares)
    spread = load.prompt_squares / load.prompt_tokens**2  # 1 + cv^2
    return service_ms * spread / (2.0 * (1.0 - busy)) * math.log(busy * TAIL)


def place_wait_ms(places: int, held_ms: float, busy: float) -> float:
    """99th percentile of the wait in M/M/b: P(wait > t) = C exp(-(b - a) t / held) with a = busy x b."""
    blocked = 1.0
    offered = busy * places
    for count in range(1, places + 1):
        blocked = offered * blocked / (count + offered * blocked)
    waits = blocked / (1.0 - busy * (1.0 - blocked))
    return held_ms / (places - offered) * math.log(waits * TAIL) if waits * TAIL > 1.0 else 0.0


def _smallest(least: int, fits: Callable[[int], bool]) -> int:
    high = least
    while high <= REPLICAS_MAX and not fits(high):
        high *= 2
    if high > REPLICAS_MAX:
        raise SimulationError(f"the load needs more than {REPLICAS_MAX:,} replicas")
    # Everything from the answer on fits.
    return high - largest(lambda fewer: fits(high - fewer), high - least)
