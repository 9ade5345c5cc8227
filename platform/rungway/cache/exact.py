"""Whole answers by exact key, in one partition per tenant: bounded in entries, least recently used out, with a lifetime.

Nothing here knows what an answer is; the key (key.py) carries everything that could change it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Generic, TypeVar

from rungway.clock import NS_PER_S

V = TypeVar("V")


class ExactCache(Generic[V]):
    """`now_ns` is monotonic. A tenant without a configured partition has none: nothing is kept for it."""

    def __init__(self) -> None:
        self._partitions: dict[str, _Partition[V]] = {}

    def configure(self, terms: Mapping[str, tuple[int, float]]) -> None:
        """`terms[tenant]` = (entries_max, ttl_s). Partitions of tenants that are gone are dropped."""
        self._partitions = {
            tenant: self._partitions.get(tenant) or _Partition(entries_max, ttl_s)
            for tenant, (entries_max, ttl_s) in terms.items()
        }
        for tenant, (entries_max, ttl_s) in terms.items():
            self._partitions[tenant].resize(entries_max, ttl_s)

    def get(self, tenant: str, key: str, now_ns: int) -> V | None:
        partition = self._partitions.get(tenant)
        return partition.get(key, now_ns) if partition is not None else None

    def put(self, tenant: str, key: str, value: V, now_ns: int) -> None:
        partition = self._partitions.get(tenant)
        if partition is not None:
            partition.put(key, value, now_ns)

    def size(self, tenant: str) -> int:
        partition = self._partitions.get(tenant)
        return len(partition.entries) if partition is not None else 0


class _Partition(Generic[V]):
    def __init__(self, entries_max: int, ttl_s: float) -> None:
        self.entries: OrderedDict[str, tuple[V, int]] = OrderedDict()
        self.resize(entries_max, ttl_s)

    def resize(self, entries_max: int, ttl_s: float) -> None:
        self._entries_max = entries_max
        self._ttl_ns = int(ttl_s * NS_PER_S)
        self._trim()

    def get(self, key: str, now_ns: int) -> V | None:
        found = self.entries.get(key)
        if found is None:
            return None
        value, stored_ns = found
        if now_ns - stored_ns >= self._ttl_ns:
            del self.entries[key]
            return None
        self.entries.move_to_end(key)
        return value

    def put(self, key: str, value: V, now_ns: int) -> None:
        self.entries[key] = (value, now_ns)
        self.entries.move_to_end(key)
        self._trim()

    def _trim(self) -> None:
        while len(self.entries) > self._entries_max:
            self.entries.popitem(last=False)
