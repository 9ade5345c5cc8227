"""One `x-request-id` per answer: the gateway's.

Ray Serve wraps every ingress in a middleware that adds an id of its own to the answer, or echoes the client's. The
gateway names each request itself, so the middleware is replaced by one that only gives Serve the header it looks for.
"""

from __future__ import annotations

import uuid
from typing import Any

from ray.serve._private import http_util

_HEADER = b"x-request-id"


class InwardRequestId:
    """Replaces the client's `x-request-id` in the scope by a fresh one; leaves the answer alone."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        kept = [pair for pair in scope.get("headers", ()) if pair[0] != _HEADER]
        scope["headers"] = [*kept, (_HEADER, uuid.uuid4().hex.encode())]
        await self._app(scope, receive, send)


def answer_with_own_request_id() -> None:
    """From now on ingresses built in this process answer with the ids that their own app writes."""
    http_util.RequestIdMiddleware = InwardRequestId
