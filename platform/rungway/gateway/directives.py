"""What a client asks for in headers, beside the body. Class may only be lowered; nothing here can name a tenant."""

from __future__ import annotations

import re
from typing import NamedTuple

from rungway.contracts import CLASS_ORDER, Tenant, TenantClass
from rungway.errors import RequestError
from rungway.gateway.schema import bad
from rungway.types import Action, Risk

NAME_CHARS_MAX = 128
_NUMBER = re.compile(rb"[0-9]{1,12}(\.[0-9]{1,6})?")
_VISIBLE = re.compile(rb"[\x21-\x7e]{1,128}")


class Directives(NamedTuple):
    """`cache` is what the client and the tenant's terms want together: off or exact. `cache_refused`: the client said
    off, so that not even the ladder may answer from the cache. `fresh`: Cache-Control no-cache; `keep`: not no-store."""

    tenant_class: TenantClass
    risk: Risk
    action: Action
    deadline_ms: float | None
    session: str | None
    idempotency_key: str | None
    cache: str
    cache_refused: bool
    fresh: bool
    keep: bool


def read_directives(headers: dict[bytes, bytes], tenant: Tenant) -> Directives:
    """`headers` by lower-case name. Raises RequestError `invalid_request` with the header's name as `param`."""
    get = headers.get
    action = _action(get(b"x-rungway-action"))
    key = _name("idempotency-key", get(b"idempotency-key"))
    if action is Action.IDEMPOTENT_WRITE and key is None:
        raise bad("idempotency-key", "the action 'idempotent_write' needs an Idempotency-Key header")
    asked = get(b"x-rungway-cache")
    cache = tenant.cache.mode if asked is None else _cache(asked)
    control = get(b"cache-control", b"").lower()
    return Directives(
        tenant_class=_class(get(b"x-rungway-class"), tenant.tenant_class),
        risk=_risk(get(b"x-rungway-risk")),
        action=action,
        deadline_ms=_deadline(get(b"x-rungway-deadline-ms")),
        session=_name("x-rungway-session", get(b"x-rungway-session")),
        idempotency_key=key,
        cache=cache,
        cache_refused=asked is not None and cache == "off",
        fresh=b"no-cache" in control,
        keep=b"no-store" not in control,
    )


def _invalid(header: str, choices: str) -> RequestError:
    return bad(header, f"the header '{header}' must be {choices}")


def _class(given: bytes | None, own: TenantClass) -> TenantClass:
    if given is None:
        return own
    text = given.decode("latin-1")
    wanted = next((one for one in CLASS_ORDER if one.value == text), None)
    if wanted is None:
        raise _invalid("x-rungway-class", "one of interactive, standard, batch")
    if CLASS_ORDER.index(wanted) < CLASS_ORDER.index(own):
        raise bad("x-rungway-class", f"the header 'x-rungway-class' may only lower the tenant's class '{own.value}'")
    return wanted


def _risk(given: bytes | None) -> Risk:
    if given is None or given == b"normal":
        return Risk.NORMAL
    if given == b"high":
        return Risk.HIGH
    raise _invalid("x-rungway-risk", "'normal' or 'high'")


_ACTIONS = {action.value.encode(): action for action in Action}


def _action(given: bytes | None) -> Action:
    if given is None:
        return Action.READ
    action = _ACTIONS.get(given)
    if action is None:
        raise _invalid("x-rungway-action", "one of pure, read, idempotent_write, non_idempotent_write")
    return action


def _deadline(given: bytes | None) -> float | None:
    if given is None:
        return None
    if not _NUMBER.fullmatch(given) or float(given) <= 0:
        raise _invalid("x-rungway-deadline-ms", "a positive number of milliseconds")
    return float(given)


def _cache(given: bytes) -> str:
    if given == b"semantic":
        raise bad("x-rungway-cache", "the semantic cache is not available in this version")
    if given not in (b"off", b"exact"):
        raise _invalid("x-rungway-cache", "'off' or 'exact'")
    return given.decode()


def _name(header: str, given: bytes | None) -> str | None:
    if given is None:
        return None
    if not _VISIBLE.fullmatch(given):
        raise _invalid(header, f"1 to {NAME_CHARS_MAX} visible ASCII characters")
    return given.decode()
