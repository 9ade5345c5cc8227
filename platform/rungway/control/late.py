"""Relegation: what can no longer begin in time goes behind what still can, and the ladder answers it by its own wait.

A request without a deadline of its own is on time while it has waited, or will, for no longer than
`controller.shed.target_factor` first-token targets of its tenant. One that is not keeps its tenant's place among the tenants,
but the tenant's requests that are on time go first (`policies/flow.Flow`): a place that is worth something to nobody any more
would cost somebody else his target. It does not wait for nothing: as its wait reaches the rungs of the ladder it is offered what
they say, one request at a time, whatever rung the others stand on: a smaller tier, a cached answer, a template, a deferral. So the
model answers who can have it in time, and the ladder who can not. Where neither does, it is refused once its wait is one for
which the ramps turn new requests away, long before its client gives up on it.
"""

from __future__ import annotations

from rungway.clock import NS_PER_MS
from rungway.contracts import LadderSpec
from rungway.control.cell import Cell, Now
from rungway.control.flight import Flight
from rungway.control.pool import Pool
from rungway.control.sides import is_over
from rungway.policies.ladder import smaller_tier, target_rung
from rungway.policies.shed import draw, probability, ramp_of
from rungway.types import Risk

NEVER_NS = 1 << 62


def look(cell: Cell, flight: Flight, pool: Pool, now: Now) -> float:
    """Expected wait in this pool among those on time, seconds; notes in `flight.late` by how much it would be late there
    (waits in first-token targets). Nothing is expected for one that waits already: those behind it would count against it.
    """
    flight.late.pop(pool.name, None)
    entry = flight.entry
    wait_s = 0.0 if entry is not None else pool.expected_wait_s(flight.state, flight.band, now.mono_ns)
    factor = cell.platform.controller.shed.target_factor
    if factor is None or flight.ask.deadline_ms is not None or flight.begun:
        return wait_s
    target_s = flight.state.contract.slo.ttft_ms_p99 / 1000.0
    waited_s = (now.mono_ns - flight.submitted_ns) / 1e9
    here = entry is not None and flight.pool == pool.name
    if here and entry is not None:
        if entry.late:
            flight.late[pool.name] = waited_s / target_s
    elif waited_s + wait_s > factor * target_s:
        behind_s = pool.expected_wait_s(flight.state, flight.band, now.mono_ns, late=True)
        flight.late[pool.name] = (waited_s + behind_s) / target_s
    return wait_s


def own_rung(load: float, ladder: LadderSpec) -> int:
    """The rung of a late request: as deep as its own wait asks for, and never above the smaller tier."""
    return max(smaller_tier(ladder), target_rung(load, ladder))


def latest_start_ns(cell: Cell, flight: Flight, prefill_ms: float) -> int | None:
    """When a request without a deadline has to begin for its first token to come in time; None where that is all one."""
    factor = cell.platform.controller.shed.target_factor
    if factor is None:
        return None
    left_ms = factor * flight.state.contract.slo.ttft_ms_p99 - prefill_ms
    return flight.submitted_ns + int(max(0.0, left_ms) * NS_PER_MS)


def next_look_ns(cell: Cell, flight: Flight) -> int:
    """When a late request's own wait reaches the next rung, or is too long."""
    load = flight.late.get(flight.pool, 0.0)
    ramp = ramp_of(cell.platform.controller.shed, flight.ask.tenant_class)
    patience = draw(flight.ask.request_id) * (ramp.full - ramp.begin)
    moments = [rung.enter for rung in cell.platform.ladder.rungs] + [ramp.begin + patience, ramp.full + patience]
    following = min((moment for moment in moments if moment > load), default=None)
    if following is None:
        return NEVER_NS
    return flight.submitted_ns + int(following * flight.state.contract.slo.ttft_ms_p99 * NS_PER_MS)


def waited_too_long(cell: Cell, flight: Flight, now: Now) -> bool:
    """Whether a late request's own wait is one for which the ramps turn away. Each leaves at a moment of its own between
    the ramp's ends, so that those who came together do not come back together. A high risk, which the ladder may not answer
    either, waits for as long as the queue lets it."""
    if flight.ask.risk is Risk.HIGH:
        return False
    load = (now.mono_ns - flight.submitted_ns) / (flight.state.contract.slo.ttft_ms_p99 * NS_PER_MS)
    ramp = ramp_of(cell.platform.controller.shed, flight.ask.tenant_class)
    over = is_over(cell.pools[flight.pool], flight.state, now.mono_ns)
    return draw(flight.ask.request_id) < probability(load, ramp, over=over)


def relegate(pool: Pool, flight: Flight) -> None:
    """A request that waits among those on time is late from now on."""
    assert flight.entry is not None and not flight.entry.late
    pool.queue.relegate(flight.entry)
    pool.lag(flight.lined_tokens, flight.state, flight.band)
