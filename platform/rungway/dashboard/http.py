"""The few pieces of HTTP that the dashboard needs: one bounded request, one answer with its safety headers, static files."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from http.cookies import CookieError, SimpleCookie
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

from rungway.errors import RequestError
from rungway.gateway.call import Receive, Scope, Send
from rungway.outcomes import Code

COOKIE = "rungway_session"
BODY_BYTES_MAX = 4096
QUERY_BYTES_MAX = 2048
COOKIE_BYTES_MAX = 8192
STATIC = Path(__file__).parent / "static"
_KINDS = {
    ".html": b"text/html; charset=utf-8",
    ".css": b"text/css; charset=utf-8",
    ".js": b"text/javascript; charset=utf-8",
    ".svg": b"image/svg+xml",
}
_SAFETY = [
    (
        b"content-security-policy",
        b"default-src 'self'; object-src 'none'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'; "
        b"require-trusted-types-for 'script'",
    ),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
]


@dataclass(slots=True)
class Reply:
    """A whole answer. Nothing that depends on who asks may be stored by anybody."""

    status: int
    kind: bytes
    body: bytes = b""
    headers: list[tuple[bytes, bytes]] = field(default_factory=lambda: [(b"cache-control", b"no-store")])


class Request:
    """One request to the dashboard; `path` is below the mount point and starts with a slash."""

    def __init__(self, scope: Scope, receive: Receive) -> None:
        self.method: str = scope["method"]
        self.path = scope["path"].removeprefix(scope.get("root_path", "")) or "/"
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        forwarded = self.headers.get(b"x-forwarded-proto", b"").strip().lower()
        self.secure = scope.get("scheme") == "https" or forwarded == b"https"
        self._query: bytes = scope.get("query_string", b"")
        self._receive = receive

    def arguments(self) -> dict[str, str]:
        """Raises RequestError when the query string is too long."""
        if len(self._query) > QUERY_BYTES_MAX:
            raise RequestError(Code.INVALID_REQUEST, "the query string is too long")
        return dict(parse_qsl(self._query.decode("latin-1")))

    def cookie(self) -> str:
        """The session cookie's value, or nothing."""
        raw = self.headers.get(b"cookie", b"")
        if not raw or len(raw) > COOKIE_BYTES_MAX:
            return ""
        try:
            found = SimpleCookie(raw.decode("latin-1")).get(COOKIE)
        except CookieError:
            return ""
        return found.value if found is not None else ""

    def wants_json(self) -> bool:
        return b"application/json" in self.headers.get(b"accept", b"")

    def same_origin(self) -> bool:
        """Whether a page of ours sent this. A browser says so by Sec-Fetch-Site, on plain HTTP at least by Origin; a form
        of a page without referrer has the origin `null`, and then only Sec-Fetch-Site counts."""
        site = self.headers.get(b"sec-fetch-site")
        origin = self.headers.get(b"origin", b"null").decode("latin-1")
        if site is not None and site != b"same-origin":
            return False
        if origin == "null":
            return site == b"same-origin"
        return urlsplit(origin).netloc.lower() == self.headers.get(b"host", b"").decode("latin-1").lower() != ""

    async def body(self) -> bytes:
        """Raises RequestError `body_too_large`."""
        whole, more = b"", True
        while more:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                return b""
            whole += message.get("body", b"")
            more = bool(message.get("more_body"))
            if len(whole) > BODY_BYTES_MAX:
                raise RequestError(Code.BODY_TOO_LARGE, f"the body is larger than {BODY_BYTES_MAX} bytes")
        return whole


async def respond(send: Send, reply: Reply) -> None:
    length = (b"content-length", b"%d" % len(reply.body))
    headers = [(b"content-type", reply.kind), length, *reply.headers, *_SAFETY]
    await send({"type": "http.response.start", "status": reply.status, "headers": headers})
    await send({"type": "http.response.body", "body": reply.body})


def load_static() -> dict[str, Reply]:
    """All static files by name, read once, each with its ETag; browsers ask again and mostly get a 304."""
    files = {}
    for path in sorted(STATIC.iterdir()):
        if path.suffix in _KINDS:
            body = path.read_bytes()
            tag = b'"' + hashlib.sha256(body).hexdigest()[:32].encode() + b'"'
            files[path.name] = Reply(200, _KINDS[path.suffix], body, [(b"etag", tag), (b"cache-control", b"no-cache")])
    return files


def static(files: dict[str, Reply], name: str, request: Request) -> Reply:
    """A static file, or 304 when the browser has it. Raises RequestError `not_found`."""
    reply = files.get(name)
    if reply is None:
        raise RequestError(Code.NOT_FOUND, "there is no such file")
    tag = reply.headers[0][1]
    return Reply(304, reply.kind, b"", reply.headers) if request.headers.get(b"if-none-match") == tag else reply
