"""The small routes: probes, models, usage, decisions, cancel, and the admin reads and commands that the controller answers.

A handler takes the call and the last part of the path, writes one answer, or raises RequestError.
"""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import parse_qsl

import msgspec

from rungway.errors import RequestError
from rungway.gateway.answer import json_headers
from rungway.gateway.call import Call
from rungway.gateway.catalogue import Catalogue
from rungway.gateway.identify import Caller
from rungway.gateway.schema import bad, shown
from rungway.observe.metrics import GAUGES
from rungway.outcomes import Code

ADMIN_READS = {
    "usage": "usage",
    "audit": "audit",
    "audit/verify": "audit_verify",
    "ladder": "ladder",
    "pools": "pools",
    "tenants": "tenants",
    "config": "config",
    "engine-truth": "engine_truth",
    "live": "live",
}
NOT_AVAILABLE = ("responses", "feedback", "sessions", "tasks")
DEGRADED = "rungway_quota_degraded"
QUERY_CHARS_MAX = 4096
COMMAND_BYTES_MAX = 65_536
_LADDER_FIELDS = ("pool", "tenant_class", "rung", "ttl_s", "why")


async def livez(call: Call, _: str) -> None:
    """200 while the process's loops run."""
    healthy = call.gateway.healthy()
    await _json(call, {"status": "ok" if healthy else "failed"}, 200 if healthy else 503)


async def readyz(call: Call, _: str) -> None:
    """200 only with a controller, a directory, tokenizers, and a reachable replica for every tier."""
    lacking = call.gateway.lacking()
    await _json(call, {"ready": not lacking, "lacking": lacking}, 503 if lacking else 200)


async def metrics(call: Call, _: str) -> None:
    """Prometheus text, without a key: the listener is loopback by default. While the controller is away and its lease is
    in use there is one series, this gateway's own."""
    if call.gateway.admitting():
        text = f"# HELP {DEGRADED} {GAUGES['quota_degraded'][0]}\n# TYPE {DEGRADED} gauge\n{DEGRADED} 1\n".encode()
        headers = json_headers(call.facts, len(text))
        headers[0] = (b"content-type", b"text/plain; version=0.0.4; charset=utf-8")
        await call.respond(200, headers, text)
        return
    await _query(call, "metrics", {}, "", admin=True)


async def models(call: Call, rest: str) -> None:
    """The models that the caller's tenant may ask for."""
    catalogue, caller = _identified(call)
    found = [_model(name, catalogue) for name in catalogue.models_of(caller.tenant)]
    await _json(call, {"object": "list", "data": found})


async def model(call: Call, name: str) -> None:
    catalogue, caller = _identified(call)
    if catalogue.plan(caller.tenant, name) is None:
        raise RequestError(Code.MODEL_NOT_FOUND, f"there is no model '{shown(name)}' for this key", param="model")
    await _json(call, _model(name, catalogue))


async def usage(call: Call, rest: str) -> None:
    """The caller's own tenant, whatever the query string says."""
    _, caller = _identified(call)
    caller.require("usage")
    await _query(call, "usage", _arguments(call) | {"tenant": caller.tenant.name}, caller.tenant.name, admin=False)


async def decision(call: Call, request_id: str) -> None:
    """How one request was decided: the caller's own, or any for an admin."""
    _, caller = _identified(call)
    if not caller.admin:
        caller.require("usage")
    await _query(call, "decision", {"request_id": request_id}, caller.tenant.name, admin=caller.admin)


async def cancel(call: Call, rest: str) -> None:
    """POST /v1/requests/{id}/cancel: here, or through the controller where another gateway holds the request."""
    request_id, _, verb = rest.partition("/")
    if verb != "cancel":
        raise RequestError(Code.NOT_FOUND, "there is no such path")
    _, caller = _identified(call)
    if not caller.admin:
        caller.require("inference")
    if call.gateway.cancel(request_id, None if caller.admin else caller.tenant.name):
        await _json(call, {"id": request_id, "cancelled": True})
        return
    await _query(call, "cancel", {"request_id": request_id}, caller.tenant.name, admin=caller.admin)


async def not_available(call: Call, name: str) -> None:
    raise RequestError(Code.NOT_FOUND, f"'{name}' is not available in this version")


async def admin_read(call: Call, _: str) -> None:
    caller = _admin(call)
    name = call.scope["path"].removeprefix("/admin/")
    await _query(call, ADMIN_READS[name], _arguments(call), caller.tenant.name, admin=True)


async def admin_command(call: Call, name: str) -> None:
    """POST /admin/reload."""
    caller = _admin(call)
    await _query(call, name, {"who": caller.key.id}, caller.tenant.name, admin=True)


async def admin_ladder(call: Call, _: str) -> None:
    """POST sets an override ({"pool", "tenant_class", "rung", "ttl_s", "why"}); {"clear": true} or DELETE ends it."""
    caller = _admin(call)
    given = await _command(call)
    asked = given.pop("clear", False)
    if not isinstance(asked, bool):
        raise bad("clear", "'clear' must be true or false")
    clear = asked or call.scope["method"] == "DELETE"
    for name in given:
        if name not in _LADDER_FIELDS:
            raise bad(shown(name), f"unknown field '{shown(name)}'")
    if not clear and "rung" not in given:
        raise bad("rung", "'rung' is missing")
    name = "ladder_clear" if clear else "ladder_set"
    await _query(call, name, given | {"who": caller.key.id}, caller.tenant.name, admin=True)


def _identified(call: Call) -> tuple[Catalogue, Caller]:
    catalogue = call.gateway.known()
    return catalogue, call.identify(catalogue)


def _admin(call: Call) -> Caller:
    _, caller = _identified(call)
    caller.require("admin")
    return caller


def _model(name: str, catalogue: Catalogue) -> dict[str, object]:
    tiers = catalogue.aliases[name]
    return {
        "id": name,
        "object": "model",
        "created": 0,
        "owned_by": catalogue.platform.cell,
        "kind": catalogue.tiers[tiers[0]].kind.value,
        "tiers": list(tiers),
        "max_context": max((catalogue.context_max[tier] for tier in tiers), default=0),
    }


def _arguments(call: Call) -> dict[str, object]:
    text = call.scope.get("query_string", b"")
    if len(text) > QUERY_CHARS_MAX:
        raise bad(None, "the query string is too long")
    return dict(parse_qsl(text.decode("latin-1")))


async def _command(call: Call) -> dict[str, Any]:
    raw = await call.body(COMMAND_BYTES_MAX)
    if not raw.strip():
        return {}
    try:
        return msgspec.json.decode(raw, type=dict[str, Any])
    except msgspec.DecodeError:
        raise bad(None, "the body must be a JSON object") from None


async def _query(call: Call, name: str, args: dict[str, object], tenant: str, *, admin: bool) -> None:
    """Pass the controller's answer on as it is."""
    answer = await call.gateway.query(name, args, tenant, admin)
    if answer.status == 503:
        call.facts.retry_after_s = 1
    headers = json_headers(call.facts, len(answer.body))
    headers[0] = (b"content-type", answer.content_type.encode("latin-1"))
    await call.respond(answer.status, headers, answer.body)


async def _json(call: Call, shape: object, status: int = 200) -> None:
    text = json.dumps(shape, separators=(",", ":")).encode("ascii")
    await call.respond(status, json_headers(call.facts, len(text)), text)
