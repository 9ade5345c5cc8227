"""Platforms for the black-box cases: a configuration written for them, one tenant per case, and calls that read well."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import httpx
import yaml

from rungway.settings import generate_key, hash_key
from support.platform_process import ROOT, PlatformProcess

T = TypeVar("T")
CALL_S = 60.0
SETTLE_S = 30.0
Tenants = Mapping[str, Mapping[str, Any]]


def tenant_text(name: str, fields: Mapping[str, Any], key: str | None) -> str:
    """A tenant file with one key. `fields["key"]` holds more of the key's entry (an expiry, say)."""
    more = dict(fields)
    entry = {"id": f"{name}-1"} | ({"scopes": ["admin"]} if name == "platform" else {}) | more.pop("key", {})
    keys = [entry | {"sha256": hash_key(key)}] if key else []
    return yaml.safe_dump({"tenant": name, "keys": keys} | more)


def eventually(condition: Callable[[], bool], what: str, limit_s: float = SETTLE_S) -> None:
    """Wait, bounded, until `condition` holds."""
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, f"never came true: {what}"
        time.sleep(0.05)


def together(calls: Sequence[Callable[[], T]]) -> list[T]:
    """Run all calls at once, each on a thread of its own; results in order."""
    with ThreadPoolExecutor(max(1, len(calls))) as pool:
        return [future.result(CALL_S) for future in [pool.submit(call) for call in calls]]


class CasePlatform:
    """A running platform whose tenants and keys the test knows."""

    def __init__(self, folder: Path, platform: Mapping[str, Any], tenants: Tenants) -> None:
        self.folder = folder
        self.keys = {name: generate_key(name) for name in [*tenants, "platform"]}
        self.config = folder / "platform.yaml"
        (folder / "tenants").mkdir(parents=True)
        self.config.write_text(yaml.safe_dump(dict(platform) | {"tenants_dir": "tenants", "state_dir": "state"}))
        for name, fields in tenants.items():
            self.write_tenant(name, fields)
        self.write_tenant("platform", {"models": []})
        self.process = PlatformProcess(folder / "state", config=self.config)
        self._clients: dict[str, httpx.Client] = {}

    def write_tenant(self, name: str, fields: Mapping[str, Any]) -> Path:
        path = self.folder / "tenants" / f"{name}.yaml"
        path.write_text(tenant_text(name, fields, self.keys.get(name)))
        return path

    def client(self, tenant: str) -> httpx.Client:
        """Keeps its connections; the tenant's key is on it."""
        if tenant not in self._clients:
            headers = {"Authorization": f"Bearer {self.keys[tenant]}"}
            limits = httpx.Limits(max_connections=200)
            self._clients[tenant] = httpx.Client(
                base_url=self.process.url, headers=headers, timeout=CALL_S, limits=limits
            )
        return self._clients[tenant]

    def close(self) -> None:
        for client in self._clients.values():
            client.close()

    # -- inference

    def chat(
        self, tenant: str, text: str = "hello there", *, headers: Mapping[str, str] | None = None, **body: Any
    ) -> httpx.Response:
        """POST a chat request (model small unless said) and read the whole answer, whatever it is."""
        return self.client(tenant).post("/v1/chat/completions", json=chat_body(text, **body), headers=headers)

    @contextlib.contextmanager
    def streaming(
        self, tenant: str, text: str = "hello there", *, headers: Mapping[str, str] | None = None, **body: Any
    ) -> Iterator[tuple[httpx.Response, Iterator[dict[str, Any]]]]:
        """An open stream: the answer and its data frames as they come."""
        shape = chat_body(text, **body) | {"stream": True}
        with self.client(tenant).stream("POST", "/v1/chat/completions", json=shape, headers=headers) as answer:
            yield answer, frames(answer.iter_lines())

    def stream(self, tenant: str, text: str = "hello there", **more: Any) -> list[dict[str, Any]]:
        """All data frames of a stream that must end with [DONE]."""
        with self.streaming(tenant, text, **more) as (answer, found):
            assert answer.status_code == 200, answer.read()
            got = list(found)
        assert got[-1] == DONE
        return got[:-1]

    # -- reads

    def admin(self, path: str, **params: Any) -> Any:
        answer = self.client("platform").get("/admin" + path, params=params)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def governed(self) -> bool:
        """Whether the controller answers. Without it gateways serve what their leases cover."""
        return self.client("platform").get("/admin/live").status_code == 200

    def decision(self, request_id: str) -> dict[str, Any]:
        """The settled request with its audit trail; waits for settlement, bounded."""
        found: list[dict[str, Any]] = []

        def settled() -> bool:
            answer = self.client("platform").get(f"/v1/decisions/{request_id}")
            if answer.status_code == 200:
                found.append(answer.json())
            return bool(found)

        eventually(settled, f"a ledger row of {request_id}")
        return found[-1]

    def row(self, request_id: str) -> dict[str, Any]:
        row: dict[str, Any] = self.decision(request_id)["request"]
        return row

    def truth(self, request_id: str) -> list[dict[str, Any]]:
        """The engines' own record of a request, one entry per attempt."""
        attempts: list[dict[str, Any]] = self.admin("/engine-truth", request_id=request_id)["attempts"]
        return attempts

    def tenant(self, name: str) -> dict[str, Any]:
        """Live counters of a tenant."""
        found: dict[str, Any] = self.admin("/live")["tenants"][name]
        return found

    def usage(self, tenant: str) -> dict[str, Any]:
        totals: dict[str, Any] = self.admin("/usage", tenant=tenant)["totals"]
        return totals

    def settled(self, limit_s: float = SETTLE_S) -> None:
        """Wait until nothing is in flight and books and engines agree. What a killed replica had emitted is known when its
        successor has read the token log, so agreement may come some seconds after the last answer."""
        eventually(lambda: self.admin("/live")["flights"] == 0, "no request in flight", limit_s)
        deadline = time.monotonic() + limit_s
        while (books := self.books())["unsettled"] or not books["ok"]:
            assert time.monotonic() < deadline, books
            time.sleep(0.2)

    def books(self) -> dict[str, Any]:
        books: dict[str, Any] = self.admin("/engine-truth", limit=1)["reconcile"]
        return books

    def calm(self) -> None:
        """Wait until every rung is 0 again, so that one case's load does not degrade the next one's answers."""
        eventually(lambda: not any(s["rung"] for s in self.admin("/ladder")["scopes"]), "rung 0 everywhere", 40.0)

    def reload(self) -> httpx.Response:
        return self.client("platform").post("/admin/reload")


