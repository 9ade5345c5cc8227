"""A tenant's own limits: what it may ask for at all, and what an offer takes of its tokens and money."""

from __future__ import annotations

import math

from rungway.control.cell import Now
from rungway.control.flight import Flight
from rungway.control.tenant_state import TenantState
from rungway.outcomes import Code
from rungway.types import Offer


class Denied(Exception):
    """Control flow of admission: the Ask is refused with this code."""

    def __init__(self, code: Code, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.retry_after_s = None if retry_after_s is None else max(1, math.ceil(retry_after_s))


def tenant_limits(flight: Flight, now: Now) -> None:
    """Limits that hold whatever the offer: suspension, request rate, concurrency, breaker."""
    state = flight.state
    quotas = state.contract.quotas
    if state.contract.suspended:
        raise Denied(Code.TENANT_SUSPENDED, "This tenant is suspended.")
    if not state.breaker.allows(now.mono_ns):
        raise Denied(
            Code.TENANT_SUSPENDED,
            "Too many of this tenant's requests failed in a row; it is paused for a moment.",
            state.breaker.retry_s(now.mono_ns),
        )
    flight.probes = state.breaker.probing
    if not state.requests.fits(1, now.mono_ns):
        wait_s = state.requests.wait_s(1, now.mono_ns)
        raise Denied(
            Code.REQUESTS_PER_MINUTE,
            f"Limit of {quotas.requests_per_minute} requests per minute is reached.",
            None if math.isinf(wait_s) else wait_s,
        )
    if state.at_concurrency():
        limit = quotas.concurrent_requests
        retry_s = state.concurrency_retry_s() if limit else None
        raise Denied(Code.CONCURRENT_REQUESTS, f"{limit} requests are running at once, which is your limit.", retry_s)


def check_tokens(state: TenantState, offer: Offer, need: int, now: Now) -> None:
    if state.tokens.fits(need, now.mono_ns):
        return
    limit = state.contract.quotas.tokens_per_minute
    if limit and offer.prompt_tokens > limit:
        raise Denied(
            Code.CONTEXT_LENGTH_EXCEEDED,
            f"The prompt has {offer.prompt_tokens} tokens, more than your {limit} tokens per minute can ever admit.",
        )
    wait_s = state.tokens.wait_s(need, now.mono_ns)
    raise Denied(
        Code.TOKENS_PER_MINUTE,
        f"This request needs {need} tokens; your limit is {limit} tokens per minute.",
        None if math.isinf(wait_s) else wait_s,
    )


def can_hold(flight: Flight, offer: Offer, need: int, now: Now) -> bool:
    """Whether its tenant can pay for another offer what that takes beyond the present one."""
    state, more = flight.state, need - flight.held_tokens
    if more > 0 and not state.tokens.fits(more, now.mono_ns):
        return False
    return state.budget.fits(offer.price_nusd - flight.held_nusd, now.wall_ns)
