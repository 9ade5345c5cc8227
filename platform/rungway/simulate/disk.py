"""The ledger of a simulation: same keys and same rules as the database (known rows and attempts stay as they are)."""

from __future__ import annotations

from rungway.control.effects import Effects
from rungway.outcomes import Outcome
from rungway.types import AttemptEnd, AuditEntry, LedgerRow

_FINISHED = (Outcome.COMPLETED, Outcome.LENGTH)


class Disk:
    """Survives every controller. `conflicts`: second rows of a request that said something else than the first."""

    def __init__(self) -> None:
        self.rows: dict[str, LedgerRow] = {}
        self.audit: list[AuditEntry] = []
        self.ends: dict[tuple[str, int], AttemptEnd] = {}
        self.waste: dict[str, int] = {}
        self.downgrades: set[str] = set()
        self.conflicts: list[tuple[LedgerRow, LedgerRow]] = []

    def commit(self, effects: Effects) -> None:
        """One transaction."""
        for row in effects.rows:
            known = self.rows.setdefault(row.request_id, row)
            if known is not row:
                self.conflicts.append((known, row))
        self.audit += effects.audit
        self.downgrades.update(entry.request_id for entry in effects.audit if entry.kind == "downgrade")
        for end in effects.attempts:
            self.ends.setdefault((end.request_id, end.attempt), end)
        for request_id, tokens in effects.waste:
            if request_id in self.rows:
                self.waste[request_id] = self.waste.get(request_id, 0) + tokens

    # -- what a new controller reads (control.restore.Books) --------------------------------------------------

    def newest_ns(self) -> int:
        return max((row.ended_wall_ns for row in self.rows.values()), default=0)

    def recent(self, since_ns: int) -> dict[str, tuple[int, int]]:
        found: dict[str, tuple[int, int]] = {}
        for row in self.rows.values():
            if row.ended_wall_ns >= since_ns and row.outcome != Outcome.REFUSED:
                requests, tokens = found.get(row.tenant, (0, 0))
                found[row.tenant] = (requests + 1, tokens + row.prompt_tokens + row.output_tokens)
        return found

    def spent_since(self, tenant: str, wall_ns: int, until_ns: int | None = None) -> int:
        mine = (row for row in self.rows.values() if row.tenant == tenant and row.ended_wall_ns >= wall_ns)
        return sum(row.cost_nusd for row in mine if until_ns is None or row.ended_wall_ns < until_ns)

    def settled(self, since_ns: int, limit: int) -> list[tuple[str, str, dict[int, int]]]:
        rows = sorted(
            (row for row in self.rows.values() if row.ended_wall_ns >= since_ns), key=lambda row: row.ended_wall_ns
        )
        found: dict[str, tuple[str, str, dict[int, int]]] = {}
        for row in rows[-limit:]:
            counted = row.output_tokens + row.wasted_tokens + self.waste.get(row.request_id, 0)
            found[row.request_id] = (row.request_id, row.code if row.outcome == Outcome.REFUSED else "", {0: counted})
        for (request_id, attempt), end in self.ends.items():
            if request_id in found:
                found[request_id][2][attempt] = end.usage.output_tokens
                found[request_id][2][0] -= end.usage.output_tokens
        return list(found.values())

    def output_samples(self, limit: int) -> list[tuple[str, str, int]]:
        done = [row for row in self.rows.values() if row.outcome in _FINISHED]
        done.sort(key=lambda row: row.ended_wall_ns)
        return [(row.tenant, row.tier, row.output_tokens) for row in done[-limit:]]