DONE: dict[str, Any] = {"done": True}


def frames(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    """Data frames of an SSE answer, parsed; [DONE] comes as DONE. Any other non-empty line is an error."""
    for line in lines:
        if line:
            assert line.startswith("data: "), line
            yield DONE if line == "data: [DONE]" else json.loads(line[6:])


def chat_body(text: str, **body: Any) -> dict[str, Any]:
    return {"model": "small", "max_tokens": 8, "messages": [{"role": "user", "content": text}]} | body


def text_of(found: Sequence[Mapping[str, Any]], index: int = 0) -> str:
    """The joined deltas of one choice."""
    return "".join(
        choice["delta"].get("content") or ""
        for frame in found
        for choice in frame["choices"]
        if choice["index"] == index
    )


@contextlib.contextmanager
def running_cases(folder: Path, platform: Mapping[str, Any], tenants: Tenants) -> Iterator[CasePlatform]:
    """A ready platform with these tenants; ended at the end, also when the start fails."""
    cases = CasePlatform(folder, platform, tenants)
    try:
        cases.process.start()
        yield cases
    finally:
        cases.close()
        cases.process.stop()


def platform_shape(*, gateways: int = 1, small: int = 1, **gateway: Any) -> dict[str, Any]:
    """The platform file of the cases. Prices are large so that a few answers are real money: a large answer of 10 + 20
    tokens costs 0.5 dollars, a small one a tenth. The ladder has short dwell times."""

    def tier(replicas: int, seqs: int, scale: float) -> dict[str, Any]:
        version = {
            "backend": "fake",
            "replicas": {"min": replicas, "max": replicas},
            "max_num_seqs": seqs,
            "max_context": 4096,
            "fake": {"prefill_ms_per_1k": 20, "ttft_ms": 5, "tpot_ms": 5},
        }
        price = {"input": 1.0 * scale, "cached_input": 0.5 * scale, "output": 2.0 * scale}
        return {"price_usd_per_1k": price, "versions": {"fake": version}}

    return {
        "cell": "cases",
        "gateway": {"replicas": gateways, "body_bytes_max": 1_000_000} | gateway,
        "tiers": {
            "small": tier(small, 16, 1.0),
            "large": tier(1, 4, 10.0),
            "embed": tier(1, 8, 0.1) | {"kind": "embedding"},
        },
        "models": {"auto": {"tiers": ["small", "large"]}},
        "ladder": str(ROOT / "config" / "ladders" / "drill.yaml"),
        "plans": {"default": PLAN},
    }


PLAN: dict[str, Any] = {
    "class": "interactive",
    "quotas": {
        "requests_per_minute": "unlimited",
        "tokens_per_minute": "unlimited",
        "concurrent_requests": "unlimited",
        "queue_max": 1000,
    },
    "isolation": {"in_flight_share_max": 1},
    "ladder": {"floor": "full"},
    "slo": {"ttft_ms_p99": 1000, "tpot_ms_p99": 500},
}
