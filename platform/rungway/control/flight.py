"""A request in the controller's hands, from Ask to settlement."""

from __future__ import annotations

from rungway.control.tenant_state import BANDS, TenantState
from rungway.policies.fairness import Queued
from rungway.policies.locality import Warmth
from rungway.policies.offers import Quote
from rungway.types import Ask, AttemptEnd, Finish, Grant, Offer


class Attempt:
    """One try on one replica: the capacity it holds there and how it ended. `charged`: prompt tokens that the fair queue
    charged for it, 0 for a repeat; `band`: its class; `evicted_ns`: when the replica was told to stop it."""

    __slots__ = (
        "band",
        "charged",
        "emitted",
        "end",
        "evicted_ns",
        "granted_ns",
        "lost_ns",
        "output_reserved",
        "released",
        "replica_id",
        "sequences",
        "teller",
        "tokens",
    )

    def __init__(self, replica_id: str, sequences: int, tokens: int, output_reserved: int, band: int = 0) -> None:
        self.replica_id = replica_id
        self.sequences = sequences
        self.tokens = tokens
        self.output_reserved = output_reserved
        self.band = band
        self.charged = 0
        self.granted_ns = 0
        self.evicted_ns: int | None = None
        self.emitted = 0
        self.end: AttemptEnd | None = None
        self.teller = ""  # who sent the end, and waits for its acknowledgement
        self.lost_ns: int | None = None
        self.released = False

    def counted(self, delivered: int) -> int:
        """Output tokens as far as is known: what the engine said at the end, else the most that anybody has seen."""
        return self.end.usage.output_tokens if self.end is not None else max(self.emitted, delivered)


class Flight:
    """`late`: by pool in which it cannot begin in time, its wait in first-token targets. `grant` is None while it waits.
    `held_tokens`/`held_nusd` are what the tenant's buckets hold for it, `lined_tokens` what it counts with while it waits;
    `places`: what it takes of a replica's batch. `failure`: why its last try failed, see `Retry`. `probes`: its tenant's
    breaker let it through to prove itself."""

    __slots__ = (
        "ask",
        "attempts",
        "avoid",
        "band",
        "cause",
        "enqueued_ns",
        "entry",
        "evictions",
        "failure",
        "finish",
        "finish_ns",
        "first_wait_ms",
        "gateway_lost_ns",
        "grant",
        "granted_ns",
        "held_nusd",
        "held_tokens",
        "late",
        "lined_tokens",
        "next_attempt",
        "offer",
        "places",
        "pool",
        "pressure",
        "probes",
        "quote",
        "retrying",
        "rungs",
        "running",
        "state",
        "submitted_ns",
        "warm_until_ns",
        "warmth",
    )

    def __init__(self, ask: Ask, state: TenantState, now_ns: int) -> None:
        self.ask = ask
        self.state = state
        self.band = BANDS[ask.tenant_class]
        self.submitted_ns = now_ns
        self.enqueued_ns = now_ns
        self.granted_ns = 0
        self.first_wait_ms = 0.0
        self.quote: Quote | None = None
        self.offer: Offer | None = None
        self.places = 1
        self.pool = ""
        self.cause = "ok"
        self.rungs: dict[str, int] = {}
        self.late: dict[str, float] = {}
        self.pressure: dict[str, tuple[float, str]] = {}
        self.entry: Queued | None = None
        self.grant: Grant | None = None
        self.attempts: dict[int, Attempt] = {}
        self.next_attempt = 1
        self.avoid: frozenset[str] = frozenset()
        self.probes = False
        self.retrying = False
        self.evictions = 0
        self.failure = ""
        self.running = False
        self.held_tokens = 0
        self.lined_tokens = 0
        self.held_nusd = 0
        self.finish: Finish | None = None
        self.finish_ns = 0
        self.gateway_lost_ns: int | None = None
        self.warmth: Warmth | None = None
        self.warm_until_ns = 0

    @property
    def begun(self) -> bool:
        """Its client may have a part of the answer already: it goes on as it began, and before what is new."""
        return self.retrying or self.evictions > 0

    @property
    def sequences(self) -> int:
        """Sequences of the offered answer."""
        return 1 if self.offer is None else max(1, self.offer.best_of)

    def learn(self, ok: bool | None, now_ns: int) -> None:
        """Tell the tenant's breaker how it ended; None = nothing that the breaker counts."""
        if ok is not None:
            self.state.breaker.record(ok, now_ns)
        elif self.probes:
            self.state.breaker.abandon()
        self.probes = False

    def take_off(self) -> None:
        """Count as running for the tenant's concurrency."""
        if not self.running:
            self.running = True
            self.state.count(running=1)

    def land(self) -> None:
        """Stop counting as running; harmless when it already has."""
        if self.running:
            self.running = False
            self.state.count(running=-1)

    def open_attempts(self) -> list[Attempt]:
        """Attempts whose end is neither reported nor given up."""
        return [a for a in self.attempts.values() if a.end is None and a.lost_ns is None]

    def settled(self) -> bool:
        """Both sides have said all they will say. Who waits to go on may still be claimed by a gateway that comes back."""
        client_done = self.finish is not None or (self.gateway_lost_ns is not None and self.entry is None)
        return client_done and not self.open_attempts()
