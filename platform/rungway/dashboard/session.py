"""Who is looking: a signed cookie that any gateway can check and that dies with its key.

The cookie says which key signed in and until when; it holds no secret and no text of a key. Its signature covers the
key's stored digest too, so that a new key under an old id does not inherit a session. Nothing is kept on the server.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from typing import NamedTuple

import msgspec

from rungway.clock import NS_PER_S
from rungway.contracts import ApiKey, Tenant
from rungway.gateway.catalogue import Catalogue
from rungway.gateway.identify import Caller

LIFETIME_S = 12 * 3600
TOKEN_CHARS_MAX = 1024
CLOCK_SLACK_S = 60
SCOPES = ("admin", "usage")
_DOMAIN = b"rungway dashboard session 1\0"


class _Claims(msgspec.Struct, frozen=True, array_like=True):
    """What a cookie says. Times are whole seconds since the epoch."""

    tenant: str
    key_id: str
    issued_s: int
    expires_s: int


class Viewer(NamedTuple):
    """A signed-in person: the tenant and key behind the session, as they are configured now."""

    tenant: Tenant
    key: ApiKey
    expires_s: int

    @property
    def admin(self) -> bool:
        return "admin" in self.key.scopes


def may_look(key: ApiKey) -> bool:
    """Whether this key may see any page at all."""
    return any(scope in key.scopes for scope in SCOPES)


def issue(secret: bytes, caller: Caller, now_wall_ns: int) -> tuple[str, int]:
    """(cookie value, seconds it is valid) for a key that has just been shown. Never longer than the key itself."""
    now_s = now_wall_ns // NS_PER_S
    expires_s = now_s + LIFETIME_S
    if caller.key.expires_ns is not None:
        expires_s = min(expires_s, caller.key.expires_ns // NS_PER_S)
    payload = msgspec.json.encode(_Claims(caller.tenant.name, caller.key.id, now_s, expires_s))
    return f"{_text(payload)}.{_text(_sign(secret, payload, caller.key))}", max(0, expires_s - now_s)


def read(secret: bytes, token: str, catalogue: Catalogue, now_wall_ns: int) -> Viewer | None:
    """The viewer behind a cookie, or None: forged, expired, or its key is gone, changed, expired, revoked, or may not
    look any more. Without a secret nobody is signed in."""
    body, _, mark = token.partition(".")
    if not secret or not mark or len(token) > TOKEN_CHARS_MAX:
        return None
    try:
        payload, signature = _bytes(body), _bytes(mark)
        claims = msgspec.json.decode(payload, type=_Claims)
    except (ValueError, msgspec.MsgspecError):
        return None
    tenant = catalogue.tenants.get(claims.tenant)
    key = next((key for key in tenant.keys if key.id == claims.key_id), None) if tenant is not None else None
    if tenant is None or key is None or not hmac.compare_digest(signature, _sign(secret, payload, key)):
        return None
    now_s = now_wall_ns // NS_PER_S
    fresh = claims.issued_s - CLOCK_SLACK_S <= now_s < min(claims.expires_s, claims.issued_s + LIFETIME_S)
    alive = not key.revoked and (key.expires_ns is None or now_wall_ns < key.expires_ns)
    return Viewer(tenant, key, claims.expires_s) if fresh and alive and may_look(key) else None


def _sign(secret: bytes, payload: bytes, key: ApiKey) -> bytes:
    return hmac.new(secret, _DOMAIN + key.sha256.lower().encode() + b"\0" + payload, hashlib.sha256).digest()


def _text(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode("ascii")


def _bytes(text: str) -> bytes:
    """Raises ValueError for anything but the one spelling that `_text` gives."""
    try:
        raw = base64.b64decode(text.encode("ascii") + b"=" * (-len(text) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, UnicodeEncodeError) as error:
        raise ValueError("not base64") from error
    if _text(raw) != text:
        raise ValueError("not canonical")
    return raw
