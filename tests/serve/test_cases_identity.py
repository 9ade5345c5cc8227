"""A key that is refused must not come out of the platform again anywhere: answers, logs, metrics, ledger."""

from __future__ import annotations

import httpx
import pytest

from support.case_platform import CasePlatform, chat_body

pytestmark = pytest.mark.serve

UNKNOWN = "sk-unknown-SECRET-fedcba98"
PIECE = 12


def refused_calls(cases: CasePlatform, header: str) -> list[httpx.Response]:
    headers = {"Authorization": header}
    with httpx.Client(base_url=cases.process.url, headers=headers, timeout=60.0) as client:
        return [
            client.post("/v1/chat/completions", json=chat_body("hi")),
            client.post("/v1/chat/completions", json=chat_body("hi", stream=True)),
            client.get("/v1/models"),
        ]


def pieces(key: str) -> list[bytes]:
    """Every substring that would give the key away; its tail is what matters, `rw_tenant_` is public."""
    secret = key.removeprefix("rw_expired_").encode()
    return [secret[start : start + PIECE] for start in range(len(secret) - PIECE + 1)]


def test_expired_unknown_and_malformed_keys_get_401_and_leave_no_trace(cases: CasePlatform) -> None:
    expired = cases.keys["expired"]
    expected = {
        f"Bearer {expired}": "key_expired",
        f"Bearer {UNKNOWN}": "invalid_api_key",
        UNKNOWN: "invalid_api_key",
        "": "invalid_api_key",
    }
    places: list[bytes] = []
    for header, code in expected.items():
        for answer in refused_calls(cases, header):
            assert answer.status_code == 401
            assert answer.headers["content-type"].startswith("application/json")
            assert answer.json()["error"]["code"] == code
            assert answer.json()["error"]["type"] in ("authentication_error", "invalid_request_error")
            places += [answer.content, str(answer.headers).encode()]
    places.append(httpx.get(f"{cases.process.url}/metrics").content)
    places.append(cases.process.text().encode())
    places += [path.read_bytes() for path in cases.folder.rglob("*") if path.is_file()]
    for key in (expired, UNKNOWN):
        assert not [piece for piece in pieces(key) for place in places if piece in place]


def test_a_header_that_names_a_tenant_changes_nothing(cases: CasePlatform) -> None:
    answer = cases.chat(
        "plain", headers={"x-tenant-id": "vip", "x-rungway-tenant": "vip", "OpenAI-Organization": "vip"}
    )
    assert answer.status_code == 200
    assert cases.row(answer.headers["x-request-id"])["tenant"] == "plain"
