"""Reads and admin commands that gateways pass on. One function per name; each gets the parsed arguments and the caller.

A caller without the admin scope sees its own tenant only, whatever it asks for.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import msgspec

from rungway.clock import NS_PER_S, monotonic_ns, wall_ns
from rungway.contracts import Slo, TenantClass
from rungway.control import snapshot
from rungway.control.arguments import Args, number, span, text
from rungway.control.cell import Now
from rungway.errors import ConfigError, RequestError
from rungway.messages import Answer, Query
from rungway.outcomes import Code
from rungway.policies.ladder import clear_override, set_override
from rungway.settings import effective

if TYPE_CHECKING:
    from rungway.control.service import ControllerService

JSON = "application/json"
LIMIT_MAX = 1000
OVERRIDE_S_MAX = 86_400.0


class Caller(msgspec.Struct, frozen=True):
    """Who asks. `only` is the tenant a non-admin is confined to, None for an admin."""

    tenant: str
    admin: bool

    @property
    def only(self) -> str | None:
        return None if self.admin else self.tenant


Handler = Callable[["ControllerService", Args, Caller], Awaitable[object]]


def error_answer(query_id: int, error: RequestError) -> Answer:
    return Answer(query_id, error.status, JSON, msgspec.json.encode(error.body()))


async def answer(service: ControllerService, query: Query) -> Answer:
    """Run a query by name and shape the result; a bad argument is a 400 in the API's error shape."""
    caller = Caller(query.tenant, query.admin)
    try:
        handler = HANDLERS.get(query.name)
        if handler is None:
            raise RequestError(Code.NOT_FOUND, f"There is no query {query.name!r}.")
        if query.name in ADMIN_ONLY and not caller.admin:
            raise RequestError(Code.SCOPE_MISSING, "This needs a key with the scope admin.")
        args: Args = msgspec.json.decode(query.args, type=dict[str, Any]) if query.args else {}
        result = await handler(service, args, caller)
    except RequestError as error:
        return error_answer(query.query_id, error)
    except msgspec.MsgspecError:
        return error_answer(query.query_id, RequestError(Code.INVALID_REQUEST, "The arguments are not a JSON object."))
    if isinstance(result, bytes):
        return Answer(query.query_id, 200, "text/plain; version=0.0.4; charset=utf-8", result)
    return Answer(query.query_id, 200, JSON, msgspec.json.encode(result))


def _now() -> Now:
    return Now(monotonic_ns(), wall_ns())


def _tenant(args: Args, caller: Caller) -> str | None:
    wanted = text(args, "tenant")
    return wanted if caller.admin else caller.tenant


def _targets(service: ControllerService) -> dict[str, Slo]:
    return {tenant.name: tenant.slo for tenant in service.core.cell.platform.tenants}


async def _metrics(service: ControllerService, args: Args, caller: Caller) -> object:
    cell = service.core.cell
    snapshot.set_gauges(cell, service.metrics, _now())
    since, targets = wall_ns() - 3600 * NS_PER_S, _targets(service)
    usage = await service.in_thread(lambda: service.reader.slo(since_ns=since, targets=targets))
    known = service.metrics.known
    service.metrics.set_gauge(
        "slo_attainment", [((t, slo), value) for t, slos in usage.items() if t in known for slo, value in slos.items()]
    )
    return service.metrics.render()


async def _usage(service: ControllerService, args: Args, caller: Caller) -> object:
    since, until = span(args)
    bucket = number(args, "bucket", 3600, 1, 31 * 86_400)
    tenant, targets = _tenant(args, caller), _targets(service)
    result = await service.in_thread(
        lambda: service.reader.usage(since_ns=since, until_ns=until, tenant=tenant, bucket_s=bucket, targets=targets)
    )
    cell = service.core.cell
    if tenant is not None and tenant in cell.tenants:
        result["budget"] = snapshot.budget(cell, tenant, _now())
    return result


async def _audit(service: ControllerService, args: Args, caller: Caller) -> object:
    after = number(args, "after", 0, 0, 1 << 60)
    limit = number(args, "limit", 100, 1, LIMIT_MAX)
    tenant, kind = _tenant(args, caller), text(args, "kind")
    newest = text(args, "order") == "newest"
    rows = await service.in_thread(
        lambda: service.reader.audit(after_seq=after, limit=limit, tenant=tenant, kind=kind, newest=newest)
    )
    return {"data": rows}


async def _audit_verify(service: ControllerService, args: Args, caller: Caller) -> object:
    result = await service.in_thread(service.reader.verify)
    return {"ok": result.ok, "rows": result.rows, "first_bad_seq": result.first_bad_seq, "message": result.message}


async def _decision(service: ControllerService, args: Args, caller: Caller) -> object:
    request_id = text(args, "request_id") or ""
    row = await service.in_thread(lambda: service.reader.row(request_id))
    if row is None or (caller.only is not None and row.tenant != caller.only):
        raise RequestError(Code.NOT_FOUND, f"No settled request {request_id!r}.", param="request_id")
    trail = await service.in_thread(lambda: service.reader.audit_of(request_id))
    shown = msgspec.to_builtins(row)
    shown["decision"] = msgspec.json.decode(row.decision or "{}")
    return {"request": shown, "audit": trail}


async def _ladder(service: ControllerService, args: Args, caller: Caller) -> object:
    return snapshot.ladder(service.core.cell, _now())


