"""Closed enums: how a request can end and why it can be refused. Made for metric labels; translated to HTTP once.

`Outcome` is the terminal state of a ledger row. `Code` is the machine-readable `error.code` of an answer; its row in
`CODES` carries the HTTP status, the OpenAI error type and whose limit it was.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class Outcome(StrEnum):
    """Every terminal path of a request ends in exactly one of these."""

    COMPLETED = "completed"
    LENGTH = "length"
    CLIENT_CANCELLED = "client_cancelled"
    TIMEOUT = "timeout"
    DEADLINE = "deadline"
    REFUSED = "refused"
    REPLICA_LOST = "replica_lost"
    GATEWAY_LOST = "gateway_lost"
    EVICTED = "evicted"
    CACHE_HIT = "cache_hit"
    TEMPLATE = "template"
    SHADOW = "shadow"
    ERROR = "error"


class Code(StrEnum):
    """Values of `error.code`. The contract with clients: names are added, never changed."""

    INVALID_API_KEY = "invalid_api_key"
    KEY_EXPIRED = "key_expired"
    KEY_REVOKED = "key_revoked"
    MODEL_NOT_ALLOWED = "model_not_allowed"
    SCOPE_MISSING = "scope_missing"
    MODEL_NOT_FOUND = "model_not_found"
    NOT_FOUND = "not_found"
    INVALID_REQUEST = "invalid_request"
    CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
    INVALID_SCHEMA = "invalid_schema"
    IDEMPOTENCY_IN_PROGRESS = "idempotency_in_progress"
    BODY_TOO_LARGE = "body_too_large"
    UNSUPPORTED_MEDIA_TYPE = "unsupported_media_type"
    METHOD_NOT_ALLOWED = "method_not_allowed"
    IDEMPOTENCY_MISMATCH = "idempotency_mismatch"
    REQUESTS_PER_MINUTE = "requests_per_minute"
    TOKENS_PER_MINUTE = "tokens_per_minute"
    CONCURRENT_REQUESTS = "concurrent_requests"
    QUEUE_FULL = "queue_full"
    BUDGET_EXHAUSTED = "budget_exhausted"
    TENANT_SUSPENDED = "tenant_suspended"
    OVERLOADED = "overloaded"
    DEADLINE_UNREACHABLE = "deadline_unreachable"
    DEFERRED = "deferred"
    NO_CAPACITY = "no_capacity"
    STARTING = "starting"
    TIMEOUT = "timeout"
    REPLICA_LOST = "replica_lost"
    EVICTED = "evicted"
    CANCELLED = "cancelled"
    INTERNAL = "internal"


class CodeInfo(NamedTuple):
    """HTTP status, OpenAI `error.type`, and whose limit a refusal is (`tenant`, `platform` or `caller`)."""

    status: int
    type: str
    whose: str


_BAD = "invalid_request_error"
_LIMIT = "rate_limit_error"
_OURS = "server_error"

CODES: dict[Code, CodeInfo] = {
    Code.INVALID_API_KEY: CodeInfo(401, "authentication_error", "caller"),
    Code.KEY_EXPIRED: CodeInfo(401, "authentication_error", "caller"),
    Code.KEY_REVOKED: CodeInfo(401, "authentication_error", "caller"),
    Code.MODEL_NOT_ALLOWED: CodeInfo(403, "permission_error", "caller"),
    Code.SCOPE_MISSING: CodeInfo(403, "permission_error", "caller"),
    Code.MODEL_NOT_FOUND: CodeInfo(404, _BAD, "caller"),
    Code.NOT_FOUND: CodeInfo(404, _BAD, "caller"),
    Code.INVALID_REQUEST: CodeInfo(400, _BAD, "caller"),
    Code.CONTEXT_LENGTH_EXCEEDED: CodeInfo(400, _BAD, "caller"),
    Code.INVALID_SCHEMA: CodeInfo(400, _BAD, "caller"),
    Code.IDEMPOTENCY_IN_PROGRESS: CodeInfo(409, _BAD, "caller"),
    Code.BODY_TOO_LARGE: CodeInfo(413, _BAD, "caller"),
    Code.UNSUPPORTED_MEDIA_TYPE: CodeInfo(415, _BAD, "caller"),
    Code.METHOD_NOT_ALLOWED: CodeInfo(405, _BAD, "caller"),
    Code.IDEMPOTENCY_MISMATCH: CodeInfo(422, _BAD, "caller"),
    Code.REQUESTS_PER_MINUTE: CodeInfo(429, _LIMIT, "tenant"),
    Code.TOKENS_PER_MINUTE: CodeInfo(429, _LIMIT, "tenant"),
    Code.CONCURRENT_REQUESTS: CodeInfo(429, _LIMIT, "tenant"),
    Code.QUEUE_FULL: CodeInfo(429, _LIMIT, "tenant"),
    Code.BUDGET_EXHAUSTED: CodeInfo(429, "insufficient_quota", "tenant"),
    Code.TENANT_SUSPENDED: CodeInfo(429, "insufficient_quota", "tenant"),
    Code.OVERLOADED: CodeInfo(503, _OURS, "platform"),
    Code.DEADLINE_UNREACHABLE: CodeInfo(503, _OURS, "platform"),
    Code.DEFERRED: CodeInfo(503, _OURS, "platform"),
    Code.NO_CAPACITY: CodeInfo(503, _OURS, "platform"),
    Code.STARTING: CodeInfo(503, _OURS, "platform"),
    Code.TIMEOUT: CodeInfo(504, _OURS, "platform"),
    Code.REPLICA_LOST: CodeInfo(502, _OURS, "platform"),
    Code.EVICTED: CodeInfo(503, _OURS, "platform"),
    Code.CANCELLED: CodeInfo(499, _OURS, "caller"),
    Code.INTERNAL: CodeInfo(500, _OURS, "platform"),
}
