"""A client that goes away: the engine stops, the place is free, the books say what was really made."""

from __future__ import annotations

import json
import socket
import threading
import time

import pytest

from support.case_platform import CasePlatform, chat_body, eventually

pytestmark = pytest.mark.serve

LONG = "[[tpot_ms=50]] [[tokens=500]] a long one"  # 25 s
GONE_WITHIN_S = 15.0
EMITTED_MAX = 400


def raw_request(
    cases: CasePlatform, tenant: str, text: str, *, model: str = "small", stream: bool = False
) -> socket.socket:
    """A request on a bare socket, so that the test decides when it closes."""
    body = json.dumps(chat_body(text, model=model, max_tokens=500, stream=stream)).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {cases.keys[tenant]}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    connection = socket.create_connection(("127.0.0.1", cases.process.port), timeout=30.0)
    connection.sendall(head.encode() + body)
    return connection


def requests_of(cases: CasePlatform, tenant: str) -> int:
    requests: int = cases.usage(tenant)["requests"]
    return requests


def assert_stopped(cases: CasePlatform, tenant: str) -> None:
    """Nothing runs any more, one row says cancelled, and what it bills is what the engine made."""
    eventually(lambda: cases.tenant(tenant)["running"] == 0, "the place is free", GONE_WITHIN_S)
    assert cases.chat(tenant).status_code == 200, "its one place can be used at once"
    eventually(lambda: requests_of(cases, tenant) == 2, "two rows: the cancelled one and the next")
    by_outcome = cases.admin("/usage", tenant=tenant)["by_outcome"]
    assert by_outcome == {"client_cancelled": 1, "length": 1}
    emitted = [a for a in cases.admin("/engine-truth", limit=1000)["attempts"] if a["tenant"] == tenant]
    cut = [attempt for attempt in emitted if attempt["finish"] == "cancelled"]
    assert len(cut) == 1 and cut[0]["output_tokens"] < EMITTED_MAX
    assert cases.usage(tenant)["output_tokens"] == cut[0]["output_tokens"] + 8
    cases.settled()


def test_a_client_that_closes_an_unstreamed_call_stops_it(cases: CasePlatform) -> None:
    connection = raw_request(cases, "leaver1", LONG)
    eventually(lambda: cases.tenant("leaver1")["running"] == 1, "it runs")
    time.sleep(0.5)
    connection.close()
    assert_stopped(cases, "leaver1")


def test_a_client_that_closes_a_stream_stops_it(cases: CasePlatform) -> None:
    connection = raw_request(cases, "leaver2", LONG, stream=True)
    got = b""
    while got.count(b"data: ") < 3:
        got += connection.recv(4096)
    connection.close()
    assert_stopped(cases, "leaver2")


def test_a_client_that_leaves_the_queue_never_reaches_the_engine(cases: CasePlatform) -> None:
    fillers = [raw_request(cases, "filler", LONG, model="large") for _ in range(4)]
    try:
        eventually(lambda: cases.tenant("filler")["running"] == 4, "the large tier is full")
        connection = raw_request(cases, "leaver3", LONG, model="large")
        eventually(lambda: cases.tenant("leaver3")["waiting"] == 1, "it waits")
        connection.close()
        eventually(lambda: cases.tenant("leaver3")["waiting"] == 0, "it left the queue", GONE_WITHIN_S)
        eventually(lambda: requests_of(cases, "leaver3") == 1, "its row")
        assert cases.admin("/usage", tenant="leaver3")["by_outcome"] == {"client_cancelled": 1}
        assert cases.usage("leaver3")["output_tokens"] == 0 and cases.usage("leaver3")["cost_usd"] == 0
        assert not [a for a in cases.admin("/engine-truth", limit=1000)["attempts"] if a["tenant"] == "leaver3"]
    finally:
        for filler in fillers:
            filler.close()
    cases.settled()


def test_many_at_once_leave_nothing_behind(cases: CasePlatform) -> None:
    connections = [raw_request(cases, "storm", LONG, stream=number % 2 == 0) for number in range(30)]
    eventually(lambda: cases.tenant("storm")["running"] + cases.tenant("storm")["waiting"] == 30, "all are in", 20.0)
    closers = [threading.Thread(target=connection.close) for connection in connections]
    for closer in closers:
        closer.start()
    for closer in closers:
        closer.join(60.0)
    eventually(lambda: cases.tenant("storm")["running"] + cases.tenant("storm")["waiting"] == 0, "all gone")
    cases.settled()
    assert requests_of(cases, "storm") == 30
