"""One HTTP exchange as ASGI gives it: its id, its clocks, its body, and whether an answer has begun."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, MutableMapping
from typing import TYPE_CHECKING, Any

from rungway.clock import NS_PER_MS, monotonic_ns, wall_ns
from rungway.errors import RequestError, RungwayError
from rungway.gateway.answer import Facts, error_body, json_headers
from rungway.outcomes import Code

if TYPE_CHECKING:
    from rungway.gateway.catalogue import Catalogue
    from rungway.gateway.core import Gateway
    from rungway.gateway.identify import Caller

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

ID_RANDOM_BYTES = 6
BODY_WAIT_S = 60.0
"""How long a client may take to send its body."""
_ONCE = (b"authorization", b"content-type", b"content-encoding", b"idempotency-key")


class ClientGone(RungwayError):
    """The client closed the connection: nobody is there to answer to."""


class Call:
    """`id` is ours alone, never the client's. `received_ns` is monotonic. `tenant` is the label for counters.
    `cut`: this server itself gave the exchange up, because the client does not read."""

    __slots__ = (
        "cut",
        "endpoint",
        "facts",
        "gateway",
        "headers",
        "id",
        "receive",
        "received_ns",
        "received_wall_ns",
        "scope",
        "send",
        "started",
        "tenant",
    )

    def __init__(self, gateway: Gateway, endpoint: str, scope: Scope, receive: Receive, send: Send) -> None:
        self.gateway = gateway
        self.endpoint = endpoint
        self.scope = scope
        self.receive = receive
        self.send = send
        self.received_ns = monotonic_ns()
        self.received_wall_ns = wall_ns()
        self.id = request_id(self.received_wall_ns)
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        self.facts = Facts(self.id)
        self.started = False
        self.cut = False
        self.tenant = "unknown"

    def identify(self, catalogue: Catalogue) -> Caller:
        """Who asks. Raises RequestError: 401, and 400 for a header of which nobody could say which of two holds."""
        if len(self.headers) != len(self.scope["headers"]):
            _refuse_twice(self.scope["headers"])
        caller = catalogue.keys.identify(self.headers.get(b"authorization"), self.received_wall_ns)
        self.tenant = caller.tenant.name
        return caller

    def count_refused(self, error: RequestError) -> None:
        """An error answer that this gateway gave by itself."""
        self.gateway.count("refused_total", (self.tenant, error.code.value))

    async def body(self, bytes_max: int) -> bytes:
        """The whole body. Raises RequestError `unsupported_media_type`, `body_too_large` (counted while it comes,
        whatever Content-Length says), `invalid_request` when it takes too long, ClientGone on a disconnect."""
        kind = self.headers.get(b"content-type")
        if kind is not None and kind.partition(b";")[0].strip().lower() != b"application/json":
            raise RequestError(Code.UNSUPPORTED_MEDIA_TYPE, "the content type must be application/json")
        if self.headers.get(b"content-encoding", b"identity").strip().lower() != b"identity":
            raise RequestError(Code.UNSUPPORTED_MEDIA_TYPE, "compressed bodies are not supported")
        declared = self.headers.get(b"content-length", b"0")
        if declared.isdigit() and int(declared) > bytes_max:
            raise _too_large(bytes_max)
        try:
            async with asyncio.timeout(BODY_WAIT_S):
                return await self._whole(bytes_max)
        except TimeoutError:
            raise RequestError(Code.INVALID_REQUEST, "the body did not come in time") from None

    async def _whole(self, bytes_max: int) -> bytes:
        message = await self._chunk()
        chunks = [message.get("body", b"")]
        size = len(chunks[0])
        while message.get("more_body") and size <= bytes_max:
            message = await self._chunk()
            chunks.append(message.get("body", b""))
            size += len(chunks[-1])
        if size > bytes_max:
            raise _too_large(bytes_max)
        return b"".join(chunks) if len(chunks) > 1 else chunks[0]

    async def _chunk(self) -> MutableMapping[str, Any]:
        message = await self.receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        return message

    async def left(self) -> None:
        """Returns once the client has closed the connection; call it only after the body is here."""
        while (await self.receive())["type"] != "http.disconnect":
            pass

    async def respond(self, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
        """A whole answer in two ASGI messages."""
        self.started = True
        await self.send({"type": "http.response.start", "status": status, "headers": headers})
        await self.send({"type": "http.response.body", "body": body})

    async def refuse(self, error: RequestError) -> None:
        """The error answer, with whatever headers are known by now. Only before an answer has begun."""
        self.facts.retry_after_s = error.retry_after_s
        body = error_body(error)
        await self.respond(error.status, json_headers(self.facts, len(body), error), body)


def request_id(wall_ns: int) -> str:
    """A new id: the time in milliseconds, then chance. Ids that grow with time are appended to the ledger's indexes,
    where random ones would dirty a page each."""
    return f"req_{wall_ns // NS_PER_MS:012x}{os.urandom(ID_RANDOM_BYTES).hex()}"


def _refuse_twice(headers: list[tuple[bytes, bytes]]) -> None:
    """Two keys in one request could be read as one tenant by a proxy in front and as another one here."""
    seen: set[bytes] = set()
    for name, _ in headers:
        if name in seen and (name in _ONCE or name.startswith(b"x-rungway-")):
            shown = name.decode("latin-1")
            raise RequestError(Code.INVALID_REQUEST, f"the header '{shown}' is given more than once", param=shown)
        seen.add(name)


def _too_large(bytes_max: int) -> RequestError:
    return RequestError(Code.BODY_TOO_LARGE, f"the body is larger than {bytes_max} bytes")
