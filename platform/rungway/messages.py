"""Every message between gateway, controller and replica. msgspec tagged arrays; `channel.py` carries them in batches.

    gateway -> controller   GatewayHello Submit Withdraw Finished Retry Query Counts
    controller -> gateway   Directory Peers Leased Granted Refused FinishAck Answer
    gateway -> replica      Start Cancel
    replica -> gateway      Deltas
    replica -> controller   ReplicaHello Report AttemptEnded
    controller -> replica   AttemptAck Evict

Retained until acknowledged by their senders (bounded): Finished, AttemptEnded. Everything else is replaced by the
Hello messages after a reconnect.
"""

from __future__ import annotations

import msgspec

from rungway.contracts import Platform
from rungway.engine.protocol import Delta, EngineStats, PrefixNews, Work
from rungway.leases import Lease
from rungway.types import Ask, AttemptEnd, Billing, Finish, Grant, Refusal


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base of all messages; the tag is the class name."""


class Flight(msgspec.Struct, frozen=True, array_like=True):
    """A request in a gateway's hands: granted (a grant is there) or still waiting for a decision."""

    ask: Ask
    grant: Grant | None = None


class GatewayHello(Message, frozen=True):
    """First message of a gateway after every (re)connect: all that it has in flight, and what it admitted from a lease and
    ended, whose Finish nobody has acknowledged."""

    gateway_id: str
    flights: list[Flight]


class Submit(Message, frozen=True):
    ask: Ask


class Withdraw(Message, frozen=True):
    """The client left before a decision; the controller forgets the ask and writes its row."""

    request_id: str
    outcome: str


class Finished(Message, frozen=True):
    finish: Finish


class Retry(Message, frozen=True):
    """Attempt `attempt` failed on `replica_id` before the answer was whole. The controller answers Granted with
    attempt + 1 on another replica, or Refused. `why`: replica_lost | timeout | error | evicted (by the controller's wish, so
    no failure). `emitted` tokens so far."""

    request_id: str
    attempt: int
    replica_id: str
    why: str
    emitted: int


class Query(Message, frozen=True):
    """A read or an admin command, by name (see control/queries.py). `args` is JSON. `tenant` is the caller's tenant,
    `admin` whether its key has that scope."""

    query_id: int
    name: str
    args: bytes
    tenant: str
    admin: bool


class Answer(Message, frozen=True):
    query_id: int
    status: int
    content_type: str
    body: bytes


class Counts(Message, frozen=True):
    """Events that the controller does not see by itself, as increments: (metric, label values, increment)."""

    increments: list[tuple[str, tuple[str, ...], float]]


class Directory(Message, frozen=True):
    """The configuration in force; sent after GatewayHello and after every reload. `models_dir` holds converted models.
    Key changes take effect on a gateway when this arrives. `session_secret` signs the dashboard's sessions; without
    one nobody can sign in there."""

    version: int
    platform: Platform
    session_secret: bytes = b""


class ReplicaInfo(msgspec.Struct, frozen=True, array_like=True):
    """`kv_tokens` = tokens that fit into the replica's KV cache. `state`: ready | draining | lost."""

    replica_id: str
    address: str
    tier: str
    version: str
    max_num_seqs: int
    kv_tokens: int
    state: str = "ready"


class Peers(Message, frozen=True):
    """All replicas that a gateway may have to reach. Complete list, replaces the last one."""

    replicas: list[ReplicaInfo]


class Leased(Message, frozen=True):
    """After the hello and then regularly; the last one counts."""

    lease: Lease


class Granted(Message, frozen=True):
    grant: Grant


class Refused(Message, frozen=True):
    refusal: Refusal


class FinishAck(Message, frozen=True):
    request_ids: list[str]


class Start(Message, frozen=True):
    work: Work
    billing: Billing


class Cancel(Message, frozen=True):
    request_id: str


class Deltas(Message, frozen=True):
    """All that one engine step produced for one gateway."""

    deltas: list[Delta]


class ReplicaHello(Message, frozen=True):
    """First message of a replica after every (re)connect, with the attempts it still runs."""

    info: ReplicaInfo
    running: list[tuple[str, int]]


class Report(Message, frozen=True):
    """Sent every 100 ms. `progress`: (request_id, attempt, output tokens so far) of attempts that moved. `prefixes`: what
    the engine's prefix cache holds, in full after every (re)connect; None from engines that do not say."""

    replica_id: str
    stats: EngineStats
    progress: list[tuple[str, int, int]]
    draining: bool = False
    prefixes: PrefixNews | None = None


class AttemptEnded(Message, frozen=True):
    end: AttemptEnd


class AttemptAck(Message, frozen=True):
    attempts: list[tuple[str, int]]


class Evict(Message, frozen=True):
    """Stop this attempt: its place is needed for others. Attempt 0 = whichever runs."""

    request_id: str
    attempt: int = 0


ToController = (
    GatewayHello | Submit | Withdraw | Finished | Retry | Query | Counts | ReplicaHello | Report | AttemptEnded
)
ToGateway = Directory | Peers | Leased | Granted | Refused | FinishAck | Answer | Deltas
ToReplica = Start | Cancel | AttemptAck | Evict
