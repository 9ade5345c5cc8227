"""A gateway between a stand-in controller, which grants by simple rules and writes down what it is told, and real replica
servers over the fake engine. Everything in one process, on free loopback ports."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import msgspec
import uvicorn

from rungway.channel import Server
from rungway.contracts import (
    ApiKey,
    Budget,
    CacheTerms,
    ChannelSpec,
    ControllerSpec,
    FakeSpec,
    GatewaySpec,
    Isolation,
    LadderSpec,
    LadderTerms,
    ModelAlias,
    Platform,
    Price,
    Quotas,
    RungSpec,
    Slo,
    Tenant,
    TenantClass,
    Tier,
    Version,
)
from rungway.gateway.app import create_app
from rungway.gateway.core import Gateway
from rungway.messages import (
    Answer,
    AttemptAck,
    AttemptEnded,
    Counts,
    Directory,
    FinishAck,
    Finished,
    GatewayHello,
    Granted,
    Message,
    Peers,
    Query,
    Refused,
    ReplicaHello,
    ReplicaInfo,
    Retry,
    Submit,
    ToController,
    Withdraw,
)
from rungway.outcomes import Code
from rungway.replica.build import build_engine
from rungway.replica.server import ReplicaServer
from rungway.types import Ask, AttemptEnd, Finish, Grant, Offer, OfferKind, RateInfo, Refusal

KEY = "rw_acme_0123456789abcdef0123456789abcdef0123456789a"
BETA_KEY = "rw_beta_0123456789abcdef0123456789abcdef0123456789b"
ADMIN_KEY = "rw_platform_0123456789abcdef0123456789abcdef012345c"
EXPIRED_KEY = "sk-expired-SECRET-0123456789abcdef"
REVOKED_KEY = "sk-revoked-SECRET-0123456789abcdef"
PRICE = Price(input=200_000, cached_input=50_000, output=600_000)
RATE = RateInfo(
    limit_requests=60,
    remaining_requests=59,
    reset_requests_s=1.2,
    limit_tokens=6000,
    remaining_tokens=5000,
    reset_tokens_s=0.4,
)
RUNGS = ("full", "rerank_off", "best_of_1", "context_trim", "small_tier", "cached_answer", "template", "defer")
CHANNEL = ChannelSpec(heartbeat_ms=200, lost_after_ms=8000)
WAIT_S = 60.0


def api_key(name: str, text: str, **changes: Any) -> ApiKey:
    return ApiKey(id=name, sha256=hashlib.sha256(text.encode()).hexdigest(), **changes)


def tenant(name: str, *keys: ApiKey, **changes: Any) -> Tenant:
    values: dict[str, Any] = {
        "name": name,
        "plan": "gold",
        "keys": keys,
        "tenant_class": TenantClass.STANDARD,
        "weight": 1.0,
        "models": ("auto", "small", "large"),
        "value_nusd": {},
        "quotas": Quotas(requests_per_minute=60, tokens_per_minute=6000, concurrent_requests=8, queue_max=8),
        "isolation": Isolation(),
        "budget": Budget(nusd=None),
        "slo": Slo(ttft_ms_p99=500, tpot_ms_p99=60, availability=0.999),
        "ladder": LadderTerms(),
        "cache": CacheTerms(),
    }
    return Tenant(**(values | changes))


def version(tier: str, name: str, **changes: Any) -> Version:
    values: dict[str, Any] = {
        "name": name,
        "tier": tier,
        "model": f"fake:{name}",
        "backend": "fake",
        "replicas_min": 1,
        "replicas_max": 1,
        "replica_cost_nusd_per_hour": 1,
        "max_num_seqs": 16,
        "max_context": 512,
        "fake": FakeSpec(ttft_ms=1, tpot_ms=1, prefill_ms_per_1k=0),
    }
    return Version(**(values | changes))


def platform(**changes: Any) -> Platform:
    ladder = LadderSpec(
        rungs=tuple(RungSpec(index=i, name=name, enter=1.0 + i) for i, name in enumerate(RUNGS)),
        context_limit_tokens=30,
        digest="l1",
    )
    values: dict[str, Any] = {
        "cell": "test",
        "host": "127.0.0.1",
        "port": 0,
        "state_dir": "",
        "tenants_dir": "",
        "database": "sqlite",
        "gateway": GatewaySpec(body_bytes_max=200_000, controller_wait_s=0.6),
        "controller": ControllerSpec(),
        "channel": CHANNEL,
        "tiers": (
            Tier(name="small", rank=0, price=PRICE, versions=(version("small", "v1"),)),
            Tier(name="large", rank=1, price=PRICE, versions=(version("large", "v1"),)),
        ),
        "models": (ModelAlias(name="auto", tiers=("small", "large")), ModelAlias(name="secret", tiers=("large",))),
        "ladder": ladder,
        "tenants": (
            tenant(
                "acme",
                api_key("acme-1", KEY),
                api_key("acme-2", EXPIRED_KEY, expires_ns=1),
                api_key("acme-3", REVOKED_KEY, revoked=True),
            ),
            tenant("beta", api_key("beta-1", BETA_KEY), models=("small",), tenant_class=TenantClass.BATCH),
            tenant("platform", api_key("admin", ADMIN_KEY, scopes=("admin",)), models=()),
        ),
    }
    return Platform(**(values | changes))


Decide = Callable[[Ask, int, frozenset[str]], Grant | Refusal | None]


class StandIn:
    """A controller by simple rules. `decide(ask, attempt, avoid)` may be replaced; None = keep it waiting."""

    def __init__(self, configuration: Platform) -> None:
        self.platform = configuration
        self.version = 1
        self.replicas: dict[str, ReplicaInfo] = {}
        self.asks: list[Ask] = []
        self.wanted = 1
        self.late: list[tuple[Ask, int]] = []  # until the wanted replicas are here
        self.open: dict[str, Ask] = {}
        self.finishes: list[Finish] = []
        self.withdrawn: list[Withdraw] = []
        self.retries: list[Retry] = []
        self.ends: list[AttemptEnd] = []
        self.hellos: list[GatewayHello] = []
        self.counts: dict[tuple[str, tuple[str, ...]], float] = {}
        self.queries: list[tuple[str, dict[str, Any], str, bool]] = []
        self.answer: tuple[int, str, bytes] = (200, "application/json", b'{"ok":true}')
        self.acknowledge = True
        self.decide: Decide = self.grant
        self._gateways: set[str] = set()
        self._avoid: dict[str, frozenset[str]] = {}
        self.server = Server("127.0.0.1", CHANNEL, ToController, self._on_message, self._on_lost)

    async def start(self) -> None:
        await self.server.start()

    async def stop(self) -> None:
        await self.server.stop()

    async def restart(self, replicas: int = 1) -> None:
        """Come back with no memory at another address. Nothing is decided before so many replicas are here."""
        self.wanted = replicas
        self.open.clear()
        self.replicas.clear()
        self._gateways.clear()
        self.server = Server("127.0.0.1", CHANNEL, ToController, self._on_message, self._on_lost)
        await self.server.start()

    async def resolve(self) -> str:
        return self.server.address

    def grant(self, ask: Ask, attempt: int, avoid: frozenset[str]) -> Grant | Refusal | None:
        """The first replica of the first asked tier that is not to be avoided, if there is one."""
        return self.grant_on(ask, attempt, avoid)

    def grant_on(
        self, ask: Ask, attempt: int = 1, avoid: frozenset[str] = frozenset(), **offer: Any
    ) -> Grant | Refusal | None:
        tier = offer.get("tier", ask.tiers[0])
        found = [r for r in self.replicas.values() if r.tier == tier and r.replica_id not in avoid]
        if not found:
            return self.refusal(ask, Code.NO_CAPACITY, retry_after_s=2)
        values: dict[str, Any] = {
            "kind": OfferKind.MODEL,
            "tier": tier,
            "version": found[0].version,
            "prompt_tokens": ask.prompt_tokens[tier],
            "max_tokens": 16 if ask.output_bound is None else ask.output_bound,
            "n": ask.n,
            "best_of": ask.best_of,
        }
        return self.shaped(ask, attempt, found[0].replica_id, Offer(**(values | offer)))

    def shaped(self, ask: Ask, attempt: int, replica_id: str, offer: Offer) -> Grant:
        return Grant(
            request_id=ask.request_id,
            attempt=attempt,
            offer=offer,
            replica_id=replica_id,
            reason="best_offer",
            reserved_tokens=10,
            reserved_nusd=10,
            rate=RATE,
            price=PRICE,
        )

    def refusal(self, ask: Ask, code: Code, **changes: Any) -> Refusal:
        values: dict[str, Any] = {"message": f"refused: {code}", "retry_after_s": None, "rate": RATE}
        return Refusal(request_id=ask.request_id, code=code, **(values | changes))

    def broadcast(self, message: Message) -> None:
        for gateway in self._gateways & set(self.server.peers()):  # one may be lost and not told of yet
            self.server.send(gateway, message)

    def reload(self, configuration: Platform) -> None:
        self.platform, self.version = configuration, self.version + 1
        self.broadcast(Directory(self.version, configuration))

    def drop_replica(self, replica_id: str) -> None:
        del self.replicas[replica_id]
        self.broadcast(Peers(list(self.replicas.values())))

    def soon(self, ask: Ask, attempt: int) -> None:
        """Decide now, or once there are replicas."""
        if len(self.replicas) < self.wanted:
            self.late.append((ask, attempt))
        else:
            self.rule(ask, attempt)

    def rule(self, ask: Ask, attempt: int) -> None:
        """Decide and tell."""
        decision = self.decide(ask, attempt, self._avoid.get(ask.request_id, frozenset()))
        if isinstance(decision, Grant):
            self.server.send(ask.gateway_id, Granted(decision))
        elif decision is not None:
            self.server.send(ask.gateway_id, Refused(decision))

    def _on_lost(self, peer: str) -> None:
        self._gateways.discard(peer)
        if self.replicas.pop(peer, None) is not None:
            self.broadcast(Peers(list(self.replicas.values())))

    def _on_message(self, peer: str, message: Message) -> None:
        if isinstance(message, GatewayHello):
            self._gateways.add(peer)
            self.hellos.append(message)
            self.server.send(peer, Directory(self.version, self.platform))
            self.server.send(peer, Peers(list(self.replicas.values())))
            for flight in message.flights:
                if flight.ask.request_id not in self.open:
                    self._submit(flight.ask, flight.grant is None)
        elif isinstance(message, ReplicaHello):
            self.replicas[peer] = message.info
            self.broadcast(Peers(list(self.replicas.values())))
            if len(self.replicas) >= self.wanted:
                late, self.late = self.late, []
                for ask, attempt in late:
                    self.rule(ask, attempt)
        elif isinstance(message, Submit):
            self._submit(message.ask, True)
        elif isinstance(message, Withdraw):
            self.withdrawn.append(message)
        elif isinstance(message, Finished):
            self.finishes.append(message.finish)
            if self.acknowledge:
                self.server.send(peer, FinishAck([message.finish.request_id]))
        elif isinstance(message, AttemptEnded):
            self.ends.append(message.end)
            self.server.send(peer, AttemptAck([(message.end.request_id, message.end.attempt)]))
        elif isinstance(message, Retry):
            self.retries.append(message)
            self._avoid[message.request_id] = self._avoid.get(message.request_id, frozenset()) | {message.replica_id}
            self.soon(self.open[message.request_id], message.attempt + 1)
        elif isinstance(message, Counts):
            for name, labels, amount in message.increments:
                self.counts[(name, labels)] = self.counts.get((name, labels), 0) + amount
        elif isinstance(message, Query):
            self.queries.append((message.name, msgspec.json.decode(message.args), message.tenant, message.admin))
            self.server.send(peer, Answer(message.query_id, *self.answer))

    def _submit(self, ask: Ask, undecided: bool) -> None:
        self.asks.append(ask)
        self.open[ask.request_id] = ask
        if undecided:
            self.soon(ask, 1)


class Rig:
    """Use with `running(...)`. `http` talks to the ASGI app; `headers` carry acme's key."""

    def __init__(self, configuration: Platform, folder: Path, replicas: dict[str, Version]) -> None:
        self.controller = StandIn(configuration)
        self.folder = folder
        self.replicas: dict[str, ReplicaServer] = {}
        self._versions = replicas
        self.gateway = Gateway(
            gateway_id="gateway-1",
            resolve_controller=lambda: self.controller.resolve(),
            channel=CHANNEL,
            models_dir=folder / "models",
        )
        self.app = create_app(self.gateway)
        self.headers = {"authorization": f"Bearer {KEY}"}
        self.http = httpx.AsyncClient(
            transport=httpx.ASGITransport(app=self.app), base_url="http://gateway", headers=self.headers, timeout=WAIT_S
        )

    async def start(self) -> None:
        await self.controller.start()
        for replica_id, one in self._versions.items():
            await self.add_replica(replica_id, one)
        await self.gateway.start()
        await until(self.gateway.ready)

    async def add_replica(self, replica_id: str, one: Version) -> None:
        server = ReplicaServer(
            engine=build_engine(one, self.folder),
            replica_id=replica_id,
            version=one,
            resolve_controller=lambda: self.controller.resolve(),
            channel=CHANNEL,
            state_dir=self.folder / replica_id,
        )
        await server.start()
        self.replicas[replica_id] = server
        await until(lambda: replica_id in self.controller.replicas)

    async def stop(self) -> None:
        await self.http.aclose()
        await self.gateway.stop()
        for server in self.replicas.values():
            await server.stop()
        await self.controller.stop()

    async def chat(self, content: str = "hi [[tokens=3]]", **body: Any) -> httpx.Response:
        return await self.post({"model": "small", "messages": [{"role": "user", "content": content}], **body})

    async def post(self, body: Any, path: str = "/v1/chat/completions", **headers: str) -> httpx.Response:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return await self.http.post(path, json=body, headers=named)

    async def settled(self, count: int = 1) -> list[Finish]:
        await until(lambda: len(self.controller.finishes) >= count)
        return self.controller.finishes

    def running(self, replica_id: str = "small-1") -> int:
        stats = self.replicas[replica_id]._engine.stats()
        return stats.running + stats.waiting


