"""The ledger at the end of a world: every bill right, a row for every end that a client was told, no budget overspent."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING

from rungway.outcomes import Outcome

if TYPE_CHECKING:
    from rungway.simulate.invariants import Invariants
    from rungway.simulate.world import World


def close(watch: Invariants, world: World) -> None:
    """Look at everything that is on disk; `watch` hears of what is wrong."""
    _bills(watch, world)
    _rows(watch, world)
    _budgets(watch, world)


def _bills(watch: Invariants, world: World) -> None:
    """Request by request: billed output + waste == what engines emitted."""
    truth: Counter[str] = Counter()
    for replica in world.replicas.values():
        emitted = sum(end.usage.output_tokens for end in replica.truth)
        if emitted != replica.batch.emitted_total:
            watch.fail(f"{replica.name} emitted {replica.batch.emitted_total} tokens and owned up to {emitted}")
        for end in replica.truth:
            truth[end.request_id] += end.usage.output_tokens
    for request_id in sorted(truth.keys() | watch.disk.rows.keys()):
        row = watch.disk.rows.get(request_id)
        if row is None:
            if truth[request_id]:
                watch.fail(f"{request_id}: {truth[request_id]} tokens were emitted and there is no row")
            continue
        claimed = row.output_tokens + row.wasted_tokens + watch.disk.waste.get(request_id, 0)
        if claimed != truth[request_id]:
            watch.fail(
                f"{request_id} ({row.outcome}): billed {row.output_tokens} + wasted {claimed - row.output_tokens}, "
                f"engines emitted {truth[request_id]}"
            )
        price = row.price_output, row.price_input
        if row.cost_nusd and not any(price):
            watch.fail(f"{request_id} costs {row.cost_nusd} at no price")


def _rows(watch: Invariants, world: World) -> None:
    """One row per request of whose end a client was told by the platform."""
    for call in world.clients.calls:
        for request_id in call.request_ids[-1:]:
            told = call.outcome in (Outcome.COMPLETED, Outcome.LENGTH, Outcome.CACHE_HIT, Outcome.TEMPLATE)
            refused = call.outcome == Outcome.REFUSED and call.code != "starting"
            row = watch.disk.rows.get(request_id)
            free = call.outcome in (Outcome.CACHE_HIT, Outcome.TEMPLATE)
            if (free or refused) and row is None and watch.crashes:
                watch.unwritten += 1
            elif (told or refused) and row is None:
                watch.fail(f"{request_id} ended {call.outcome} {call.code} and has no row")
            elif told and row is not None and row.outcome == Outcome.GATEWAY_LOST:
                watch.misnamed += 1
            elif told and row is not None and row.outcome != call.outcome:
                watch.fail(f"{request_id} ended {call.outcome} at its client and {row.outcome} in the ledger")
    for known, second in watch.disk.conflicts:
        if (known.output_tokens, known.cost_nusd) != (second.output_tokens, second.cost_nusd):
            watch.fail(
                f"{known.request_id} has two rows: {known.outcome} {known.cost_nusd}, "
                f"{second.outcome} {second.cost_nusd}"
            )


def _budgets(watch: Invariants, world: World) -> None:
    """Spent within the limit of each window that began, but for declared top-ups (an answer longer than what was reserved)."""
    spent: Counter[str] = Counter()
    topped: defaultdict[str, int] = defaultdict(int)
    for row in watch.disk.rows.values():
        spent[row.tenant] += row.cost_nusd
        reserved = watch.reserved.get(row.request_id, watch.history.leased_nusd.get(row.request_id, 0))
        topped[row.tenant] += max(0, row.cost_nusd - reserved)
    for contract in world.platform.tenants:
        limit, name = contract.budget.nusd, contract.name
        slack = topped[name] + watch.money_slack[name] + watch.history.leased_by[name]
        begun = max(1, watch.history.begun[name])
        if limit is not None and spent[name] > begun * limit + slack:
            watch.fail(f"{name} spent {spent[name]} of {limit}, top-ups {topped[name]}, leases and crashes {slack}")
