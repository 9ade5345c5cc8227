"""The dashboard's server side: sessions, what a session may see, safety headers, and files that people open."""

from __future__ import annotations

import asyncio
import base64
import csv
import io
import re
import stat
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from rungway.clock import NS_PER_S, wall_ns
from rungway.contracts import Platform
from rungway.control.session_secret import FILE, load_secret
from rungway.dashboard import session
from rungway.dashboard.app import READS_AT_ONCE_MAX, create_dashboard
from rungway.dashboard.http import COOKIE, STATIC
from rungway.dashboard.table import COLUMNS, cell, money, usage_csv
from rungway.errors import RequestError
from rungway.gateway.catalogue import Catalogue
from rungway.gateway.identify import Caller
from rungway.messages import Answer
from rungway.outcomes import Code
from unit.gateway_rig import ADMIN_KEY, BETA_KEY, EXPIRED_KEY, KEY, REVOKED_KEY, api_key, platform, tenant

SECRET = b"s" * 32
NOW = 1_800_000_000 * NS_PER_S
TOTALS = {"requests": 2, "input_tokens": 10, "cached_tokens": 4, "output_tokens": 6, "wasted_tokens": 0}
ORIGIN = {"origin": "http://gateway", "sec-fetch-site": "same-origin"}


class Stub:
    """The part of a gateway that the dashboard uses; remembers what was asked in whose name."""

    def __init__(self, configuration: Platform) -> None:
        self.session_secret = SECRET
        self.catalogue: Catalogue | None = Catalogue(1, configuration)
        self.asked: list[tuple[str, dict[str, Any], str, bool]] = []
        self.hold: asyncio.Event | None = None

    def known(self) -> Catalogue:
        if self.catalogue is None:
            raise RequestError(Code.STARTING, "the platform is starting", retry_after_s=1)
        return self.catalogue

    async def query(self, name: str, args: dict[str, object], tenant: str, admin: bool) -> Answer:
        self.asked.append((name, dict(args), tenant, admin))
        if self.hold is not None:
            await self.hold.wait()
        usage = {"tenants": {"=cmd()": TOTALS | {"cost_nusd": 1_500_000_001}}, "refused": {"=cmd()": 1}, "degraded": {}}
        body = msgspec.json.encode(usage if name == "usage" else {})
        return Answer(1, 200, "application/json", body)


@pytest.fixture
def stub() -> Stub:
    return Stub(platform())


@pytest.fixture
def page(stub: Stub) -> httpx.AsyncClient:
    return client(stub)


def client(stub: Stub, base: str = "http://gateway") -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app=_mounted(create_dashboard(stub)))
    return httpx.AsyncClient(transport=transport, base_url=base)


def _mounted(app: Any) -> Any:
    async def mounted(scope: Any, receive: Any, send: Any) -> None:
        await app({**scope, "root_path": "/dashboard"}, receive, send)

    return mounted


async def sign_in(page: httpx.AsyncClient, key: str) -> httpx.Response:
    return await page.post("/dashboard/login", data={"key": key}, headers=ORIGIN)


# --- sessions


def caller(stub: Stub, name: str = "acme") -> Caller:
    found = stub.known().tenants[name]
    return Caller(found, found.keys[0])


def read(stub: Stub, token: str, after_s: float = 0.0) -> session.Viewer | None:
    return session.read(SECRET, token, stub.known(), NOW + int(after_s * NS_PER_S))


def test_a_session_is_read_back_until_it_ends(stub: Stub) -> None:
    token, valid_s = session.issue(SECRET, caller(stub), NOW)
    viewer = read(stub, token)
    assert viewer is not None
    assert (viewer.tenant.name, viewer.key.id, viewer.admin) == ("acme", "acme-1", False)
    assert valid_s == session.LIFETIME_S == 12 * 3600
    assert read(stub, token, valid_s - 1) is not None
    assert read(stub, token, valid_s) is None
    assert read(stub, token, -120) is None, "a session from the future"


def test_no_byte_of_a_session_may_change(stub: Stub) -> None:
    token, _ = session.issue(SECRET, caller(stub), NOW)
    for position, old in enumerate(token):
        changed = token[:position] + ("A" if old != "A" else "B") + token[position + 1 :]
        assert read(stub, changed) is None, position
    assert session.read(b"x" * 32, token, stub.known(), NOW) is None
    assert session.read(b"", token, stub.known(), NOW) is None


