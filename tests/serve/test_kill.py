"""kill -9 of each kind of process while answers stream: the platform recovers by itself, and every bill is right."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from rungway.chaos import faults
from rungway.chaos.faults import Role
from rungway.chaos.invariants import held
from support.case_platform import DONE, CasePlatform, eventually, text_of

pytestmark = pytest.mark.serve

STREAMS = 6
TOKENS = 80
TEXT = f"[[tpot_ms=40]] [[tokens={TOKENS}]] tell me"
RECOVER_S = 60.0


class Client:
    """One client that reads a stream to whatever end it has."""

    def __init__(self, pair: CasePlatform, tenant: str) -> None:
        self.pair = pair
        self.tenant = tenant
        self.frames: list[dict[str, Any]] = []
        self.request_id = ""
        self.broken = False
        self.reading = threading.Event()
        self.thread = threading.Thread(target=self._read)

    def _read(self) -> None:
        try:
            with self.pair.streaming(self.tenant, TEXT, max_tokens=2 * TOKENS) as (answer, found):
                self.request_id = answer.headers.get("x-request-id", "")
                for frame in found:
                    self.frames.append(frame)
                    if len(self.frames) == 5:
                        self.reading.set()
        except httpx.HTTPError:
            self.broken = True

    @property
    def whole(self) -> bool:
        return bool(self.frames) and self.frames[-1] == DONE


@contextmanager
def streams(pair: CasePlatform) -> Iterator[list[Client]]:
    """Some clients in mid-stream; at the end all have read to their end."""
    clients = [Client(pair, "acme" if number % 2 else "beta") for number in range(STREAMS)]
    for client in clients:
        client.thread.start()
    try:
        for client in clients:
            assert client.reading.wait(60.0), "the stream began"
        yield clients
    finally:
        for client in clients:
            client.thread.join(60.0)
            assert not client.thread.is_alive()


def serves(pair: CasePlatform) -> bool:
    try:
        return all(pair.chat("acme", max_tokens=2).status_code == 200 for _ in range(4))
    except httpx.HTTPError:
        return False


def assert_books_are_right(pair: CasePlatform, clients: list[Client]) -> None:
    """One row for each request; bills == engines; the chain is whole; nothing is held."""
    pair.settled(60.0)
    for client in clients:
        row = pair.row(client.request_id)
        emitted = sum(attempt["output_tokens"] for attempt in pair.truth(client.request_id))
        assert row["output_tokens"] + row["wasted_tokens"] == emitted
        if client.whole:
            assert row["output_tokens"] == TOKENS
    assert pair.admin("/audit/verify")["ok"]
    eventually(lambda: not held(pair.admin("/live")), "nothing is held", 30.0)


@pytest.fixture
def expected(pair: CasePlatform) -> str:
    """The answer without any fault."""
    return text_of(pair.stream("acme", TEXT, max_tokens=2 * TOKENS))


def test_streams_survive_the_death_of_a_replica(pair: CasePlatform, expected: str) -> None:
    requests = sum(pair.usage(tenant)["requests"] for tenant in ("acme", "beta"))
    with streams(pair) as clients:
        killed = faults.kill(pair.process.mark, Role.REPLICA, "small")
    for client in clients:
        assert client.whole and text_of(client.frames[:-1]) == expected
    faults.await_successor(pair.process.mark, Role.REPLICA, killed, "small", limit_s=RECOVER_S)
    eventually(lambda: serves(pair), "service", RECOVER_S)
    assert_books_are_right(pair, clients)
    rows = sum(pair.usage(tenant)["requests"] for tenant in ("acme", "beta")) - requests
    assert rows >= STREAMS
    attempts = [len(pair.truth(client.request_id)) for client in clients]
    assert max(attempts) == 2, "the killed replica had some of them"


def test_after_the_death_of_a_gateway_clients_call_again(pair: CasePlatform) -> None:
    with streams(pair) as clients:
        faults.kill(pair.process.mark, Role.GATEWAY)
        eventually(lambda: serves(pair), "the other gateway serves", RECOVER_S)
    cut = [client for client in clients if not client.whole]
    assert cut, "the killed gateway had some of them"
    assert len(cut) < STREAMS, "the other gateway's streams go on"
    eventually(lambda: len(faults.pids(pair.process.mark, Role.GATEWAY)) == 2, "two gateways again", RECOVER_S)
    eventually(lambda: serves(pair), "service", RECOVER_S)
    assert_books_are_right(pair, clients)
    for client in cut:
        assert pair.row(client.request_id)["outcome"] == "gateway_lost"


def test_streams_go_on_while_the_controller_is_replaced(pair: CasePlatform, expected: str) -> None:
    spent = {tenant: pair.usage(tenant)["cost_usd"] for tenant in ("acme", "beta")}
    with streams(pair) as clients:
        killed = faults.kill(pair.process.mark, Role.CONTROLLER)
    for client in clients:
        assert client.whole and text_of(client.frames[:-1]) == expected
    faults.await_successor(pair.process.mark, Role.CONTROLLER, killed, limit_s=RECOVER_S)
    eventually(lambda: serves(pair), "service", RECOVER_S)  # from a lease, it may be
    eventually(pair.governed, "the new controller answers", RECOVER_S)
    assert_books_are_right(pair, clients)
    for tenant, before in spent.items():
        budget = pair.client(tenant).get("/v1/usage").json()["budget"]
        assert budget["spent_usd"] >= before, "what was spent before the death stays spent"
