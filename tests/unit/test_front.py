"""Requests reach the gateway's app without Serve in between; Serve keeps its own paths."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from ray.serve._private import http_util

from rungway.gateway.app import App
from rungway.serve.front import answer_directly, front


def app_that_notes(name: str, seen: list[tuple[str, str]]) -> App:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append((name, scope.get("path", scope["type"])))

    return app


@pytest.fixture
def hook() -> Iterator[None]:
    kept = http_util.RequestIdMiddleware
    yield
    http_util.RequestIdMiddleware = kept


@pytest.mark.parametrize(
    ("scope", "by"),
    [
        ({"type": "http", "path": "/v1/chat/completions"}, "ours"),
        ({"type": "http", "path": "/livez"}, "ours"),
        ({"type": "http", "path": "/"}, "ours"),
        ({"type": "http", "path": "/-/healthz"}, "serve"),
        ({"type": "http", "path": "/-/routes"}, "serve"),
        ({"type": "websocket", "path": "/v1/chat/completions"}, "ours"),
    ],
)
async def test_only_serves_own_paths_go_to_serve(scope: dict[str, str], by: str) -> None:
    seen: list[tuple[str, str]] = []
    await front(app_that_notes("ours", seen), app_that_notes("serve", seen))(scope, None, None)  # type: ignore[arg-type]
    assert seen == [(by, scope["path"])]


@pytest.mark.usefixtures("hook")
async def test_what_serve_starts_in_this_process_calls_the_app() -> None:
    seen: list[tuple[str, str]] = []
    answer_directly(app_that_notes("ours", seen))
    served = http_util._apply_middlewares(app_that_notes("serve", seen), [])
    for path in ("/v1/models", "/-/healthz"):
        await served({"type": "http", "path": path, "headers": []}, None, None)
    assert seen == [("ours", "/v1/models"), ("serve", "/-/healthz")]
