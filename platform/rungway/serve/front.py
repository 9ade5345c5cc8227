"""The way from the HTTP server of a gateway's process to the gateway: straight, without Serve's own work per request.

Ray Serve starts uvicorn in the process of every ingress and puts itself between: an id for each request, counts, access
log, a second watcher for disconnects, a time limit that a client's header may set. The gateway does all of this itself
or must not have it done; it cost as much CPU as the gateway's own work. So Serve gets its own paths (health and routes,
below `/-/`), and the gateway the rest. What Serve needs from requests at the end of a process, that they finish, it
takes from uvicorn, which waits for those that run.
"""

from __future__ import annotations

from typing import Any

from ray.serve._private import http_util

from rungway.gateway.app import App
from rungway.gateway.call import Receive, Scope, Send

_SERVES_OWN = "/-/"


def front(app: App, serves: App) -> App:
    """`app` for everything but Serve's own paths, which `serves` answers."""

    async def ingress(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].startswith(_SERVES_OWN):
            await serves(scope, receive, send)
        else:
            await app(scope, receive, send)

    return ingress


def answer_directly(app: App) -> None:
    """From now on the HTTP servers that Serve starts in this process hand their requests to `app`. The hook is the one
    middleware that Serve lays around every ingress; without it (Serve's own proxy stands in for HAProxy) all goes the
    long way and works as well."""

    def middleware(serves: Any) -> App:
        return front(app, serves)

    http_util.RequestIdMiddleware = middleware
