"""Which running work gives way: just enough of it, the newest of the lowest class first, on one replica.

A claim needs room for one request on one replica. It gets it from attempts that may be stopped (the caller says which) as
long as what stays behind keeps its guarantees: a tenant its share, a class its minimum share.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

ROUNDING = 1e-9


class Running(NamedTuple):
    """An attempt that may be stopped. `since_ns`: when it was granted; `tight`: a pause would
    probably break its deadline, and all that it has done be worthless."""

    request_id: str
    attempt: int
    replica_id: str
    tenant: str
    band: int
    since_ns: int
    sequences: int
    tokens: int
    tight: bool = False


class Room(NamedTuple):
    """A replica that the claim could go to, and what is free there by now and by what is being stopped already."""

    replica_id: str
    sequences: int
    tokens: int


class Need(NamedTuple):
    sequences: int
    tokens: int


class Claim(NamedTuple):
    """Somebody of class `band` waits for `sequences` and `tokens` on a replica, where work is being stopped for it."""

    request_id: str
    tenant: str
    band: int
    replica_id: str
    sequences: int
    tokens: int
    until_ns: int


class Keeps(NamedTuple):
    """Shares of the pool, 0 to 1, that each tenant (0 for one that is not named) and each class keeps in any case."""

    tenants: Mapping[str, float]
    bands: Sequence[float]


class Counts:
    """What a tenant or a class has running in the pool."""

    __slots__ = ("sequences", "tokens")

    def __init__(self) -> None:
        self.sequences = 0
        self.tokens = 0

    def add(self, sequences: int, tokens: int) -> None:
        self.sequences += sequences
        self.tokens += tokens


class Spare:
    """Who holds what of a pool of `sequences` places and `tokens` tokens. A share is the larger of its shares of both."""

    def __init__(self, tenants: dict[str, Counts], bands: list[Counts], sequences: int, tokens: int) -> None:
        self._tenants = tenants
        self._bands = bands
        self._sequences = max(1, sequences)
        self._tokens = max(1, tokens)

    def allows(self, running: Running, keeps: Keeps) -> bool:
        """Its tenant and its class keep their shares without it."""
        tenant = self._left(self._tenants[running.tenant], running)
        band = self._left(self._bands[running.band], running)
        return (
            tenant >= keeps.tenants.get(running.tenant, 0.0) - ROUNDING and band >= keeps.bands[running.band] - ROUNDING
        )

    def _left(self, counts: Counts, running: Running) -> float:
        sequences, tokens = counts.sequences - running.sequences, counts.tokens - running.tokens
        return max(sequences / self._sequences, tokens / self._tokens)

    def take(self, running: Running, times: int = 1) -> None:
        for counts in (self._tenants[running.tenant], self._bands[running.band]):
            counts.add(-times * running.sequences, -times * running.tokens)


def order(running: Running) -> tuple[int, bool, int, str]:
    """Lowest class first; in it what can bear a pause, then the newest."""
    return (-running.band, running.tight, -running.since_ns, running.request_id)


def choose_victims(
    need: Need, rooms: Iterable[Room], running: Iterable[Running], spare: Spare, keeps: Keeps
) -> tuple[str, list[Running]] | None:
    """The replica and what to stop there, or None when nothing that may be stopped makes enough room anywhere. Fewest
    attempts win, then the lowest class and the newest; a replica that has the room already wins with nothing."""
    by_replica: dict[str, list[Running]] = {}
    for each in running:
        by_replica.setdefault(each.replica_id, []).append(each)
    best: tuple[str, list[Running]] | None = None
    best_key: tuple[object, ...] = ()
    for room in rooms:
        victims = _on(need, room, sorted(by_replica.get(room.replica_id, []), key=order), spare, keeps)
        if victims is None:
            continue
        key = (len(victims), [order(victim) for victim in victims], room.replica_id)
        if best is None or key < best_key:
            best, best_key = (room.replica_id, victims), key
    if best is not None:
        for victim in best[1]:
            spare.take(victim)
    return best


def _on(need: Need, room: Room, running: list[Running], spare: Spare, keeps: Keeps) -> list[Running] | None:
    sequences, tokens = need.sequences - room.sequences, need.tokens - room.tokens
    victims: list[Running] = []
    for each in running:
        if sequences <= 0 and tokens <= 0:
            break
        if spare.allows(each, keeps):
            spare.take(each)
            victims.append(each)
            sequences -= each.sequences
            tokens -= each.tokens
    for victim in victims:
        spare.take(victim, -1)
    if sequences > 0 or tokens > 0:
        return None
    return _needed(victims, -sequences, -tokens)


def _needed(victims: list[Running], sequences: int, tokens: int) -> list[Running]:
    """Without those that turned out not to be needed, because a later and larger one made the room alone. `sequences` and
    `tokens`: what is freed beyond the need."""
    kept = list(victims)
    for each in victims:
        if each.sequences <= sequences and each.tokens <= tokens:
            kept.remove(each)
            sequences -= each.sequences
            tokens -= each.tokens
    return kept
