"""Usage that nobody claims: replicas reported it, but this controller never saw the request. Its gateway died, or an
earlier controller did while the request ended; then the gateway's Finish, if it came, says how."""

from __future__ import annotations

from collections.abc import Collection

from rungway.control.cell import Cell, Now, Orphan, Stray
from rungway.messages import AttemptAck, FinishAck
from rungway.outcomes import Outcome
from rungway.types import AttemptEnd, Billing, Finish, LedgerRow

ORPHANS_MAX = 10_000


def keep_stray(cell: Cell, gateway_id: str, finish: Finish, now: Now) -> None:
    """Keep the client's side of an unknown request until an engine's side says whose it is. It is acknowledged with the
    row, or when no engine speaks up: then an earlier controller has written it."""
    if finish.request_id not in cell.strays:
        cell.strays[finish.request_id] = Stray(finish, now.mono_ns, gateway_id)
        if len(cell.strays) > ORPHANS_MAX:
            cell.strays.popitem(last=False)


def sweep_orphans(cell: Cell, wait_ns: int, now: Now) -> None:
    """Close what nobody has claimed for `wait_ns`."""
    due = [
        request_id
        for request_id, tries in cell.orphans.items()
        if any(now.mono_ns - orphan.since_ns > wait_ns for orphan in tries.values())
    ]
    for request_id in due:  # all tries of a request make one row
        write_orphan(cell, cell.orphans.pop(request_id).values(), now)
    for request_id, stray in list(cell.strays.items()):
        if now.mono_ns - stray.since_ns <= 2 * wait_ns:
            break
        if request_id not in cell.orphans:  # else an engine has spoken up, and its row is about to be written
            del cell.strays[request_id]
            cell.effects.held.append((stray.teller, FinishAck([request_id])))


def write_orphan(cell: Cell, orphans: Collection[Orphan], now: Now) -> None:
    """A row from the replicas' own reports: billed is all that the last try emitted and, of earlier ones, what a client
    is known to have received."""
    ends = sorted((orphan.end for orphan in orphans), key=lambda end: end.attempt)
    last = ends[-1]
    stray = cell.strays.pop(last.request_id, None)
    finish = stray.finish if stray is not None else None
    delivered = finish.delivered if finish is not None else {}
    earlier = [
        (end.usage.output_tokens, min(end.usage.output_tokens, delivered.get(end.attempt, 0))) for end in ends[:-1]
    ]
    output = last.usage.output_tokens + sum(paid for _, paid in earlier)
    waste = sum(emitted - paid for emitted, paid in earlier)
    cost = last.billing.price.cost_nusd(
        input_tokens=last.usage.prompt_tokens, cached_tokens=last.usage.cached_tokens, output_tokens=output
    )
    cell.effects.rows.append(_orphan_row(last, last.billing, finish, (output, waste, cost), len(ends)))
    for orphan in orphans:
        cell.effects.held.append((orphan.teller, AttemptAck([(orphan.end.request_id, orphan.end.attempt)])))
    if stray is not None:
        cell.effects.held.append((stray.teller, FinishAck([last.request_id])))
    state = cell.tenants.get(last.billing.tenant)
    if state is not None:
        # Nobody in this process took its tokens: who granted it is gone, or was a gateway with a lease.
        state.requests.take(1, now.mono_ns)
        state.tokens.take(last.usage.prompt_tokens + output, now.mono_ns)
        state.budget.settle(0, cost, now.wall_ns)
    cell.remember(last.request_id, {end.attempt: end.usage.output_tokens for end in ends})


def _orphan_row(
    last: AttemptEnd, billing: Billing, finish: Finish | None, counted: tuple[int, int, int], attempts: int
) -> LedgerRow:
    """`counted`: output tokens, wasted tokens, cost."""
    price, (output, waste, cost) = billing.price, counted
    return LedgerRow(
        request_id=last.request_id,
        started_wall_ns=billing.received_wall_ns,
        ended_wall_ns=last.ended_wall_ns,
        tenant=billing.tenant,
        key_id=billing.key_id,
        tenant_class=billing.tenant_class,
        risk=billing.risk,
        action=billing.action,
        endpoint=billing.endpoint,
        model=billing.model,
        tier=billing.tier,
        version=billing.version,
        rung=billing.rung,
        degraded=",".join(billing.degraded),
        reason=billing.reason,
        outcome=Outcome.GATEWAY_LOST if finish is None else finish.outcome,
        code="" if finish is None else finish.code or "",
        prompt_tokens=last.usage.prompt_tokens,
        cached_tokens=last.usage.cached_tokens,
        output_tokens=output,
        wasted_tokens=waste,
        cost_nusd=cost,
        price_input=price.input,
        price_cached_input=price.cached_input,
        price_output=price.output,
        attempts=attempts,
        replica_id=last.replica_id,
        gateway_id=billing.gateway_id,
        session=billing.session or "",
        cache="off" if finish is None else finish.cache,
        queue_wait_ms=0.0,
        ttft_ms=None if finish is None else finish.ttft_ms,
        tpot_ms=None if finish is None else finish.tpot_ms,
        e2e_ms=None if finish is None else finish.e2e_ms,
        slo_met=None,
        decision="{}",
    )
