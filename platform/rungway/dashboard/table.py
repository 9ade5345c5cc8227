"""The cost table as CSV, safe to open in a spreadsheet."""

from __future__ import annotations

import csv
import io
from typing import Any

COLUMNS = (
    "tenant",
    "requests",
    "refused",
    "downgraded",
    "input_tokens",
    "cached_tokens",
    "output_tokens",
    "wasted_tokens",
    "cost_usd",
    "budget_per",
    "budget_used_usd",
    "budget_held_usd",
    "budget_limit_usd",
    "from_utc",
    "to_utc",
)
_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n")


def cell(value: object) -> str:
    """One cell. Text that a spreadsheet could take for a formula gets an apostrophe in front (OWASP, CSV injection)."""
    if value is None:
        return ""
    if isinstance(value, int | float):
        return str(value)
    text = str(value)
    return "'" + text if text.lstrip(" ").startswith(_FORMULA) else text


def money(nusd: int) -> str:
    """Nano-dollars as dollars with all their digits: sums in a spreadsheet must come out exact."""
    return f"{nusd // 1_000_000_000}.{nusd % 1_000_000_000:09d}"


def usage_csv(usage: dict[str, Any], tenants: dict[str, Any], since: str, until: str) -> bytes:
    """One line per tenant that used something or has a budget; money in dollars, times in UTC."""
    out = io.StringIO()
    writer = csv.writer(out)
    writer.writerow(COLUMNS)
    used = usage["tenants"]
    for name in sorted({*used, *tenants}):
        totals, terms = used.get(name, {}), tenants.get(name, {})
        budget = terms.get("budget", {})
        limit = budget.get("limit_usd")
        values = [
            name,
            totals.get("requests", 0),
            usage.get("refused", {}).get(name, 0),
            usage.get("degraded", {}).get(name, 0),
            *(totals.get(kind, 0) for kind in ("input_tokens", "cached_tokens", "output_tokens", "wasted_tokens")),
            money(totals.get("cost_nusd", 0)),
            budget.get("per", ""),
            budget.get("spent_usd", ""),
            budget.get("held_usd", ""),
            "unlimited" if budget and limit is None else limit,
            since,
            until,
        ]
        writer.writerow([cell(value) for value in values])
    return out.getvalue().encode()