def test_a_session_has_one_spelling(stub: Stub) -> None:
    alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
    token, _ = session.issue(SECRET, caller(stub), NOW)
    twin = token[:-1] + alphabet[alphabet.index(token[-1]) ^ 1]  # differs only in bits that 32 bytes leave unused
    assert base64.urlsafe_b64decode(twin.partition(".")[2] + "=") == base64.urlsafe_b64decode(
        token.partition(".")[2] + "="
    )
    assert read(stub, twin) is None
    assert read(stub, token + "=") is None


@pytest.mark.parametrize("claims", [["platform", "admin", 1_800_000_000, 1_800_000_100], [], {}, "x", 7])
def test_claims_need_a_signature(stub: Stub, claims: object) -> None:
    token, _ = session.issue(SECRET, caller(stub), NOW)
    body = base64.urlsafe_b64encode(msgspec.json.encode(claims)).rstrip(b"=").decode()
    for forged in (f"{body}.{token.partition('.')[2]}", body, f"{body}.", f".{body}", "é.é", "." * 5000):
        assert read(stub, forged) is None


@pytest.mark.parametrize(
    "changes",
    [
        {"revoked": True},
        {"expires_ns": NOW},
        {"scopes": ("inference",)},
        {"sha256": "0" * 64},
        {"id": "acme-9"},
    ],
)
def test_a_session_dies_with_its_key(stub: Stub, changes: dict[str, Any]) -> None:
    token, _ = session.issue(SECRET, caller(stub), NOW)
    key = msgspec.structs.replace(caller(stub).key, **changes)
    stub.catalogue = Catalogue(2, platform(tenants=(tenant("acme", key),)))
    assert read(stub, token) is None
    stub.catalogue = Catalogue(3, platform(tenants=()))
    assert read(stub, token) is None


def test_a_session_does_not_outlive_its_key(stub: Stub) -> None:
    key = api_key("k", KEY, expires_ns=NOW + 60 * NS_PER_S)
    stub.catalogue = Catalogue(1, platform(tenants=(tenant("acme", key),)))
    token, valid_s = session.issue(SECRET, caller(stub), NOW)
    assert valid_s == 60
    assert read(stub, token, 59) is not None
    assert read(stub, token, 60) is None


def test_an_admin_is_one_by_the_key_of_now(stub: Stub) -> None:
    token, _ = session.issue(SECRET, caller(stub, "platform"), NOW)
    viewer = read(stub, token)
    assert viewer is not None and viewer.admin
    key = api_key("admin", ADMIN_KEY, scopes=("usage",))
    stub.catalogue = Catalogue(2, platform(tenants=(tenant("platform", key, models=()),)))
    viewer = read(stub, token)
    assert viewer is not None and not viewer.admin


def test_the_secret_survives_a_restart_and_is_private(tmp_path: Path) -> None:
    first = load_secret(tmp_path)
    path = tmp_path / FILE
    assert len(first) == 32
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.chmod(0o644)
    assert load_secret(tmp_path) == first
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.write_bytes(first[:7])
    assert load_secret(tmp_path) not in (first, first[:7])
    assert [one.name for one in tmp_path.iterdir()] == [FILE]


# --- signing in and out


async def test_signing_in_sets_a_strict_cookie(page: httpx.AsyncClient) -> None:
    answer = await sign_in(page, KEY)
    assert answer.status_code == 303
    assert answer.headers["location"] == "/dashboard"
    parts = {part.strip() for part in answer.headers["set-cookie"].split(";")[1:]}
    assert parts == {"Path=/dashboard", "HttpOnly", "SameSite=Strict", "Max-Age=43200"}
    assert KEY not in str(answer.headers) + answer.text
    assert "<title>Rungway</title>" in (await page.get("/dashboard")).text


async def test_the_cookie_is_secure_on_https(stub: Stub) -> None:
    behind = client(stub)
    for page, headers in ((client(stub, "https://gateway"), {}), (behind, {"x-forwarded-proto": "https"})):
        answer = await page.post(
            "/dashboard/login", data={"key": KEY}, headers={"sec-fetch-site": "same-origin", **headers}
        )
        assert "; Secure" in answer.headers["set-cookie"]


