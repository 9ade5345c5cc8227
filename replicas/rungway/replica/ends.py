"""Ends of attempts until the controller has acknowledged them, across reconnects, restarts and killed replicas."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rungway.clock import NS_PER_S
from rungway.replica.tokenlog import TokenLog
from rungway.types import AttemptEnd

RESEND_AFTER_NS = NS_PER_S
BATCH_MAX = 512

Key = tuple[str, int]


@dataclass(slots=True)
class _Waiting:
    end: AttemptEnd
    log: TokenLog | None
    slot: int
    sent_ns: int


class Ends:
    """Bounded by `room`: the server takes no new attempt when it is used up. `adopted` tables of dead replicas are
    reported like own attempts and deleted once nothing in them is unacknowledged."""

    def __init__(self, own: TokenLog, adopted: list[TokenLog], now_wall_ns: int, spare: int = 1024) -> None:
        self._own = own
        self._spare = spare
        self._unlogged = 0
        self._adopted: dict[TokenLog, int] = {}
        self._waiting: dict[Key, _Waiting] = {}  # in the order of the last sending, so the head is due first
        for log in adopted:
            entries = log.entries(now_wall_ns)
            self._adopted[log] = 0
            for entry in entries:
                key = (entry.end.request_id, entry.end.attempt)
                if key not in self._waiting:
                    self._waiting[key] = _Waiting(entry.end, log, entry.slot, 0)
                    self._adopted[log] += 1
            self._drop_if_done(log)

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def full(self) -> bool:
        """Too much is unacknowledged: what would end now could not be kept."""
        return self._own.room == 0 or self._unlogged >= self._spare

    def add(self, end: AttemptEnd, slot: int | None, now_ns: int) -> None:
        """Keep an end; `slot` is its place in the own table, None for an attempt that never ran. The caller sends it
        right away. Ends that never ran are dropped when there is no room: they carry no usage."""
        if slot is not None:
            self._own.end(slot, end)
        elif self._unlogged >= self._spare:
            return
        else:
            self._unlogged += 1
        log = None if slot is None else self._own
        self._waiting[(end.request_id, end.attempt)] = _Waiting(end, log, slot or 0, now_ns)

    def all_due(self) -> None:
        """A new controller session: everything is to be sent again."""
        for waiting in self._waiting.values():
            waiting.sent_ns = 0

    def take_due(self, now_ns: int) -> list[AttemptEnd]:
        """Up to BATCH_MAX ends that were not sent within the last second; they count as sent now."""
        due: list[Key] = []
        for key, waiting in self._waiting.items():
            if len(due) == BATCH_MAX or (waiting.sent_ns and now_ns - waiting.sent_ns < RESEND_AFTER_NS):
                break
            due.append(key)
        ends = []
        for key in due:
            waiting = self._waiting.pop(key)
            waiting.sent_ns = now_ns
            self._waiting[key] = waiting
            ends.append(waiting.end)
        return ends

    def acknowledge(self, keys: Iterable[Key]) -> None:
        """The controller has these; unknown ones are ignored (an acknowledgement may come twice)."""
        for key in keys:
            waiting = self._waiting.pop(key, None)
            if waiting is None:
                continue
            if waiting.log is None:
                self._unlogged -= 1
            elif waiting.log is self._own:
                self._own.free(waiting.slot)
            else:
                waiting.log.free(waiting.slot)
                self._adopted[waiting.log] -= 1
                self._drop_if_done(waiting.log)

    def _drop_if_done(self, log: TokenLog) -> None:
        if self._adopted[log] == 0:
            del self._adopted[log]
            log.remove()

    def close(self) -> None:
        """Files with unacknowledged ends stay behind for the next replica on this node; the others go."""
        own_waits = any(waiting.log is self._own for waiting in self._waiting.values())
        (self._own.close if own_waits else self._own.remove)()
        for log in self._adopted:
            log.close()
        self._adopted.clear()
