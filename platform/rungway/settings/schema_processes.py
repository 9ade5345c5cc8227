"""The shape of `gateway:`, `controller:` and `channel:` in the platform file."""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated

from pydantic import Field, model_validator

from rungway import contracts
from rungway.settings import rules
from rungway.settings.rules import Count, CountOrZero, Positive, Share
from rungway.settings.section import Section, refuse

_GATEWAY = contracts.GatewaySpec()
_CONTROLLER = contracts.ControllerSpec()
_CHANNEL = contracts.ChannelSpec()
_LEASE = _CONTROLLER.lease


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
    completion_prompts_max: Count = Field(
        default=_GATEWAY.completion_prompts_max, description="Prompts in one completion request."
    )
    prompt_logprobs_max: Annotated[int, rules.whole(0, 64)] = Field(
        default=_GATEWAY.prompt_logprobs_max,
        description="Alternatives that a client may ask for at each token of its prompt.",
    )
    prompt_logprobs_values_max: Count = Field(
        default=_GATEWAY.prompt_logprobs_values_max,
        description="Log-probabilities of one prompt: its tokens times one more than their alternatives.",
    )
    prefix_keys_max: Annotated[int, rules.whole(0, 64)] = Field(
        default=_GATEWAY.prefix_keys_max,
        description="Keys of a prompt's beginning that a gateway names to the controller, for placement by locality; 0 = none.",
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


class Preempt(Section):
    at: Annotated[float | None, rules.number(0, above=True, words=("never",))] = Field(
        default=_CONTROLLER.preempt.at,
        description="Part of its first-token target that a request waits before lower classes give way to it.",
    )
    evictions_max: CountOrZero = Field(
        default=_CONTROLLER.preempt.evictions_max,
        description="How often one request is stopped and resumed at most. 0 = nothing that runs is ever stopped.",
    )
    rest_s: Positive = Field(
        default=_CONTROLLER.preempt.rest_s, description="A resumed request is left alone for so long."
    )
    claim_s: Positive = Field(
        default=_CONTROLLER.preempt.claim_s,
        description="A freed place is kept for so long for the request that it was freed for.",
    )


_SHED = _CONTROLLER.shed


class _Ramp(Section):
    begin: Positive
    full: Positive

    @model_validator(mode="after")
    def _order(self) -> _Ramp:
        if self.begin >= self.full:
            raise refuse("full", "is not more than begin")
        return self


class ShedInteractive(_Ramp):
    begin: Positive = Field(default=_SHED.interactive.begin, description="Up to this load nobody is turned away.")
    full: Positive = Field(default=_SHED.interactive.full, description="From this load on everybody is.")


class ShedStandard(_Ramp):
    begin: Positive = Field(default=_SHED.standard.begin, description="The same for class standard.")
    full: Positive = Field(default=_SHED.standard.full, description="The same for class standard.")


class ShedBatch(_Ramp):
    begin: Positive = Field(default=_SHED.batch.begin, description="The same for class batch.")
    full: Positive = Field(default=_SHED.batch.full, description="The same for class batch.")


class Shed(Section):
    target_factor: Annotated[float | None, rules.number(0, above=True, words=("never",))] = Field(
        default=_SHED.target_factor,
        description="A request without a deadline that waits, or would, for longer than so many first-token targets of "
        "its tenant goes behind those that still can begin in time, and the ladder answers it by its own wait.",
    )
    late_turn: Count = Field(
        default=_SHED.late_turn,
        description="So many requests of its tenant that are on time overtake a late one at most before one that is late "
        "has its turn.",
    )
    late_quantum_tokens: CountOrZero = Field(
        default=_SHED.late_quantum_tokens,
        description="So many weighted tokens per unit of weight a tenant that has only late requests lets others of its "
        "class go ahead; the fairness bound is wider by twice as much.",
    )
    interactive: ShedInteractive = Field(
        default_factory=ShedInteractive,
        description="Load, in first-token targets of expected wait, between which tenants over their share are turned "
        "away more and more often; the others only beyond it.",
    )
    standard: ShedStandard = Field(default_factory=ShedStandard, description="The same for class standard.")
    batch: ShedBatch = Field(default_factory=ShedBatch, description="The same for class batch.")

    @model_validator(mode="after")
    def _lower_first(self) -> Shed:
        ramps = (self.interactive, self.standard, self.batch)
        for higher, lower in pairwise(ramps):
            if lower.begin > higher.begin or lower.full > higher.full:
                raise refuse("", "a lower class has to be turned away at no higher load than a higher class")
        return self


class Lease(Section):
    ttl_s: Positive = Field(default=_LEASE.ttl_s, description="How long a gateway may admit without the controller.")
    share: Share = Field(
        default=_LEASE.share, description="Part of unused quotas and free places that all gateways hold; 0 = no leases."
    )
    slots_max: Count = Field(
        default=_LEASE.slots_max, description="Places on one replica that one lease gives at most."
    )
    tokens_max: Count = Field(default=_LEASE.tokens_max, description="Tokens of a tenant in one lease at most.")
    requests_max: Count = Field(default=_LEASE.requests_max, description="Requests of a tenant in one lease at most.")
    waiting_max: Count = Field(
        default=_LEASE.waiting_max, description="Requests of one gateway that wait for a place of its lease at most."
    )


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
    order: Annotated[str, rules.one_of("vtc", "dlpm")] = Field(
        default=_CONTROLLER.order,
        description="Order inside a class: least served tenant first, or within a quantum the longest cached prompt beginning.",
    )
    locality_quantum_tokens: Count = Field(
        default=_CONTROLLER.locality_quantum_tokens,
        description="Weighted tokens per unit of weight by which `dlpm` may prefer one tenant to another.",
    )
    locality_imbalance_max: Annotated[float, rules.number(0, 1)] = Field(
        default=_CONTROLLER.locality_imbalance_max,
        description="Difference in load of two replicas that a wholly cached prompt is worth; 0 = placement ignores caches.",
    )
    preempt: Preempt = Field(default_factory=Preempt, description="When running work gives way to other work.")
    shed: Shed = Field(default_factory=Shed, description="Who is turned away when the queue grows.")
    lease: Lease = Field(default_factory=Lease, description="What gateways may admit while the controller is away.")


class Channel(Section):
    heartbeat_ms: Positive = Field(default=_CHANNEL.heartbeat_ms, description="Pause between heartbeats, ms.")
    lost_after_ms: Positive = Field(
        default=_CHANNEL.lost_after_ms, description="Silence after which a peer is lost, ms."
    )
    window_batches: Count = Field(default=_CHANNEL.window_batches, description="Unacknowledged batches per peer.")
    buffer_bytes_max: Count = Field(default=_CHANNEL.buffer_bytes_max, description="Bytes kept for a slow peer.")