@pytest.mark.parametrize(
    ("key", "status", "code"),
    [
        ("rw_acme_nobody", 401, "invalid_api_key"),
        ("", 401, "invalid_api_key"),
        ("k" * 300, 401, "invalid_api_key"),
        (EXPIRED_KEY, 401, "key_expired"),
        (REVOKED_KEY, 401, "key_revoked"),
    ],
)
async def test_a_wrong_key_says_why_and_shows_nothing(
    page: httpx.AsyncClient, key: str, status: int, code: str, caplog: pytest.LogCaptureFixture
) -> None:
    plain = await sign_in(page, key)
    told = await page.post("/dashboard/login", data={"key": key}, headers={**ORIGIN, "accept": "application/json"})
    assert (plain.status_code, told.status_code, told.json()["error"]["code"]) == (status, status, code)
    assert 'role="alert"></p>' not in plain.text
    assert "set-cookie" not in plain.headers and "set-cookie" not in told.headers
    assert not key or key not in plain.text + told.text + caplog.text


async def test_a_key_without_a_reading_scope_is_refused(stub: Stub) -> None:
    key = api_key("acme-1", KEY, scopes=("inference",))
    stub.catalogue = Catalogue(1, platform(tenants=(tenant("acme", key),)))
    assert (await sign_in(client(stub), KEY)).status_code == 403


async def test_signing_out_removes_the_cookie(page: httpx.AsyncClient) -> None:
    await sign_in(page, KEY)
    answer = await page.post("/dashboard/logout", headers=ORIGIN)
    assert "Max-Age=0" in answer.headers["set-cookie"]
    assert COOKIE not in page.cookies
    assert (await page.get("/dashboard/data/live")).status_code == 401


@pytest.mark.parametrize("path", ["login", "logout", "data/verify"])
@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"origin": "null"},
        {"origin": "http://evil"},
        {"origin": "http://gateway", "sec-fetch-site": "cross-site"},
        {"origin": "http://gateway", "sec-fetch-site": "none"},
        {"origin": "http://gateway.evil"},
    ],
)
async def test_commands_come_from_our_own_pages_only(
    page: httpx.AsyncClient, stub: Stub, path: str, headers: dict[str, str]
) -> None:
    await sign_in(page, ADMIN_KEY)
    answer = await page.post(f"/dashboard/{path}", data={"key": KEY}, headers=headers)
    assert answer.status_code == 403
    assert "set-cookie" not in answer.headers
    assert stub.asked == []


@pytest.mark.parametrize("headers", [{"origin": "http://gateway"}, {"origin": "null", "sec-fetch-site": "same-origin"}])
async def test_a_browser_without_one_of_the_headers_may_sign_in(
    page: httpx.AsyncClient, headers: dict[str, str]
) -> None:
    answer = await page.post("/dashboard/login", data={"key": KEY}, headers=headers)
    assert answer.status_code == 303


async def test_nobody_signs_in_without_a_secret_or_a_directory(stub: Stub) -> None:
    page = client(stub)
    stub.session_secret = b""
    assert (await sign_in(page, KEY)).status_code == 503
    stub.session_secret, stub.catalogue = SECRET, None
    assert (await sign_in(page, KEY)).status_code == 503
    assert (await page.get("/dashboard")).status_code == 503


async def test_a_large_body_is_refused(page: httpx.AsyncClient) -> None:
    assert (await sign_in(page, "k" * 5000)).status_code == 413


# --- what a session may see


READS = ("usage", "usage.csv", "live", "ladder", "log", "decision?request_id=req_1")


async def test_nothing_is_read_without_a_session(page: httpx.AsyncClient, stub: Stub) -> None:
    for name in READS:
        assert (await page.get(f"/dashboard/data/{name}")).status_code == 401
    assert (await page.post("/dashboard/data/verify", headers=ORIGIN)).status_code == 401
    assert "Sign in" in (await page.get("/dashboard")).text
    assert stub.asked == []


@pytest.mark.parametrize("name", READS)
async def test_a_tenant_is_confined_to_itself(page: httpx.AsyncClient, stub: Stub, name: str) -> None:
    await sign_in(page, BETA_KEY)
    joint = "&" if "?" in name else "?"
    answer = await page.get(f"/dashboard/data/{name}{joint}tenant=acme&admin=true")
    assert answer.status_code == 200
    assert stub.asked
    for _, args, asked_by, admin in stub.asked:
        assert (asked_by, admin) == ("beta", False)
        assert args.get("tenant", "beta") == "beta"


