"""The arguments of a query, as a URL's text or a body's JSON says them. Pure. Each raises RequestError that names a bad one."""

from __future__ import annotations

from typing import Any

from rungway.clock import NS_PER_S, wall_ns
from rungway.errors import RequestError
from rungway.outcomes import Code

Args = dict[str, Any]
DAY_NS = 86_400 * NS_PER_S
SECONDS_MAX = ((1 << 63) - 1) // NS_PER_S
"""Beyond it a time in nanoseconds is no number of the ledger's any more."""


def number(args: Args, name: str, default: int, low: int, high: int) -> int:
    """A whole number from `low` to `high`; absent or empty = `default`."""
    value = args.get(name)
    if value is None or value == "":
        return default
    try:
        if isinstance(value, (bool, float)):
            raise TypeError
        found = int(value)
    except (TypeError, ValueError):
        raise RequestError(Code.INVALID_REQUEST, f"{name} must be a whole number.", param=name) from None
    if not low <= found <= high:
        raise RequestError(Code.INVALID_REQUEST, f"{name} must be between {low} and {high}.", param=name)
    return found


def text(args: Args, name: str) -> str | None:
    """A text; absent or empty = None."""
    value = args.get(name)
    if value is not None and not isinstance(value, str):
        raise RequestError(Code.INVALID_REQUEST, f"{name} must be a text.", param=name)
    return value or None


def span(args: Args) -> tuple[int, int]:
    """since/until in seconds since the epoch, as nanoseconds; default the last day."""
    until = number(args, "until", wall_ns() // NS_PER_S + 1, 0, SECONDS_MAX) * NS_PER_S
    since = number(args, "since", (until - DAY_NS) // NS_PER_S, 0, SECONDS_MAX) * NS_PER_S
    return since, until
