"""Every path that is not inference."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rungway.gateway.app import create_app
from rungway.gateway.core import Gateway
from unit.gateway_rig import ADMIN_KEY, CHANNEL, KEY, running

ADMIN = {"authorization": f"Bearer {ADMIN_KEY}"}


async def test_usage_is_always_the_callers_own(tmp_path: Path) -> None:
    async with running(tmp_path) as rig:
        answer = await rig.http.get("/v1/usage?tenant=beta&since=5")
        assert answer.json() == {"ok": True}
        assert rig.controller.queries == [("usage", {"tenant": "acme", "since": "5"}, "acme", False)]
        assert (await rig.http.get("/v1/usage", headers=ADMIN)).status_code == 403


async def test_decisions_name_the_caller(tmp_path: Path) -> None:
    async with running(tmp_path) as rig:
        await rig.http.get("/v1/decisions/req_1")
        await rig.http.get("/v1/decisions/req_1", headers=ADMIN)
        assert rig.controller.queries == [
            ("decision", {"request_id": "req_1"}, "acme", False),
            ("decision", {"request_id": "req_1"}, "platform", True),
        ]


ADMIN_READS = ["usage", "audit", "ladder", "pools", "tenants", "config", "engine-truth", "live", "audit/verify"]


@pytest.mark.parametrize("name", ADMIN_READS)
async def test_admin_reads_need_the_scope_and_pass_arguments_on(tmp_path: Path, name: str) -> None:
    async with running(tmp_path) as rig:
        refused = await rig.http.get(f"/admin/{name}")
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "scope_missing")
        rig.controller.answer = (400, "application/json", b'{"error":{"code":"invalid_request"}}')
        answer = await rig.http.get(f"/admin/{name}?limit=5&tenant=acme", headers=ADMIN)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_request")
        expected = name.replace("-", "_").replace("/", "_")
        assert rig.controller.queries == [(expected, {"limit": "5", "tenant": "acme"}, "platform", True)]


async def test_ladder_overrides_and_reload_are_commands(tmp_path: Path) -> None:
    async with running(tmp_path) as rig:
        command = {"pool": "small", "tenant_class": "batch", "rung": 4, "ttl_s": 60, "why": "drill"}
        assert (await rig.http.post("/admin/ladder", json=command, headers=ADMIN)).status_code == 200
        assert (await rig.http.post("/admin/ladder", json={"clear": True}, headers=ADMIN)).status_code == 200
        assert (await rig.http.delete("/admin/ladder", headers=ADMIN)).status_code == 200
        assert (await rig.http.post("/admin/reload", headers=ADMIN)).status_code == 200
        names = [(name, args) for name, args, _, _ in rig.controller.queries]
        assert names == [
            ("ladder_set", command | {"who": "admin"}),
            ("ladder_clear", {"who": "admin"}),
            ("ladder_clear", {"who": "admin"}),
            ("reload", {"who": "admin"}),
        ]
        for body, param in [({"pool": "small"}, "rung"), ({"rung": 1, "x": 2}, "x"), ({"clear": "no"}, "clear")]:
            answer = await rig.http.post("/admin/ladder", json=body, headers=ADMIN)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
        assert (await rig.http.post("/admin/ladder", json=command)).status_code == 403
        assert (await rig.http.post("/admin/reload")).status_code == 403


async def test_metrics_need_no_key(tmp_path: Path) -> None:
    async with running(tmp_path) as rig:
        rig.controller.answer = (200, "text/plain; version=0.0.4; charset=utf-8", b"rungway_x 1\n")
        answer = await rig.http.get("/metrics", headers={"authorization": ""})
        assert answer.text == "rungway_x 1\n"
        assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")


@pytest.mark.parametrize("name", ["responses", "feedback", "sessions", "tasks"])
async def test_what_is_not_there_yet_says_so(tmp_path: Path, name: str) -> None:
    async with running(tmp_path) as rig:
        answer = await rig.http.post(f"/v1/{name}", json={})
        assert answer.status_code == 404
        assert answer.json()["error"]["message"] == f"'{name}' is not available in this version"


async def test_unknown_paths_and_wrong_methods_are_json_errors(tmp_path: Path) -> None:
    async with running(tmp_path) as rig:
        for method, path, status, code in [
            ("GET", "/", 404, "not_found"),
            ("GET", "/v1/models/", 404, "not_found"),
            ("POST", "/v1/requests/req_1/explode", 404, "not_found"),
            ("GET", "/admin/secrets", 404, "not_found"),
            ("GET", "/v1/chat/completions", 405, "method_not_allowed"),
            ("POST", "/v1/models", 405, "method_not_allowed"),
            ("DELETE", "/metrics", 405, "method_not_allowed"),
        ]:
            answer = await rig.http.request(method, path)
            assert (answer.status_code, answer.json()["error"]["code"]) == (status, code), path
            assert answer.headers["x-request-id"].startswith("req_")
            assert ("allow" in answer.headers) == (status == 405)
        assert answer.headers["allow"] == "GET, HEAD"
        for path in ("/livez", "/readyz", "/metrics", "/v1/models", "/v1/models/small"):
            found, head = await rig.http.get(path), await rig.http.head(path)
            assert (head.status_code, head.headers["content-type"]) == (200, found.headers["content-type"])


@pytest.mark.parametrize(
    "name", ["authorization", "content-type", "idempotency-key", "x-rungway-risk", "x-rungway-class", "x-rungway-cache"]
)
async def test_a_header_that_decides_something_may_come_once(tmp_path: Path, name: str) -> None:
    """A proxy in front may read the first of two keys, and this server the last."""
    values = {"authorization": f"Bearer {KEY}", "content-type": "application/json", "x-rungway-class": "batch"}
    value = values.get(name, "off" if name == "x-rungway-cache" else "high")
    body = json.dumps({"model": "small", "messages": [{"role": "user", "content": "hi"}]})
    async with running(tmp_path) as rig:
        kind = [] if name == "content-type" else [("content-type", "application/json")]
        twice = [(name, value), (name, value), *kind]
        error = await rig.http.post("/v1/chat/completions", content=body, headers=twice)
        assert (error.status_code, error.json()["error"]["param"]) == (400, name)
        assert rig.controller.asks == []
        lists = [("accept", "a"), ("accept", "b"), ("content-type", "application/json")]
        assert (await rig.http.post("/v1/chat/completions", content=body, headers=lists)).status_code == 200


async def test_queries_fail_cleanly_without_a_controller(tmp_path: Path) -> None:
    async with running(tmp_path) as rig:
        await rig.controller.stop()
        answer = await rig.http.get("/v1/usage")
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "starting")
        await rig.controller.restart()


async def test_before_the_first_directory_everything_is_starting(tmp_path: Path) -> None:
    async def nowhere() -> str:
        raise OSError("no controller yet")

    gateway = Gateway(gateway_id="g", resolve_controller=nowhere, channel=CHANNEL, models_dir=tmp_path)
    app = create_app(gateway)
    sent: list[Any] = []

    async def call(method: str, path: str) -> int:
        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": b"{}"}

        async def send(message: Any) -> None:
            sent.append(message)

        sent.clear()
        await app({"type": "http", "method": method, "path": path, "headers": []}, receive, send)
        return int(sent[0]["status"])

    assert await call("GET", "/livez") == 503
    await gateway.start()
    try:
        assert await call("GET", "/livez") == 200
        assert await call("GET", "/readyz") == 503
        assert await call("POST", "/v1/chat/completions") == 503
        assert dict(sent[0]["headers"])[b"retry-after"] == b"1"
    finally:
        await gateway.stop()


async def test_mounts_get_their_prefix_and_what_lies_below(tmp_path: Path) -> None:
    seen: list[tuple[str, str]] = []

    async def page(scope: Any, receive: Any, send: Any) -> None:
        seen.append((scope["root_path"], scope["path"]))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"page"})

    async with running(tmp_path) as rig:
        app = create_app(rig.gateway, {"/dashboard": page})
        rig.http._transport.app = app  # type: ignore[attr-defined]
        for path in ("/dashboard", "/dashboard/x.js"):
            assert (await rig.http.get(path)).text == "page"
        assert (await rig.http.get("/dashboards")).status_code == 404
        assert seen == [("/dashboard", "/dashboard"), ("/dashboard", "/dashboard/x.js")]


async def test_a_bug_becomes_one_logged_500(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(tmp_path) as rig:

        def broken() -> list[str]:
            raise ZeroDivisionError

        monkeypatch.setattr(rig.gateway, "lacking", broken)
        answer = await rig.http.get("/readyz")
        assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal")
        monkeypatch.undo()
        monkeypatch.setattr(rig.controller, "decide", lambda ask, attempt, avoid: rig.controller.refusal(ask, "bogus"))
        assert (await rig.chat()).status_code == 500
        assert rig.gateway.flights == {}


async def test_lifespan_starts_and_stops_the_gateway(tmp_path: Path) -> None:
    async def nowhere() -> str:
        raise OSError("no controller yet")

    gateway = Gateway(gateway_id="g", resolve_controller=nowhere, channel=CHANNEL, models_dir=tmp_path)
    events = [{"type": "lifespan.shutdown"}, {"type": "lifespan.startup"}]
    seen: list[tuple[str, bool]] = []

    async def receive() -> dict[str, Any]:
        return events.pop()

    async def send(message: Any) -> None:
        seen.append((message["type"], gateway.healthy()))

    await create_app(gateway)({"type": "lifespan"}, receive, send)
    assert seen == [("lifespan.startup.complete", True), ("lifespan.shutdown.complete", False)]