async def test_a_tenant_sees_only_its_own_name(page: httpx.AsyncClient) -> None:
    await sign_in(page, BETA_KEY)
    shape = (await page.get("/dashboard/data/session")).json()
    assert (shape["tenants"], shape["admin"], shape["key"]) == (["beta"], False, "beta-1")


async def test_an_admin_sees_all_or_the_one_it_picks(page: httpx.AsyncClient, stub: Stub) -> None:
    await sign_in(page, ADMIN_KEY)
    assert (await page.get("/dashboard/data/session")).json()["tenants"] == ["acme", "beta"]
    await page.get("/dashboard/data/log")
    await page.get("/dashboard/data/log?tenant=beta&kind=downgrade&limit=7")
    await page.post("/dashboard/data/verify", headers=ORIGIN)
    assert stub.asked == [
        ("audit", {"limit": 100, "order": "newest"}, "platform", True),
        ("audit", {"limit": 7, "kind": "downgrade", "tenant": "beta", "order": "newest"}, "platform", True),
        ("audit_verify", {}, "platform", True),
    ]


async def test_a_revoked_key_ends_the_session_at_its_next_request(page: httpx.AsyncClient, stub: Stub) -> None:
    await sign_in(page, KEY)
    assert (await page.get("/dashboard/data/live")).status_code == 200
    stub.catalogue = Catalogue(2, platform(tenants=(tenant("acme", api_key("acme-1", KEY, revoked=True)),)))
    assert (await page.get("/dashboard/data/live")).status_code == 401


async def test_ranges_end_now(page: httpx.AsyncClient, stub: Stub) -> None:
    await sign_in(page, ADMIN_KEY)
    for name, span_s, bars in (("1h", 3600, 12), ("24h", 86_400, 24), ("7d", 604_800, 28), ("30d", 2_592_000, 30)):
        shape = (await page.get(f"/dashboard/data/usage?range={name}")).json()["range"]
        assert shape["until"] - shape["since"] == span_s
        assert span_s / shape["bucket_s"] == bars
        assert abs(shape["until"] - wall_ns() / NS_PER_S) < 60


@pytest.mark.parametrize(
    "query",
    [
        "usage?range=2h",
        "log?kind=secret",
        "log?limit=0",
        "log?limit=501",
        "log?limit=-1",
        "log?limit=1e3",
        "decision",
        "decision?request_id=" + "x" * 101,
        "log?tenant=" + "x" * 101,
        "log?" + "x" * 2049,
    ],
)
async def test_arguments_are_bounded(page: httpx.AsyncClient, stub: Stub, query: str) -> None:
    await sign_in(page, ADMIN_KEY)
    assert (await page.get(f"/dashboard/data/{query}")).status_code == 400
    assert stub.asked == []


async def test_reads_at_once_are_bounded(page: httpx.AsyncClient, stub: Stub) -> None:
    await sign_in(page, ADMIN_KEY)
    stub.hold = asyncio.Event()
    reads = [asyncio.create_task(page.get("/dashboard/data/live")) for _ in range(READS_AT_ONCE_MAX)]
    while len(stub.asked) < READS_AT_ONCE_MAX:
        await asyncio.sleep(0)
    refused = await page.get("/dashboard/data/live")
    stub.hold.set()
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "2")
    assert {answer.status_code for answer in await asyncio.gather(*reads)} == {200}
    assert (await page.get("/dashboard/data/live")).status_code == 200


# --- headers and files


async def test_every_answer_carries_the_safety_headers(page: httpx.AsyncClient) -> None:
    await sign_in(page, KEY)
    for path in ("", "/static/app.js", "/static/none.js", "/data/live", "/data/none", "/nowhere"):
        answer = await page.get(f"/dashboard{path}")
        policy = dict(part.strip().split(" ", 1) for part in answer.headers["content-security-policy"].split(";"))
        assert policy["default-src"] == "'self'"
        assert policy["frame-ancestors"] == "'none'"
        assert "unsafe" not in answer.headers["content-security-policy"]
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"
        expected = "no-cache" if path == "/static/app.js" else "no-store"
        assert answer.headers["cache-control"] == expected, path