async def _ladder_set(service: ControllerService, args: Args, caller: Caller) -> object:
    cell, now = service.core.cell, _now()
    names = [rung.name for rung in cell.platform.ladder.rungs]
    wanted = args.get("rung")
    if wanted in names:
        rung = names.index(wanted)
    elif str(wanted).isdecimal():
        rung = number(args, "rung", 0, 0, len(names) - 1)
    else:
        raise RequestError(Code.INVALID_REQUEST, f"rung is one of {', '.join(names)}.", param="rung")
    ttl_s = number(args, "ttl_s", 600, 1, int(OVERRIDE_S_MAX))
    changed, said = _scopes(service, args), _said(args, caller)
    for pool, scope in changed:
        until_ns = now.mono_ns + ttl_s * NS_PER_S
        pool.scopes[scope], _ = set_override(pool.scopes[scope], rung, until_ns, cell.platform.ladder)
    _note(service, args, said, "set", rung, ttl_s, now)
    return {"changed": len(changed), "rung": rung, "name": names[rung], "ttl_s": ttl_s}


async def _ladder_clear(service: ControllerService, args: Args, caller: Caller) -> object:
    changed, said = _scopes(service, args), _said(args, caller)
    for pool, scope in changed:
        pool.scopes[scope], _ = clear_override(pool.scopes[scope])
    _note(service, args, said, "clear", 0, 0, _now())
    return {"changed": len(changed)}


def _scopes(service: ControllerService, args: Args) -> list[Any]:
    """(pool, scope) pairs that a ladder command names; an absent pool or class means all of them."""
    cell = service.core.cell
    pool_name, tenant_class = text(args, "pool"), text(args, "tenant_class")
    if pool_name is not None and pool_name not in cell.pools:
        raise RequestError(Code.INVALID_REQUEST, f"pool is one of {', '.join(cell.pools)}.", param="pool")
    if tenant_class is not None and tenant_class not in list(TenantClass):
        allowed = ", ".join(TenantClass)
        raise RequestError(Code.INVALID_REQUEST, f"tenant_class is one of {allowed}.", param="tenant_class")
    return [
        (pool, scope)
        for pool in cell.pools.values()
        for scope in pool.scopes
        if pool_name in (None, pool.name) and tenant_class in (None, scope[0])
    ]


def _said(args: Args, caller: Caller) -> dict[str, str]:
    """Who commands, and why."""
    return {"who": (text(args, "who") or caller.tenant)[:100], "why": (text(args, "why") or "")[:300]}


def _note(
    service: ControllerService, args: Args, said: dict[str, str], what: str, rung: int, ttl_s: int, now: Now
) -> None:
    service.core.cell.audit(
        "override",
        now,
        rung=rung,
        action=what,
        pool=args.get("pool"),
        tenant_class=args.get("tenant_class"),
        ttl_s=ttl_s,
        **said,
    )
    service.core.reoffer_all(now)


async def _pools(service: ControllerService, args: Args, caller: Caller) -> object:
    return snapshot.pools(service.core.cell, _now())


async def _tenants(service: ControllerService, args: Args, caller: Caller) -> object:
    return snapshot.tenants(service.core.cell, _now(), caller.only)


async def _live(service: ControllerService, args: Args, caller: Caller) -> object:
    return snapshot.live(service.core.cell, _now(), caller.only)


async def _config(service: ControllerService, args: Args, caller: Caller) -> object:
    return effective(service.platform)


async def _reload(service: ControllerService, args: Args, caller: Caller) -> object:
    try:
        platform = await service.reload()
    except ConfigError as error:
        mistakes = [str(mistake) for mistake in error.mistakes]
        raise RequestError(
            Code.INVALID_REQUEST, "The configuration is wrong; the old one stays. " + " | ".join(mistakes)
        ) from None
    return {"reloaded": True, "version": service.core.cell.version, "config": platform.digest}


async def _engine_truth(service: ControllerService, args: Args, caller: Caller) -> object:
    since, _ = span(args)
    limit = number(args, "limit", 1000, 1, 100_000)
    request_id = text(args, "request_id")
    truth = await service.in_thread(
        lambda: service.reader.engine_truth(since_ns=since, limit=limit, request_id=request_id)
    )
    truth["reconcile"] = await service.in_thread(lambda: service.reader.reconcile(since_ns=since))
    return truth


async def _cancel(service: ControllerService, args: Args, caller: Caller) -> object:
    request_id = text(args, "request_id") or ""
    if not service.core.cancel(request_id, caller.only, _now()):
        raise RequestError(Code.NOT_FOUND, f"No request {request_id!r} is in flight.", param="request_id")
    return {"id": request_id, "cancelled": True}


HANDLERS: dict[str, Handler] = {
    "metrics": _metrics,
    "usage": _usage,
    "audit": _audit,
    "audit_verify": _audit_verify,
    "decision": _decision,
    "ladder": _ladder,
    "ladder_set": _ladder_set,
    "ladder_clear": _ladder_clear,
    "pools": _pools,
    "tenants": _tenants,
    "live": _live,
    "config": _config,
    "reload": _reload,
    "engine_truth": _engine_truth,
    "cancel": _cancel,
}
ADMIN_ONLY = frozenset({"ladder_set", "ladder_clear", "pools", "config", "reload", "engine_truth", "audit_verify"})
