"""Who asks: the tenant and the key behind `Authorization: Bearer`, and nothing else a client may say about itself.

Keys are known by their SHA-256 only. No text of a key, known or not, leaves this module: errors name neither the key nor
a part of it.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable
from typing import NamedTuple

from rungway.contracts import ApiKey, Tenant
from rungway.errors import RequestError
from rungway.outcomes import Code

KEY_BYTES_MAX = 256


class Caller(NamedTuple):
    """The tenant that a request belongs to, and the key it came with."""

    tenant: Tenant
    key: ApiKey

    @property
    def admin(self) -> bool:
        return "admin" in self.key.scopes

    def require(self, scope: str) -> None:
        """Raises RequestError `scope_missing` (403) when the key does not carry `scope`."""
        if scope not in self.key.scopes:
            raise RequestError(Code.SCOPE_MISSING, f"this key does not have the scope '{scope}'")


class KeyRing:
    """All keys of all tenants, by digest. Immutable; a reload makes a new one."""

    def __init__(self, tenants: Iterable[Tenant]) -> None:
        self._by_digest = {key.sha256.lower(): Caller(tenant, key) for tenant in tenants for key in tenant.keys}

    def identify(self, authorization: bytes | None, now_wall_ns: int) -> Caller:
        """The caller behind an Authorization header. `now_wall_ns` is wall-clock time, against which keys expire.

        Raises RequestError: `invalid_api_key`, `key_expired` or `key_revoked`, all 401.
        """
        digest = hashlib.sha256(_bearer(authorization)).hexdigest()
        caller = self._by_digest.get(digest)
        if caller is None or not hmac.compare_digest(caller.key.sha256.lower(), digest):
            raise RequestError(Code.INVALID_API_KEY, "this API key is not known here")
        if caller.key.revoked:
            raise RequestError(Code.KEY_REVOKED, "this API key has been revoked")
        if caller.key.expires_ns is not None and now_wall_ns >= caller.key.expires_ns:
            raise RequestError(Code.KEY_EXPIRED, "this API key has expired")
        return caller


def _bearer(authorization: bytes | None) -> bytes:
    if authorization is None:
        raise RequestError(Code.INVALID_API_KEY, "an API key is needed: send 'Authorization: Bearer <key>'")
    scheme, _, key = authorization.partition(b" ")
    key = key.strip()
    if scheme.lower() != b"bearer" or not key or len(key) > KEY_BYTES_MAX:
        raise RequestError(Code.INVALID_API_KEY, "the Authorization header must read 'Bearer <key>'")
    return key
