"""What makes two requests the same: every field of the body that was decoded, unless it is named harmless.

Default-deny: a field added to the schema later is in the key until somebody says that it cannot change the answer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import msgspec

_ENCODER = msgspec.json.Encoder(order="deterministic")


def canonical(body: msgspec.Struct, harmless: Iterable[str]) -> bytes:
    """The decoded body as JSON with a fixed order of members, whatever the client's order and spacing was; `harmless`
    names the fields that stand at their defaults in it."""
    defaults = {field.name: field.default for field in msgspec.structs.fields(body)}
    return _ENCODER.encode(msgspec.structs.replace(body, **{name: defaults[name] for name in harmless}))


def cache_key(*, tenant: str, epoch: str, endpoint: str, body: bytes) -> str:
    """`epoch` changes with the configuration that this tenant's answers depend on, `body` is canonical."""
    parts = (tenant.encode(), epoch.encode(), endpoint.encode(), body)
    hasher = hashlib.sha256()
    for part in parts:
        # Lengths keep neighbouring parts from running into each other.
        hasher.update(len(part).to_bytes(8, "big"))
        hasher.update(part)
    return hasher.hexdigest()
