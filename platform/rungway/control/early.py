"""Asks that reach a restarted controller before the replicas do. Refusing them would be wrong: the replicas run, they only have
not found the new controller yet. They wait for a replica of each tier that they ask for, within a bound of time, and of each
tenant as many as its line, or a gateway without a controller, may hold."""

from __future__ import annotations

import msgspec

from rungway.clock import NS_PER_MS, NS_PER_S
from rungway.control.admit import submit
from rungway.control.cell import Cell, Now
from rungway.types import Ask


def restarted(cell: Cell, now: Now) -> None:
    """There was a controller before this one: its replicas are on their way here."""
    cell.early_until_ns = now.mono_ns + int(cell.platform.controller.orphan_wait_s * NS_PER_S)


def arrive(cell: Cell, ask: Ask, now: Now) -> None:
    """Judge it, or keep it for a moment."""
    known = ask.request_id in cell.flights or ask.request_id in cell.settled
    if known or now.mono_ns >= cell.early_until_ns or _served(cell, ask) or _full(cell, ask):
        submit(cell, ask, now)
    elif ask.request_id not in cell.early:
        cell.early[ask.request_id] = ask, now.mono_ns
        cell.early_of[ask.tenant] += 1


def forget(cell: Cell, request_id: str) -> None:
    """It waits no more; harmless where it did not."""
    if (kept := cell.early.pop(request_id, None)) is not None:
        cell.early_of[kept[0].tenant] -= 1


def leave(cell: Cell, gateway_id: str) -> None:
    """Its gateway is gone; if it comes back, its hello names what it still has."""
    for request_id in [name for name, (ask, _) in cell.early.items() if ask.gateway_id == gateway_id]:
        forget(cell, request_id)


def admit_early(cell: Cell, now: Now) -> None:
    """Those whose replicas are here now, or who have waited long enough, in order of arrival."""
    if not cell.early:
        return
    over = now.mono_ns >= cell.early_until_ns
    for request_id, (ask, since_ns) in list(cell.early.items()):
        if over or _served(cell, ask):
            forget(cell, request_id)
            if ask.deadline_ms is not None:
                left_ms = ask.deadline_ms - (now.mono_ns - since_ns) / NS_PER_MS
                ask = msgspec.structs.replace(ask, deadline_ms=max(1.0, left_ms))
            submit(cell, ask, now)


def _served(cell: Cell, ask: Ask) -> bool:
    return all(cell.pools[tier].views for tier in ask.tiers if tier in cell.pools)


def _full(cell: Cell, ask: Ask) -> bool:
    """Its tenant has as many here as may wait in its line, or at a gateway while nobody is here; or it is none."""
    state = cell.tenants.get(ask.tenant)
    if state is None:
        return True
    most = max(state.contract.quotas.queue_max, cell.platform.controller.lease.waiting_max)
    return ask.request_id not in cell.early and cell.early_of[ask.tenant] >= most
