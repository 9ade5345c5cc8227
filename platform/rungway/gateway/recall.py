"""Has this been answered before? First the idempotency join, then the exact cache of the tenant's own partition.

Only what is repeatable is looked up: temperature 0 (or a seed with a temperature) that the client itself gave, normal
risk, an action without side effects. Only full, whole answers are kept for it.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import msgspec

from rungway.cache.key import cache_key, canonical
from rungway.clock import monotonic_ns
from rungway.gateway.answer import Stored
from rungway.gateway.catalogue import Catalogue
from rungway.gateway.idempotency import Slot
from rungway.gateway.read import Reading
from rungway.gateway.schema import HARMLESS, EmbeddingBody
from rungway.types import Action, Grant, OfferKind, Risk

if TYPE_CHECKING:
    from rungway.gateway.core import Gateway

STORED_CHARS_MAX = 262_144
"""Longer answers are not kept; with the bound on entries this bounds the memory of both stores."""


class Memory:
    """What one request has to do with earlier ones. `replay`: the stored answer of the same idempotent request;
    `hit`: a valid cached answer; `label`: the x-rungway-cache header as long as nothing is served from the cache."""

    __slots__ = ("_gateway", "_key", "_slot", "_tenant", "_token", "hit", "label", "replay", "wanted")

    def __init__(self, gateway: Gateway, tenant: str) -> None:
        self._gateway = gateway
        self._tenant = tenant
        self._key: str | None = None
        self._token: str | None = None
        self._slot: Slot[Stored] | None = None
        self.replay: Stored | None = None
        self.hit: Stored | None = None
        self.wanted = False
        self.label = "off"

    @property
    def keeping(self) -> bool:
        """Whether a whole answer would be stored, so that a stream has to be gathered."""
        return self._slot is not None or self._key is not None

    def recall(self, reading: Reading, catalogue: Catalogue) -> None:
        """Fills this memory. Raises RequestError for a mismatched or still running idempotent request."""
        directives = reading.directives
        cacheable = _cacheable(reading)
        if directives.idempotency_key is None and not cacheable:
            return
        body = canonical(reading.body, ("user",) if isinstance(reading.body, EmbeddingBody) else HARMLESS)
        now_ns = monotonic_ns()
        if directives.idempotency_key is not None:
            self._join(
                directives.idempotency_key, hashlib.sha256(reading.ask.endpoint.encode() + body).digest(), now_ns
            )
        if self.replay is not None or not cacheable:
            return
        epoch = catalogue.epochs[self._tenant]
        key = cache_key(tenant=self._tenant, epoch=epoch, endpoint=reading.ask.endpoint, body=body)
        self._key = key if directives.keep else None
        self.wanted = directives.cache == "exact"
        self.label = "miss" if self.wanted else "off"
        if not directives.fresh:
            self.hit = self._gateway.cache.get(self._tenant, key, now_ns)
        if self.wanted:
            self._gateway.count("cache_total", (self._tenant, "exact", "miss" if self.hit is None else "hit"))

    def keep(self, reading: Reading, grant: Grant, answer: Stored) -> None:
        """Store a whole answer where it may be stored."""
        if answer.size > STORED_CHARS_MAX:
            return
        now_ns = monotonic_ns()
        if self._slot is not None and self._token is not None and grant.offer.kind is not OfferKind.TEMPLATE:
            self._gateway.idempotency.complete(self._tenant, self._token, self._slot, answer, now_ns)
            self._slot = None
        if self._key is not None and _full(reading, grant, answer):
            self._gateway.cache.put(self._tenant, self._key, answer, now_ns)

    def close(self) -> None:
        """Free the idempotency key of a request that gave no whole answer."""
        if self._slot is not None and self._token is not None:
            self._gateway.idempotency.release(self._tenant, self._token, self._slot)
            self._slot = None

    def _join(self, token: str, digest: bytes, now_ns: int) -> None:
        slot = self._gateway.idempotency.claim(self._tenant, token, digest, now_ns)
        if slot.answer is not None:
            self.replay = slot.answer
        else:
            self._token, self._slot = token, slot


def recall(gateway: Gateway, reading: Reading, catalogue: Catalogue) -> Memory:
    """Looks both stores up and tells the controller, through the Ask, what there is."""
    memory = Memory(gateway, reading.tenant.name)
    memory.recall(reading, catalogue)
    if memory.hit is not None:
        reading.ask = msgspec.structs.replace(reading.ask, cached=True, cache_wanted=memory.wanted)
    elif memory.wanted:
        reading.ask = msgspec.structs.replace(reading.ask, cache_wanted=True)
    return memory


def _cacheable(reading: Reading) -> bool:
    body, directives = reading.body, reading.directives
    if directives.cache_refused or (directives.cache != "exact" and not reading.tenant.cache.ladder):
        return False
    if directives.risk is not Risk.NORMAL or directives.action not in (Action.PURE, Action.READ):
        return False
    if isinstance(body, EmbeddingBody):
        return directives.cache == "exact"  # always the same vectors; the ladder has no use for them
    return body.temperature == 0 or (body.seed is not None and body.temperature is not None)


def _full(reading: Reading, grant: Grant, answer: Stored) -> bool:
    """A full answer: rung 0, and ended by the model or by the client's own bound."""
    offer, bound = grant.offer, reading.ask.output_bound
    if offer.kind is not OfferKind.MODEL or offer.rung != 0 or offer.degraded:
        return False
    own_bound = bound is not None and offer.max_tokens >= bound
    return all(choice.finish == "stop" or (choice.finish == "length" and own_bound) for choice in answer.choices)
