"""Idempotency-Key: one run per (tenant, key), its whole answer for every repeat within a lifetime.

Held by this gateway alone, in one bounded partition per tenant, so that no tenant can push out another's answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

from rungway.clock import NS_PER_S
from rungway.errors import RequestError
from rungway.outcomes import Code

V = TypeVar("V")
PER_TENANT_MIN = 16


class Slot(Generic[V]):
    """One key in use. `answer` is None while its first request runs."""

    __slots__ = ("answer", "digest", "since_ns")

    def __init__(self, digest: bytes, since_ns: int) -> None:
        self.digest = digest
        self.since_ns = since_ns
        self.answer: V | None = None


class Idempotency(Generic[V]):
    """`now_ns` is monotonic. Slots are in order of their age."""

    def __init__(self) -> None:
        self._slots: dict[str, dict[str, Slot[V]]] = {}
        self._per_tenant = PER_TENANT_MIN
        self._ttl_ns = 0

    def configure(self, tenants: Sequence[str], entries_max: int, ttl_s: float) -> None:
        """`entries_max` is for the gateway; tenants share it evenly."""
        self._slots = {tenant: self._slots.get(tenant, {}) for tenant in tenants}
        self._per_tenant = max(PER_TENANT_MIN, entries_max // max(1, len(tenants)))
        self._ttl_ns = int(ttl_s * NS_PER_S)

    def claim(self, tenant: str, key: str, digest: bytes, now_ns: int) -> Slot[V]:
        """A fresh slot for the first request with this key, or the finished one of an earlier request.

        Raises RequestError: `idempotency_mismatch` (422) for another body, `idempotency_in_progress` (409) while the
        first request runs, `overloaded` when all of the tenant's slots are running.
        """
        slots = self._slots.setdefault(tenant, {})
        slot = slots.get(key)
        if slot is not None and slot.answer is not None and now_ns - slot.since_ns >= self._ttl_ns:
            del slots[key]
            slot = None
        if slot is None:
            self._make_room(slots)
            slot = slots[key] = Slot(digest, now_ns)
            return slot
        if slot.digest != digest:
            raise RequestError(
                Code.IDEMPOTENCY_MISMATCH,
                "this Idempotency-Key was used with another request body",
                param="idempotency-key",
            )
        if slot.answer is None:
            raise RequestError(
                Code.IDEMPOTENCY_IN_PROGRESS,
                "the first request with this Idempotency-Key is still running",
                param="idempotency-key",
                retry_after_s=1,
            )
        return slot

    def complete(self, tenant: str, key: str, slot: Slot[V], answer: V, now_ns: int) -> None:
        """The first request gave a whole answer: keep it, from now on for the lifetime."""
        slots = self._slots.get(tenant, {})
        if slots.get(key) is slot:
            slot.answer, slot.since_ns = answer, now_ns
            del slots[key]
            slots[key] = slot

    def release(self, tenant: str, key: str, slot: Slot[V]) -> None:
        """The first request gave no whole answer: the key is free again."""
        slots = self._slots.get(tenant, {})
        if slots.get(key) is slot:
            del slots[key]

    def expire(self, now_ns: int) -> None:
        for slots in self._slots.values():
            old = [key for key, slot in slots.items() if slot.answer and now_ns - slot.since_ns >= self._ttl_ns]
            for key in old:
                del slots[key]

    def size(self, tenant: str) -> int:
        return len(self._slots.get(tenant, {}))

    def _make_room(self, slots: dict[str, Slot[V]]) -> None:
        if len(slots) < self._per_tenant:
            return
        oldest = next((key for key, slot in slots.items() if slot.answer is not None), None)
        if oldest is None:
            raise RequestError(
                Code.OVERLOADED, "too many requests with an Idempotency-Key are running", retry_after_s=1
            )
        del slots[oldest]
