"""Usage that nobody claims: the replica reported it, but the gateway died and this controller never saw the request."""

from __future__ import annotations

from rungway.contracts import Price
from rungway.control.cell import Cell, Now
from rungway.outcomes import Outcome
from rungway.types import AttemptEnd, Billing, LedgerRow


def write_orphan(cell: Cell, ends: list[AttemptEnd], now: Now) -> None:
    """A row from the replica's own report alone: the gateway died and this controller never saw the request."""
    ends.sort(key=lambda end: end.attempt)
    last = ends[-1]
    billing, price = last.billing, last.billing.price
    output = last.usage.output_tokens
    waste = sum(end.usage.output_tokens for end in ends[:-1])
    cost = price.cost_nusd(
        input_tokens=last.usage.prompt_tokens, cached_tokens=last.usage.cached_tokens, output_tokens=output
    )
    cell.effects.rows.append(_orphan_row(last, billing, price, output, waste, cost, len(ends)))
    state = cell.tenants.get(billing.tenant)
    if state is not None:
        state.budget.settle(0, cost, now.wall_ns)
    cell.remember(last.request_id, {end.attempt: end.usage.output_tokens for end in ends})


def _orphan_row(
    last: AttemptEnd, billing: Billing, price: Price, output: int, waste: int, cost: int, attempts: int
) -> LedgerRow:
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
        outcome=Outcome.GATEWAY_LOST,
        code="",
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
        cache="off",
        queue_wait_ms=0.0,
        ttft_ms=None,
        tpot_ms=None,
        e2e_ms=None,
        slo_met=None,
        decision="{}",
    )
