"""Circuit breaker of one tenant or one replica.

Which results the caller records: only failures that are the guarded side's own. For a replica these are errors, hangs
and lost connections; for a tenant, requests of its that broke an engine. A 4xx, a refusal by a limit, a cancellation
or a missed deadline is never a failure: it is not recorded at all.
"""

from __future__ import annotations

from enum import StrEnum

_NS_PER_S = 1_000_000_000


class State(StrEnum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class Event(StrEnum):
    """`TRIPPED` is the failure that makes the row of failures long enough; `COOLED` is the end of the open time."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    TRIPPED = "tripped"
    COOLED = "cooled"


# Results that arrive while open belong to calls from before it opened: they say nothing about now.
TRANSITIONS: dict[State, dict[Event, State]] = {
    State.CLOSED: {Event.SUCCEEDED: State.CLOSED, Event.FAILED: State.CLOSED, Event.TRIPPED: State.OPEN},
    State.OPEN: {
        Event.SUCCEEDED: State.OPEN,
        Event.FAILED: State.OPEN,
        Event.TRIPPED: State.OPEN,
        Event.COOLED: State.HALF_OPEN,
    },
    State.HALF_OPEN: {Event.SUCCEEDED: State.CLOSED, Event.FAILED: State.OPEN, Event.TRIPPED: State.OPEN},
}


class Breaker:
    """Opens after `failures` consecutive failures, stays open for `open_s` seconds, then lets one probe through.

    A probe of which nothing is heard for `open_s` counts as gone, and the next one may go.
    """

    __slots__ = ("_failed", "_failures", "_open_ns", "_probe_ns", "_since_ns", "_state")

    def __init__(self, failures: int, open_s: float) -> None:
        self.adopt(failures, open_s)
        self._state = State.CLOSED
        self._failed = 0
        self._since_ns = 0
        self._probe_ns: int | None = None

    def adopt(self, failures: int, open_s: float) -> None:
        """Take other terms after a reload; what was counted stays counted."""
        assert failures >= 1 and open_s > 0
        self._failures = failures
        self._open_ns = int(open_s * _NS_PER_S)

    @property
    def state(self) -> State:
        """The state as of the last call; an open breaker whose time is over turns half-open when asked."""
        return self._state

    @property
    def probing(self) -> bool:
        """Whether a probe is under way. Right after `allows` said yes, that call is it."""
        return self._probe_ns is not None

    def ready(self, now_ns: int) -> bool:
        """Whether `allows` would say yes; takes nothing."""
        if self._state is State.CLOSED:
            return True
        if self._state is State.OPEN:
            return now_ns - self._since_ns >= self._open_ns
        return self._probe_ns is None or now_ns - self._probe_ns >= self._open_ns

    def allows(self, now_ns: int) -> bool:
        """Whether a call may go. In half-open a yes *is* the one probe: ask only when the call will be made, and say
        `abandon` if it was not."""
        if not self.ready(now_ns):
            return False
        if self._state is State.OPEN:
            self._apply(Event.COOLED, now_ns)
        if self._state is State.HALF_OPEN:
            self._probe_ns = now_ns
        return True

    def abandon(self) -> None:
        """The probe ended without a verdict (not sent, cancelled by its client): another may go at once."""
        self._probe_ns = None

    def record(self, ok: bool, now_ns: int) -> None:
        """A call ended well or failed."""
        if ok:
            self._failed = 0
            self._apply(Event.SUCCEEDED, now_ns)
            return
        self._failed += 1
        self._apply(Event.TRIPPED if self._failed >= self._failures else Event.FAILED, now_ns)

    def retry_s(self, now_ns: int) -> float:
        """Seconds until a call may go; 0.0 when it may now."""
        if self.ready(now_ns):
            return 0.0
        since = self._since_ns if self._probe_ns is None else self._probe_ns
        return max(0, since + self._open_ns - now_ns) / _NS_PER_S

    def _apply(self, event: Event, now_ns: int) -> None:
        after = TRANSITIONS[self._state][event]
        if after is not self._state:
            self._state = after
            self._since_ns = now_ns
            self._failed = 0
            self._probe_ns = None
