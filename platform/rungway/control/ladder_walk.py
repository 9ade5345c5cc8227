"""Moving the rungs: read each scope's pressure, step its state machine, and offer anew to whoever waits below."""

from __future__ import annotations

from rungway.control.admit import readmit
from rungway.control.cell import Cell, Now
from rungway.control.flight import Flight
from rungway.control.pool import Pool, Scope
from rungway.control.sides import over_share
from rungway.policies.ladder import at_rest, step
from rungway.policies.pressure import DEGRADES_MAX, QUIET, PoolSignals, pressure


def walk(cell: Cell, now: Now) -> None:
    """One control step over all pools and scopes. Changes are audited; waiting requests of a changed pool get new
    offers."""
    for pool in cell.pools.values():
        changed = False
        signals = _signals(cell, pool, now)
        for scope, before in pool.scopes.items():
            value, signal = pressure(signals[scope]) if scope in signals else QUIET
            pool.pressures[scope] = (round(value, 3), signal)
            if scope not in signals and at_rest(before):
                continue  # most scopes, most of the time
            state, transition = step(before, value, now.mono_ns, cell.platform.ladder)
            pool.scopes[scope] = state
            if transition is None:
                continue
            changed = True
            names = cell.platform.ladder.rungs
            cell.audit(
                "rung",
                now,
                rung=transition.to_rung,
                pool=pool.name,
                tenant_class=scope[0],
                side=scope[1],
                rung_from=names[transition.from_rung].name,
                rung_to=names[transition.to_rung].name,
                pressure=round(transition.pressure, 3),
                signal=signal,
                why=transition.why,
            )
        if changed or len(pool.tier.versions) > 1:
            reoffer(cell, pool, now, all_of_them=changed)


def reoffer(cell: Cell, pool: Pool, now: Now, *, all_of_them: bool = True) -> None:
    """Waiting requests get the offer that the present rungs allow: a smaller tier, a cached answer, or a deferral. Where not
    `all_of_them`, those only whose version has lost its replicas: another version serves them."""
    waiting = [entry.payload for entry in pool.queue.entries()]
    for flight in waiting:
        assert isinstance(flight, Flight)
        if not flight.begun and flight.gateway_lost_ns is None and (all_of_them or pool.strands(flight)):
            readmit(cell, flight, now)


def _signals(cell: Cell, pool: Pool, now: Now) -> dict[Scope, PoolSignals]:
    """Per scope in which somebody waits: the longest wait against its own TTFT target, of what is late only so much of it.
    What the whole pool suffers from (KV, slots) is put on the tenants over their share while there are any, else on
    everybody who waits."""
    over = over_share(pool, now.mono_ns) if pool.queue.depth() else frozenset()
    worst: dict[Scope, tuple[float, float, float]] = {}
    for entry in pool.queue.entries():
        flight = entry.payload
        assert isinstance(flight, Flight)
        scope = (str(flight.ask.tenant_class), "over" if entry.tenant in over else "within")
        wait_ms = (now.mono_ns - entry.enqueued_ns) / 1e6
        target_ms = flight.state.contract.slo.ttft_ms_p99
        if entry.late:  # the ladder answers it by its own wait; the others may be asked to take cheaper answers for it
            wait_ms = min(wait_ms, DEGRADES_MAX * target_ms)
        if wait_ms / target_ms > worst.get(scope, (0.0, 0.0, 1.0))[0]:
            worst[scope] = (wait_ms / target_ms, wait_ms, target_ms)
    running, slots = pool.in_flight()
    signals: dict[Scope, PoolSignals] = {}
    for scope, (_, wait_ms, target_ms) in worst.items():
        shared = scope[1] == "over" or not over
        signals[scope] = PoolSignals(
            queue_wait_ms=wait_ms,
            ttft_target_ms=target_ms,
            kv_use=pool.kv_use if shared else 0.0,
            in_flight=float(running) if shared else 0.0,
            capacity=float(slots),
            slo_burn=pool.slo_burn(scope[0]) if shared else 0.0,
        )
    return signals
