"""What can go wrong with a request after its submit, and what each of it means to the ledger and to the client."""

from __future__ import annotations

from enum import StrEnum

from rungway.outcomes import Code, Outcome

Meaning = tuple[Outcome, Code, str, int | None]
"""Outcome of the ledger row, code and message of the error answer, seconds for `retry-after`."""


class Fault(StrEnum):
    """Why nothing more can come of a request."""

    CLIENT_GONE = "client_gone"
    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    TIMEOUT = "timeout"
    OVERFLOW = "overflow"
    NO_CONTROLLER = "no_controller"
    STOPPING = "stopping"


class Broken(StrEnum):
    """Why an attempt ended before its answer was whole; another one may follow."""

    REPLICA_LOST = "replica_lost"
    TIMEOUT = "timeout"
    ERROR = "error"
    EVICTED = "evicted"
    CONSTRAINT = "constraint"  # the engine cannot enforce it, or not to the end
    REFUSED = "refused"  # the engine finds the request impossible


FAULTS: dict[Fault, Meaning] = {
    Fault.CLIENT_GONE: (Outcome.CLIENT_CANCELLED, Code.CANCELLED, "the client left", None),
    Fault.CANCELLED: (Outcome.CLIENT_CANCELLED, Code.CANCELLED, "the request was cancelled", None),
    Fault.DEADLINE: (Outcome.DEADLINE, Code.TIMEOUT, "the deadline of the request has passed", None),
    Fault.TIMEOUT: (Outcome.TIMEOUT, Code.TIMEOUT, "the request took longer than the server allows", None),
    Fault.OVERFLOW: (Outcome.CLIENT_CANCELLED, Code.CANCELLED, "the client reads too slowly", None),
    Fault.NO_CONTROLLER: (Outcome.REFUSED, Code.STARTING, "the platform is starting; please try again", 2),
    Fault.STOPPING: (Outcome.ERROR, Code.STARTING, "this gateway is stopping; please try again", 1),
}
BROKEN: dict[Broken, Meaning] = {
    Broken.REPLICA_LOST: (Outcome.REPLICA_LOST, Code.REPLICA_LOST, "the replica was lost", None),
    Broken.TIMEOUT: (Outcome.TIMEOUT, Code.TIMEOUT, "the engine did not answer in time", None),
    Broken.ERROR: (Outcome.ERROR, Code.INTERNAL, "the engine failed", None),
    Broken.EVICTED: (Outcome.EVICTED, Code.EVICTED, "the request gave way to more urgent work", 1),
    Broken.CONSTRAINT: (Outcome.ERROR, Code.INVALID_SCHEMA, "the request leaves no token that may come next", None),
    Broken.REFUSED: (Outcome.ERROR, Code.INTERNAL, "the engine cannot run this request", None),
}
ERRORS = {
    "draining": Broken.REPLICA_LOST,
    "engine_failed": Broken.REPLICA_LOST,
    "accounting_full": Broken.REPLICA_LOST,
    "evicted": Broken.EVICTED,
    "invalid_schema": Broken.CONSTRAINT,
    "dead_end": Broken.CONSTRAINT,
    "refused": Broken.REFUSED,
}
"""By what stands before the colon in an engine's error."""
FINAL = frozenset({Broken.CONSTRAINT, Broken.REFUSED})  # another try would end the same way; no replica is to blame
