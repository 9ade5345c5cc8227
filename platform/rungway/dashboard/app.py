"""The dashboard's ASGI app. Mounted under /dashboard:

    GET  /                  the page, or the sign-in form for whoever is not signed in
    POST /login             a key in the body -> cookie; POST /logout ends it
    GET  /static/{file}     the page's own files
    GET  /data/{name}       JSON and CSV for the page (data.py); POST /data/verify walks the audit chain

Commands are POST from our own pages only: the cookie is SameSite=Strict, and the origin is checked besides.
"""

from __future__ import annotations

import html
import logging
from collections.abc import Awaitable, Callable
from urllib.parse import parse_qsl

import msgspec

from rungway.clock import wall_ns
from rungway.dashboard import session
from rungway.dashboard.data import COMMANDS, JSON, READS, Look, Reading, Source
from rungway.dashboard.http import COOKIE, Reply, Request, load_static, respond, static
from rungway.errors import RequestError
from rungway.gateway.call import Receive, Scope, Send
from rungway.outcomes import Code

App = Callable[[Scope, Receive, Send], Awaitable[None]]

READS_AT_ONCE_MAX = 32
_NOTICE = b"<!--notice-->"
_log = logging.getLogger(__name__)


def create_dashboard(source: Source) -> App:
    """The app over one gateway; serve it with `root_path` set to where it hangs."""
    return Dashboard(source)


class Dashboard:
    """Stateless but for a count of the reads that run, which bounds what pages can ask of the controller."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._files = load_static()
        self._reads = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        try:
            reply = await self._answer(request)
        except RequestError as error:
            reply = _error(error)
        except Exception:  # noqa: BLE001 - the edge of the process: a bug becomes one logged 500, not a broken connection
            _log.exception("the dashboard failed at %s", request.path)
            reply = _error(RequestError(Code.INTERNAL, "an internal error"))
        await respond(send, reply)

    async def _answer(self, request: Request) -> Reply:
        path = request.path
        if path.startswith("/static/"):
            _only(request, "GET")
            return static(self._files, path.removeprefix("/static/"), request)
        if path.startswith("/data/"):
            return await self._data(request, path.removeprefix("/data/"))
        if path == "/":
            _only(request, "GET")
            return self._page(request)
        if path in ("/login", "/logout"):
            _only(request, "POST")
            _own(request)
            return await self._login(request) if path == "/login" else self._logout(request)
        raise RequestError(Code.NOT_FOUND, "there is no such page")

    def _page(self, request: Request) -> Reply:
        try:
            viewer = self._viewer(request)
        except RequestError as error:
            return self._form(error)
        return self._form() if viewer is None else _fresh(self._files["index.html"])

    def _form(self, error: RequestError | None = None) -> Reply:
        """The sign-in form, with what went wrong."""
        page = self._files["login.html"]
        text = "" if error is None else html.escape(error.message[:1].upper() + error.message[1:] + ".")
        reply = _fresh(page, page.body.replace(_NOTICE, text.encode(), 1))
        reply.status = 200 if error is None else error.status
        return reply

    async def _login(self, request: Request) -> Reply:
        fields = dict(parse_qsl((await request.body()).decode("utf-8", "replace"), max_num_fields=4))
        try:
            token, valid_s = self._signed_in(fields.get("key", "").strip())
        except RequestError as error:
            return _error(error) if request.wants_json() else self._form(error)
        return _redirect(request, token, valid_s)

    def _signed_in(self, key: str) -> tuple[str, int]:
        """A session for the key. Raises RequestError as for any other use of the key; its text goes no further."""
        catalogue, secret = self._source.known(), self._source.session_secret
        if not secret:
            raise RequestError(Code.STARTING, "nobody can sign in yet; please try again", retry_after_s=1)
        if not key:
            raise RequestError(Code.INVALID_API_KEY, "paste a key to sign in")
        now_ns = wall_ns()
        caller = catalogue.keys.identify(b"Bearer " + key.encode("utf-8", "replace"), now_ns)
        if not session.may_look(caller.key):
            raise RequestError(Code.SCOPE_MISSING, "this key needs the scope 'usage' or 'admin' to sign in")
        return session.issue(secret, caller, now_ns)

    def _logout(self, request: Request) -> Reply:
        return _redirect(request, "", 0)

    def _viewer(self, request: Request) -> session.Viewer | None:
        """Raises RequestError `starting` while there is no directory."""
        token = request.cookie()
        catalogue = self._source.known()
        return session.read(self._source.session_secret, token, catalogue, wall_ns()) if token else None

    async def _data(self, request: Request, name: str) -> Reply:
        reads = COMMANDS if name in COMMANDS else READS
        _only(request, "POST" if reads is COMMANDS else "GET")
        if reads is COMMANDS:
            _own(request)
        viewer = self._viewer(request)
        if viewer is None:
            raise RequestError(Code.INVALID_API_KEY, "sign in first")
        read = reads.get(name)
        if read is None:
            raise RequestError(Code.NOT_FOUND, "there is no such data")
        return await self._read(read, Look(self._source, self._source.known(), viewer, request.arguments()))

    async def _read(self, read: Reading, look: Look) -> Reply:
        if self._reads >= READS_AT_ONCE_MAX:
            raise RequestError(Code.OVERLOADED, "too many pages are being read", retry_after_s=2)
        self._reads += 1
        try:
            return await read(look)
        finally:
            self._reads -= 1


def _only(request: Request, method: str) -> None:
    if request.method != method:
        raise RequestError(Code.METHOD_NOT_ALLOWED, f"this path takes {method}")


def _own(request: Request) -> None:
    if not request.same_origin():
        raise RequestError(Code.SCOPE_MISSING, "this must come from the dashboard's own page")


def _fresh(page: Reply, body: bytes | None = None) -> Reply:
    """A page whose content depends on who asks: not kept anywhere."""
    return Reply(200, page.kind, page.body if body is None else body)


def _redirect(request: Request, token: str, valid_s: int) -> Reply:
    """Set (or with an empty token remove) the cookie and go to the page."""
    cookie = f"{COOKIE}={token}; Path=/dashboard; HttpOnly; SameSite=Strict; Max-Age={valid_s}"
    reply = Reply(303, b"text/plain")
    if request.wants_json():
        reply = Reply(200, JSON, b'{"ok":true}')
    else:
        reply.headers.append((b"location", b"/dashboard"))
    reply.headers.append((b"set-cookie", (cookie + ("; Secure" if request.secure else "")).encode("ascii")))
    return reply


def _error(error: RequestError) -> Reply:
    reply = Reply(error.status, JSON, msgspec.json.encode(error.body()))
    if error.retry_after_s is not None:
        reply.headers.append((b"retry-after", b"%d" % error.retry_after_s))
    return reply