@contextlib.asynccontextmanager
async def running(
    folder: Path, configuration: Platform | None = None, replicas: dict[str, Version] | None = None
) -> AsyncIterator[Rig]:
    """A started rig: by default one replica for each tier."""
    chosen = replicas or {"small-1": version("small", "v1"), "large-1": version("large", "v1")}
    rig = Rig(configuration or platform(), folder, chosen)
    await rig.start()
    try:
        yield rig
    finally:
        await rig.stop()


@contextlib.asynccontextmanager
async def listening(rig: Rig) -> AsyncIterator[int]:
    """The rig's app behind uvicorn on a free port, which is yielded."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        server = uvicorn.Server(uvicorn.Config(rig.app, lifespan="off", log_level="warning"))
        task = asyncio.create_task(server.serve(sockets=[sock]))
        await until(lambda: server.started)
        try:
            yield port
        finally:
            server.should_exit = True
            await asyncio.wait_for(task, WAIT_S)


async def until(condition: Callable[[], object], wait_s: float = WAIT_S) -> None:
    """Poll until it holds; a hang is a failure."""
    async with asyncio.timeout(wait_s):
        while not condition():
            await asyncio.sleep(0.005)


def frames(text: str) -> list[Any]:
    """The events of an SSE body, `[DONE]` as it is; every line must be one whole event."""
    found: list[Any] = []
    for block in text.split("\n\n"):
        if block:
            assert block.startswith("data: ") and "\n" not in block and "\r" not in block, block
            data = block[6:]
            found.append(data if data == "[DONE]" else msgspec.json.decode(data))
    return found


def said(events: list[Any], index: int = 0) -> str:
    """The joined text of one choice."""
    chunks = [c for event in events if event != "[DONE]" for c in event.get("choices", []) if c["index"] == index]
    return "".join(c["delta"].get("content", "") if "delta" in c else c["text"] for c in chunks)
