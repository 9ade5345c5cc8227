"""Which replica of a pool gets a request: session affinity as a hint, room and liveness first."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from hashlib import blake2b
from math import inf
from typing import NamedTuple

from rungway.policies.locality import Warmth

_MASK = (1 << 64) - 1


class ReplicaView:
    """What the controller knows about one replica. `running` sequences and `tokens` are those granted by us and not
    ended; the report of the replica itself only has to be fresh (`reported_ns`, monotonic)."""

    __slots__ = (
        "bit",
        "breaker_open",
        "draining",
        "hash_seed",
        "kv_tokens",
        "max_num_seqs",
        "replica_id",
        "reported_ns",
        "running",
        "tier",
        "tokens",
        "version",
    )

    def __init__(
        self,
        replica_id: str,
        tier: str,
        version: str,
        max_num_seqs: int,
        kv_tokens: int,
        *,
        reported_ns: int = 0,
        running: int = 0,
        tokens: int = 0,
        draining: bool = False,
        breaker_open: bool = False,
    ) -> None:
        self.replica_id = replica_id
        self.tier = tier
        self.version = version
        self.max_num_seqs = max_num_seqs
        self.kv_tokens = kv_tokens
        self.reported_ns = reported_ns
        self.running = running
        self.tokens = tokens
        self.draining = draining
        self.breaker_open = breaker_open
        self.hash_seed = _digest(replica_id)
        self.bit = 0  # its place in the pool's map of prefixes

    @property
    def ready(self) -> bool:
        """May take new work at all: neither draining nor behind an open breaker."""
        return not (self.draining or self.breaker_open)


class Need(NamedTuple):
    """What a request asks: a replica of `version` for `sequences` sequences that hold `tokens` tokens together. `kept` replicas
    are for somebody who is before it; `only` (None = all) are those that its tenant uses; those in `avoid` failed it before.
    With `warmth` and an `imbalance` above 0 cached prompts count."""

    version: str
    sequences: int
    tokens: int
    session: str | None
    now_ns: int
    stale_ns: int
    avoid: frozenset[str] = frozenset()
    kept: Collection[str] = ()
    only: frozenset[str] | None = None
    warmth: Warmth | None = None
    imbalance: float = 0.0

    def may_use(self, view: ReplicaView) -> bool:
        """It is one of those that are asked for, and takes new work."""
        mine = self.only is None or view.replica_id in self.only
        return mine and view.version == self.version and view.replica_id not in self.kept and view.ready


def choose(views: Iterable[ReplicaView], need: Need, factor: float) -> ReplicaView | None:
    """The replica for a request, or None when none has room.

    A replica takes floor(factor x max_num_seqs) sequences and kv_tokens tokens; one whose report is older than
    `stale_ns` counts as full. A session goes to its rendezvous replica (highest hash of session and replica, so that
    every caller agrees without a table and a lost replica moves only its own sessions) while that one has room, else
    to the least loaded, ties by id. A replica in `avoid` (it failed this request) is taken only if no other is ready.

    With `warmth` and an `imbalance` above 0 the choice is by expected cost instead, see `_cheapest`.
    """
    ready = [view for view in views if need.may_use(view)]
    if need.avoid:
        ready = [view for view in ready if view.replica_id not in need.avoid] or ready
    fresh = [view for view in ready if need.now_ns - view.reported_ns <= need.stale_ns]
    session, sequences, tokens = need.session, need.sequences, need.tokens
    if need.warmth is not None and need.imbalance > 0.0:
        able = [view for view in fresh if has_room(view, sequences, tokens, factor)]
        home = home_of(fresh, session) if session and fresh else None
        return _cheapest(able, home, need.warmth, need.imbalance, factor)
    if session is not None and fresh:
        home = home_of(fresh, session)
        if has_room(home, sequences, tokens, factor):
            return home
    best: ReplicaView | None = None
    best_load = 0.0
    for view in fresh:
        if has_room(view, sequences, tokens, factor):
            load = load_of(view, factor)
            if best is None or (load, view.replica_id) < (best_load, best.replica_id):
                best, best_load = view, load
    return best


def _cheapest(
    able: list[ReplicaView], home: ReplicaView | None, warmth: Warmth, imbalance: float, factor: float
) -> ReplicaView | None:
    """The replica on which the prompt costs least, in prompt tokens:

        prompt - cached there + prompt x (load there - lowest load) / imbalance

    A whole prompt in the cache is worth as much as a difference in load of `imbalance`; from there on no cache is worth
    going to a busier replica, so one hot beginning spreads instead of piling up. A session's home counts as holding half
    of what no replica is known to hold: news of a cache come late, and only of its beginnings. Ties by load, then by id.
    """
    if not able:
        return None
    loads = [load_of(view, factor) for view in able]
    lowest = min(loads)
    cached = _cached(able, warmth)
    unknown = warmth.prompt - max(cached)
    price = warmth.prompt / imbalance
    best, best_cost, best_load = able[0], inf, inf
    for view, load, held in zip(able, loads, cached, strict=True):
        cost = price * (load - lowest) - (held + unknown / 2 if view is home else held)
        if cost < best_cost or (cost == best_cost and (load, view.replica_id) < (best_load, best.replica_id)):
            best, best_cost, best_load = view, cost, load
    return best


def _cached(views: list[ReplicaView], warmth: Warmth) -> list[int]:
    """Prompt tokens that each of them probably holds; in one pass, since it is done for every request and replica."""
    most = max(0, warmth.prompt - 1)
    steps = [(who, min(count * warmth.key_tokens, most)) for count, who in warmth.found]
    found = []
    for view in views:
        bit, tokens = view.bit, 0
        for who, held in steps:
            if who & bit:
                tokens = held
                break
        found.append(tokens)
    return found


def open_to_work(views: Iterable[ReplicaView], *, now_ns: int, stale_ns: int, factor: float) -> int:
    """Bits of the replicas that could take a sequence now."""
    mask = 0
    for view in views:
        if view.ready and now_ns - view.reported_ns <= stale_ns and view.running < int(factor * view.max_num_seqs):
            mask |= view.bit
    return mask


def has_room(view: ReplicaView, sequences: int, tokens: int, factor: float) -> bool:
    """Whether it takes so many sequences and tokens more."""
    return view.running + sequences <= int(factor * view.max_num_seqs) and view.tokens + tokens <= view.kv_tokens


def load_of(view: ReplicaView, factor: float) -> float:
    """Share in use of what is scarcer; only for replicas with room, whose capacity is therefore not zero."""
    return max(view.running / max(1, int(factor * view.max_num_seqs)), view.tokens / max(1, view.kv_tokens))


def rendezvous(name: str, views: Iterable[ReplicaView]) -> list[ReplicaView]:
    """Replicas in the order of a hash of `name` and replica, highest first: the same for every caller, without a table."""
    seed = _digest(name)
    return sorted(views, key=lambda view: (_mix(seed ^ view.hash_seed), view.replica_id), reverse=True)


def home_of(views: list[ReplicaView], session: str) -> ReplicaView:
    """The session's replica among these, of which there is at least one."""
    seed = _digest(session)
    return max(views, key=lambda view: (_mix(seed ^ view.hash_seed), view.replica_id))


def _digest(text: str) -> int:
    return int.from_bytes(blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big")


def _mix(value: int) -> int:
    """Bijective 64-bit finaliser (the constants of SplitMix64): one xor of two digests alone would not be uniform
    between replicas."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