async def test_static_files_are_validated_by_etag_and_do_not_climb(page: httpx.AsyncClient) -> None:
    first = await page.get("/dashboard/static/app.css")
    again = await page.get("/dashboard/static/app.css", headers={"if-none-match": first.headers["etag"]})
    assert (first.status_code, again.status_code, again.content) == (200, 304, b"")
    for name in ("../app.py", "..%2fapp.py", "%2e%2e/session.py", "app.py", ""):
        assert (await page.get(f"/dashboard/static/{name}")).status_code == 404


async def test_methods_are_fixed(page: httpx.AsyncClient) -> None:
    for method, path in (
        ("GET", "login"),
        ("GET", "logout"),
        ("POST", ""),
        ("POST", "data/live"),
        ("GET", "data/verify"),
    ):
        assert (await page.request(method, f"/dashboard/{path}", headers=ORIGIN)).status_code == 405


async def test_a_bug_is_an_answer(page: httpx.AsyncClient, stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    await sign_in(page, KEY)
    monkeypatch.setattr(stub, "query", None)
    answer = await page.get("/dashboard/data/live")
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal")


def _sources(suffix: str) -> dict[str, str]:
    return {path.name: path.read_text() for path in sorted(STATIC.iterdir()) if path.suffix == suffix}


def test_pages_hold_no_inline_script_or_style_and_load_only_our_own() -> None:
    for name, text in _sources(".html").items():
        assert not re.search(r"<script(?![^>]*\bsrc=)", text), name
        assert not re.search(r"\sstyle=|\son\w+=|<style", text), name
        assert all(url.startswith(("/dashboard", "#")) for url in re.findall(r'(?:src|href|action)="([^"]+)"', text))


def test_scripts_never_parse_markup_and_store_nothing() -> None:
    """Names in data may hold markup; the pages can only ever make text of it."""
    forbidden = re.compile(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|createContextualFragment|\beval\(|new Function|"
        r"localStorage|sessionStorage|indexedDB|document\.cookie|https?://(?!www\.w3\.org)"
    )
    scripts = _sources(".js")
    assert len(scripts) > 8
    for name, text in scripts.items():
        assert not forbidden.search(text), name


# --- CSV


@pytest.mark.parametrize("text", ["=1+1", "+1", "-1", "@x", "\t=1", "\r=1", "\n=1", "  =1"])
def test_text_that_starts_like_a_formula_is_defused(text: str) -> None:
    assert cell(text) == "'" + text


@pytest.mark.parametrize(("value", "shown"), [("acme", "acme"), (-3, "-3"), (1.5, "1.5"), (None, ""), ("a=b", "a=b")])
def test_other_cells_stay_as_they_are(value: object, shown: str) -> None:
    assert cell(value) == shown


def test_money_keeps_every_digit() -> None:
    assert [money(nusd) for nusd in (0, 1, 1_500_000_001, 12_000_000_000)] == [
        "0.000000000",
        "0.000000001",
        "1.500000001",
        "12.000000000",
    ]


def test_the_table_lists_idle_tenants_and_unlimited_budgets() -> None:
    usage = {"tenants": {"a,b": TOTALS | {"cost_nusd": 5}}, "refused": {"a,b": 1}, "degraded": {"a,b": 2}}
    budget = {"per": "day", "spent_usd": 0.5, "held_usd": 0.0, "limit_usd": None}
    text = usage_csv(usage, {"idle": {"budget": budget}}, "2026-01-01T00:00:00Z", "2026-01-02T00:00:00Z")
    rows = list(csv.DictReader(io.StringIO(text.decode())))
    assert tuple(rows[0]) == COLUMNS
    assert [(row["tenant"], row["requests"], row["cost_usd"]) for row in rows] == [
        ("a,b", "2", "0.000000005"),
        ("idle", "0", "0.000000000"),
    ]
    assert (rows[1]["budget_limit_usd"], rows[1]["budget_used_usd"], rows[0]["downgraded"]) == ("unlimited", "0.5", "2")


async def test_the_csv_is_a_download_and_defused(page: httpx.AsyncClient) -> None:
    await sign_in(page, ADMIN_KEY)
    answer = await page.get("/dashboard/data/usage.csv?range=7d")
    assert answer.headers["content-type"].startswith("text/csv")
    assert answer.headers["content-disposition"].startswith('attachment; filename="rungway-usage-')
    rows = list(csv.reader(io.StringIO(answer.text)))
    assert rows[1][0] == "'=cmd()"
    assert rows[1][8] == "1.500000001"
