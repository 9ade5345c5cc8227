"""What the core wants done. The core computes, the service does: sends, ledger rows, audit rows.

A send may be `held`: it leaves only after everything that was written up to this turn is committed. Grants of degraded
answers are held so that the audit row exists before the first byte, acknowledgements so that nothing acknowledged is lost.
"""

from __future__ import annotations

from rungway.messages import Message
from rungway.types import AttemptEnd, AuditEntry, LedgerRow


class Effects:
    """Collected during one turn, drained by the service."""

    __slots__ = ("attempts", "audit", "held", "rows", "sends", "waste")

    def __init__(self) -> None:
        self.sends: list[tuple[str, Message]] = []
        self.held: list[tuple[str, Message]] = []
        self.rows: list[LedgerRow] = []
        self.audit: list[AuditEntry] = []
        self.attempts: list[AttemptEnd] = []
        # (request_id, tokens): engine output found after the row was written, which nobody is billed for
        self.waste: list[tuple[str, int]] = []

    def durable(self) -> bool:
        """Whether anything must be written."""
        return bool(self.rows or self.audit or self.attempts or self.waste)

    def drain(self) -> Effects:
        """Hand over all that was collected and start empty."""
        taken = Effects()
        taken.sends, self.sends = self.sends, taken.sends
        taken.held, self.held = self.held, taken.held
        taken.rows, self.rows = self.rows, taken.rows
        taken.audit, self.audit = self.audit, taken.audit
        taken.attempts, self.attempts = self.attempts, taken.attempts
        taken.waste, self.waste = self.waste, taken.waste
        return taken
