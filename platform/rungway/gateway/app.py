"""The ASGI application: a literal table of routes over the gateway, and the two guards at the edge.

Raw ASGI, because the inference path must cost microseconds: no framework, no middleware. `mounts` hangs other ASGI apps
(the dashboard) under a prefix.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping

from rungway.errors import RequestError
from rungway.gateway import routes
from rungway.gateway.call import Call, ClientGone, Receive, Scope, Send
from rungway.gateway.core import Gateway
from rungway.outcomes import Code
from rungway.request_path import serve_request

App = Callable[[Scope, Receive, Send], Awaitable[None]]
Handler = Callable[[Call, str], Awaitable[None]]

_log = logging.getLogger(__name__)

INFERENCE = {"/v1/chat/completions": "chat", "/v1/completions": "completions", "/v1/embeddings": "embeddings"}

ROUTES: dict[str, dict[str, Handler]] = {
    "/livez": {"GET": routes.livez},
    "/readyz": {"GET": routes.readyz},
    "/metrics": {"GET": routes.metrics},
    "/v1/models": {"GET": routes.models},
    "/v1/usage": {"GET": routes.usage},
    "/admin/reload": {"POST": routes.admin_command},
    "/admin/ladder": {"GET": routes.admin_read, "POST": routes.admin_ladder, "DELETE": routes.admin_ladder},
}
for _name in routes.ADMIN_READS:
    ROUTES.setdefault("/admin/" + _name, {"GET": routes.admin_read})
for _name in routes.NOT_AVAILABLE:
    ROUTES["/v1/" + _name] = {"GET": routes.not_available, "POST": routes.not_available}

# The rest of the path after the prefix is the handler's second argument.
PREFIXES: dict[str, dict[str, Handler]] = {
    "/v1/models/": {"GET": routes.model},
    "/v1/decisions/": {"GET": routes.decision},
    "/v1/requests/": {"POST": routes.cancel},
}


def create_app(gateway: Gateway, mounts: Mapping[str, App] | None = None) -> App:
    """The application. Its lifespan starts and stops the gateway; a host without lifespan events does so itself.

    `mounts` maps a path prefix without a trailing slash to the ASGI app that serves it and everything below it; that
    app sees the full path and `root_path`.
    """
    mounted = dict(mounts or {})

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        kind = scope["type"]
        if kind == "http":
            path = scope["path"]
            endpoint = INFERENCE.get(path)
            if endpoint is not None and scope["method"] == "POST":
                await _guarded(Call(gateway, endpoint, scope, receive, send), serve_request)
                return
            for prefix, other in mounted.items():
                if path == prefix or path.startswith(prefix + "/"):
                    await other({**scope, "root_path": scope.get("root_path", "") + prefix}, receive, send)
                    return
            await _guarded(Call(gateway, "other", scope, receive, send), _route)
        elif kind == "lifespan":
            await _lifespan(gateway, receive, send)
        elif kind == "websocket":
            await receive()
            await send({"type": "websocket.close", "code": 1000})

    return app


async def _route(call: Call) -> None:
    """Everything that is not inference. Errors become the API's error body."""
    try:
        methods, rest = _find(call.scope["path"])
        method = "GET" if call.scope["method"] == "HEAD" else call.scope["method"]  # the server drops a HEAD's body
        handler = methods.get(method)
        if handler is None:
            call.facts.allow = ", ".join(sorted(methods) + ["HEAD"] * ("GET" in methods))
            raise RequestError(Code.METHOD_NOT_ALLOWED, f"this path takes {call.facts.allow}")
        await handler(call, rest)
    except RequestError as error:
        call.count_refused(error)
        await call.refuse(error)
    except ClientGone:
        return


def _find(path: str) -> tuple[dict[str, Handler], str]:
    """What the path takes by method, and the part of the path that its handlers want."""
    methods, rest = ROUTES.get(path), path.rpartition("/")[2]
    if methods is None and path in INFERENCE:
        methods = {"POST": routes.not_available}
    if methods is None:
        for prefix, found in PREFIXES.items():
            if path.startswith(prefix) and len(path) > len(prefix):
                methods, rest = found, path[len(prefix) :]
    if methods is None:
        raise RequestError(Code.NOT_FOUND, "there is no such path")
    return methods, rest


async def _guarded(call: Call, handle: Callable[[Call], Awaitable[None]]) -> None:
    """Nothing leaves as a bare traceback or an empty answer."""
    try:
        await handle(call)
    except asyncio.CancelledError:
        if not call.cut:
            raise
        _log.warning("%s: the client did not read its answer and was cut off", call.id)
    except Exception:  # noqa: BLE001 - the edge of the process: a bug becomes one logged 500, not a broken connection
        _log.exception("%s failed", call.id)
        if not call.started:
            await call.refuse(RequestError(Code.INTERNAL, "an internal error; the request id helps to find it"))


async def _lifespan(gateway: Gateway, receive: Receive, send: Send) -> None:
    while True:
        message = await receive()
        if message["type"] == "lifespan.startup":
            await gateway.start()
            await send({"type": "lifespan.startup.complete"})
        elif message["type"] == "lifespan.shutdown":
            await gateway.stop()
            await send({"type": "lifespan.shutdown.complete"})
            return
