"""What the pages read. Every call asks the controller in the name of the session's key: a tenant's session is confined to
its own tenant there and here, whatever the page or the address bar says."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any, NamedTuple, Protocol

import msgspec

from rungway.clock import NS_PER_S, wall_ns
from rungway.dashboard.http import Reply
from rungway.dashboard.session import Viewer
from rungway.dashboard.table import usage_csv
from rungway.errors import RequestError
from rungway.gateway.catalogue import Catalogue
from rungway.messages import Answer
from rungway.outcomes import Code

JSON = b"application/json"
NAME_CHARS_MAX = 100
LOG_ROWS_MAX = 500
KINDS = ("downgrade", "refusal", "eviction", "rung", "override", "reload", "rollout")


class Range(NamedTuple):
    """How far back, and how wide a bar is, in seconds."""

    span_s: int
    bucket_s: int


RANGES = {
    "1h": Range(3600, 300),
    "24h": Range(86_400, 3600),
    "7d": Range(7 * 86_400, 6 * 3600),
    "30d": Range(30 * 86_400, 86_400),
}


class Source(Protocol):
    """The part of the gateway that the dashboard uses."""

    session_secret: bytes

    def known(self) -> Catalogue: ...

    async def query(self, name: str, args: dict[str, object], tenant: str, admin: bool) -> Answer: ...


class Look(NamedTuple):
    """One read: by whom, with what arguments, from where."""

    source: Source
    catalogue: Catalogue
    viewer: Viewer
    args: dict[str, str]

    @property
    def tenant(self) -> str | None:
        """The tenant that the read is about: an admin's choice (None = all), anybody else's own."""
        if not self.viewer.admin:
            return self.viewer.tenant.name
        return self.text("tenant") or None

    def text(self, name: str) -> str:
        value = self.args.get(name, "")
        if len(value) > NAME_CHARS_MAX:
            raise RequestError(Code.INVALID_REQUEST, f"{name} is too long", param=name)
        return value

    def choice(self, name: str, allowed: tuple[str, ...], default: str) -> str:
        value = self.args.get(name, default)
        if value not in allowed:
            raise RequestError(Code.INVALID_REQUEST, f"{name} is one of {', '.join(allowed)}", param=name)
        return value

    async def ask(self, name: str, **args: object) -> Answer:
        """The controller's answer, in the viewer's name."""
        kept = {key: value for key, value in args.items() if value is not None}
        return await self.source.query(name, kept, self.viewer.tenant.name, self.viewer.admin)


Reading = Callable[[Look], Awaitable[Reply]]


async def session(look: Look) -> Reply:
    """Who is signed in, and what the page needs to know once."""
    viewer, platform = look.viewer, look.catalogue.platform
    names = sorted(t.name for t in platform.tenants if t.models) if viewer.admin else [viewer.tenant.name]
    shape = {
        "cell": platform.cell,
        "tenant": viewer.tenant.name,
        "key": viewer.key.id,
        "admin": viewer.admin,
        "expires": datetime.fromtimestamp(viewer.expires_s, UTC).isoformat(),
        "tenants": names,
        "tiers": [tier.name for tier in platform.tiers],
        "kinds": KINDS,
    }
    return Reply(200, JSON, msgspec.json.encode(shape))


async def usage(look: Look) -> Reply:
    """Use and cost over a range, and the tenants' contracts beside it."""
    since, until, bucket = _range(look)
    used = await look.ask("usage", since=since, until=until, bucket=bucket, tenant=look.tenant)
    if used.status != 200:
        return _passed(used)
    tenants = await look.ask("tenants")
    if tenants.status != 200:
        return _passed(tenants)
    shape = {
        "range": {"since": since, "until": until, "bucket_s": bucket},
        "usage": msgspec.Raw(used.body),
        "tenants": msgspec.Raw(tenants.body),
    }
    return Reply(200, JSON, msgspec.json.encode(shape))


async def usage_table(look: Look) -> Reply:
    """The cost table as a CSV file."""
    since, until, _ = _range(look)
    used = await look.ask("usage", since=since, until=until, bucket=31 * 86_400, tenant=look.tenant)
    tenants = await look.ask("tenants")
    if used.status != 200 or tenants.status != 200:
        return _passed(used if used.status != 200 else tenants)
    known: dict[str, Any] = msgspec.json.decode(tenants.body)
    shown = {name: terms for name, terms in known.items() if look.tenant in (None, name) and terms.get("models")}
    body = usage_csv(msgspec.json.decode(used.body), shown, _iso(since), _iso(until))
    reply = Reply(200, b"text/csv; charset=utf-8", body)
    name = f"rungway-usage-{_iso(since)[:10]}-{_iso(until)[:10]}.csv"
    reply.headers.append((b"content-disposition", f'attachment; filename="{name}"'.encode("ascii")))
    return reply


async def live(look: Look) -> Reply:
    return _passed(await look.ask("live"))


async def ladder(look: Look) -> Reply:
    return _passed(await look.ask("ladder"))


async def log(look: Look) -> Reply:
    """The newest audit rows, newest first."""
    kind = look.choice("kind", ("", *KINDS), "")
    limit = look.args.get("limit", "100")
    if not limit.isdigit() or not 1 <= int(limit) <= LOG_ROWS_MAX:
        raise RequestError(Code.INVALID_REQUEST, f"limit is between 1 and {LOG_ROWS_MAX}", param="limit")
    return _passed(
        await look.ask("audit", limit=int(limit), kind=kind or None, tenant=look.tenant, order="newest"),
    )


async def decision(look: Look) -> Reply:
    request_id = look.text("request_id")
    if not request_id:
        raise RequestError(Code.INVALID_REQUEST, "request_id is missing", param="request_id")
    return _passed(await look.ask("decision", request_id=request_id))


async def verify(look: Look) -> Reply:
    """Walk the audit chain; for admins."""
    return _passed(await look.ask("audit_verify"))


READS: dict[str, Reading] = {
    "session": session,
    "usage": usage,
    "usage.csv": usage_table,
    "live": live,
    "ladder": ladder,
    "log": log,
    "decision": decision,
}
COMMANDS: dict[str, Reading] = {"verify": verify}


def _range(look: Look) -> tuple[int, int, int]:
    """(since, until, bucket) in seconds since the epoch."""
    span = RANGES[look.choice("range", tuple(RANGES), "24h")]
    until = wall_ns() // NS_PER_S + 1
    return until - span.span_s, until, span.bucket_s


def _iso(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _passed(answer: Answer) -> Reply:
    return Reply(answer.status, answer.content_type.encode("latin-1"), answer.body)
