"""The shape of `gateway:`, `controller:` and `channel:` in the platform file."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from rungway import contracts
from rungway.settings import rules
from rungway.settings.rules import Count, CountOrZero, Positive, Share
from rungway.settings.section import Section, refuse

_GATEWAY = contracts.GatewaySpec()
_CONTROLLER = contracts.ControllerSpec()
_CHANNEL = contracts.ChannelSpec()


class Gateway(Section):
    replicas: Count = Field(default=_GATEWAY.replicas, description="Gateway processes.")
    body_bytes_max: Count = Field(default=_GATEWAY.body_bytes_max, description="Largest request body, bytes.")
    request_timeout_s: Positive = Field(default=_GATEWAY.request_timeout_s, description="Longest life of a request.")
    revocation_bound_s: Positive = Field(
        default=_GATEWAY.revocation_bound_s, description="Longest time until a revoked key stops."
    )
    idempotency_ttl_s: Positive = Field(
        default=_GATEWAY.idempotency_ttl_s, description="How long an Idempotency-Key is kept."
    )
    idempotency_entries_max: Count = Field(
        default=_GATEWAY.idempotency_entries_max, description="Idempotency keys kept."
    )
    stream_buffer_deltas_max: Count = Field(
        default=_GATEWAY.stream_buffer_deltas_max,
        description="Deltas kept for a slow client before its request is stopped.",
    )
    controller_wait_s: Positive = Field(default=_GATEWAY.controller_wait_s, description="Wait for a lost controller.")
    inter_token_timeout_s: Positive = Field(
        default=_GATEWAY.inter_token_timeout_s, description="Longest silence of a replica."
    )
    retries_max: CountOrZero = Field(default=_GATEWAY.retries_max, description="Attempts after the first.")
    flights_max: Count = Field(default=_GATEWAY.flights_max, description="Requests that one gateway holds at a time.")
    constraint_bytes_max: Count = Field(
        default=_GATEWAY.constraint_bytes_max,
        description="Largest JSON schema, expression, grammar or tool list, bytes.",
    )
    constraint_check_s: Positive = Field(
        default=_GATEWAY.constraint_check_s, description="Longest time that a gateway checks one for."
    )
    embedding_inputs_max: Count = Field(
        default=_GATEWAY.embedding_inputs_max, description="Texts in one request for embeddings."
    )
    prefix_keys_max: Annotated[int, rules.whole(0, 64)] = Field(
        default=_GATEWAY.prefix_keys_max,
        description="Leading prompt blocks that a gateway names to the controller, for placement by locality; 0 = none.",
    )


_SHARES = _CONTROLLER.class_shares


class ClassShares(Section):
    interactive: Share = Field(default=_SHARES["interactive"], description="Least part of dispatches while it waits.")
    standard: Share = Field(default=_SHARES["standard"], description="The same for class standard.")
    batch: Share = Field(default=_SHARES["batch"], description="The same for class batch.")

    @model_validator(mode="after")
    def _sum(self) -> ClassShares:
        if self.interactive + self.standard + self.batch > 1 + 1e-9:
            raise refuse("", "the shares are more than 1 together")
        return self


class Controller(Section):
    class_shares: ClassShares = Field(default_factory=ClassShares, description="Least shares of dispatch per class.")
    queue_timeout_s: Positive = Field(default=_CONTROLLER.queue_timeout_s, description="Longest wait in the queue.")
    replica_stale_s: Positive = Field(
        default=_CONTROLLER.replica_stale_s, description="A replica silent for so long is full."
    )
    in_flight_factor: Positive = Field(
        default=_CONTROLLER.in_flight_factor, description="Work given out per batch place."
    )
    breaker_failures: Count = Field(
        default=_CONTROLLER.breaker_failures, description="Failures that open a tenant's breaker."
    )
    breaker_open_s: Positive = Field(default=_CONTROLLER.breaker_open_s, description="How long it stays open.")
    retry_budget_floor: CountOrZero = Field(
        default=_CONTROLLER.retry_budget_floor, description="Retries always allowed."
    )
    orphan_wait_s: Positive = Field(
        default=_CONTROLLER.orphan_wait_s,
        description="After a restart, wait for the gateway of work that a replica still runs.",
    )
    lost_wait_s: Positive = Field(
        default=_CONTROLLER.lost_wait_s,
        description="Wait for the missing half of a settlement before the row is written.",
    )
    settled_memory: Count = Field(
        default=_CONTROLLER.settled_memory, description="Settled requests remembered, to see repeats."
    )
    tick_ms: Positive = Field(
        default=_CONTROLLER.tick_ms, description="Longest pause between looks at queue and ladder, ms."
    )


class Channel(Section):
    heartbeat_ms: Positive = Field(default=_CHANNEL.heartbeat_ms, description="Pause between heartbeats, ms.")
    lost_after_ms: Positive = Field(
        default=_CHANNEL.lost_after_ms, description="Silence after which a peer is lost, ms."
    )
    window_batches: Count = Field(default=_CHANNEL.window_batches, description="Unacknowledged batches per peer.")
    buffer_bytes_max: Count = Field(default=_CHANNEL.buffer_bytes_max, description="Bytes kept for a slow peer.")
