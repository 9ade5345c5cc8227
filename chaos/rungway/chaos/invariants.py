"""What must hold after anything that a drill does: bills equal engine truth, downgrades logged equal downgrades given, the
audit chain is whole, nothing stays held. Read over HTTP with an admin key, as an outsider would.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import httpx
import msgspec

from rungway.chaos.load import GAVE_UP, Sample
from rungway.errors import RungwayError

PAGE = 1000
SETTLED_WITHIN_S = 15.0


class InvariantError(RungwayError):
    """The platform did not answer a read that an invariant needs."""


class Verdict(msgspec.Struct, frozen=True):
    """One line of a drill's table. `measured` and `bar` are for people, `ok` for the exit code."""

    what: str
    measured: str
    bar: str
    ok: bool


class Admin:
    """Reads of a running platform with an admin key."""

    def __init__(self, url: str, key: str) -> None:
        self._client = httpx.Client(base_url=url, headers={"Authorization": f"Bearer {key}"}, timeout=30.0)

    def close(self) -> None:
        self._client.close()

    def get(self, path: str, **params: Any) -> Any:
        """The JSON of an admin read. Raises InvariantError for anything but an answer."""
        try:
            answer = self._client.get(path, params=params)
            answer.raise_for_status()
            return answer.json()
        except (httpx.HTTPError, ValueError) as error:
            raise InvariantError(f"{path}: {error}") from None

    def post(self, path: str, **body: Any) -> Any:
        """The JSON of an admin command. Raises InvariantError for anything but an answer."""
        try:
            answer = self._client.post(path, json=body)
            answer.raise_for_status()
            return answer.json()
        except (httpx.HTTPError, ValueError) as error:
            raise InvariantError(f"{path}: {error}") from None

    def audit(self, kind: str, since_wall_ns: int = 0) -> list[dict[str, Any]]:
        """All audit rows of a kind since then, oldest first."""
        rows: list[dict[str, Any]] = []
        after = 0
        while True:
            page = self.get("/admin/audit", kind=kind, after=after, limit=PAGE)["data"]
            rows += [row for row in page if row["wall_ns"] >= since_wall_ns]
            if len(page) < PAGE:
                return rows
            after = page[-1]["seq"]

    def rungs(self) -> dict[tuple[str, str, str], int]:
        """Rung in force by (pool, class, side)."""
        scopes = self.get("/admin/ladder")["scopes"]
        return {(scope["pool"], scope["tenant_class"], scope["side"]): scope["rung"] for scope in scopes}

    def reconcile(self) -> dict[str, Any]:
        found: dict[str, Any] = self.get("/admin/engine-truth", limit=1)["reconcile"]
        return found

    def live(self) -> dict[str, Any]:
        found: dict[str, Any] = self.get("/admin/live")
        return found


def wait_until(condition: Callable[[], bool], limit_s: float, pause_s: float = 0.2) -> bool:
    """Poll until it holds; False when it does not within the limit."""
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() >= deadline:
            return False
        time.sleep(pause_s)
    return True


def held(live: dict[str, Any]) -> dict[str, object]:
    """What a platform at rest must not hold, from one look at it; empty = nothing."""
    found: dict[str, object] = {"flights": live["flights"]}
    for name, tenant in live["tenants"].items():
        found[f"{name} running"] = tenant["running"]
        found[f"{name} waiting"] = tenant["waiting"]
        found[f"{name} held tokens"] = tenant["held_tokens"]
        found[f"{name} in-flight tokens"] = sum(tenant["in_flight_tokens"].values())
        found[f"{name} held money"] = tenant["budget"]["held_usd"]
    for name, pool in live["pools"].items():
        found[f"{name} sequences"] = pool["in_flight"]
        found[f"{name} queue"] = pool["queue_depth"]
    return {name: value for name, value in found.items() if value}


def nothing_held(admin: Admin, within_s: float = SETTLED_WITHIN_S) -> Verdict:
    """Reservations, slots, queue places and flights are all given back."""
    wait_until(lambda: not held(admin.live()), within_s)
    left = held(admin.live())
    text = ", ".join(f"{name} {value}" for name, value in list(left.items())[:5]) or "nothing"
    return Verdict("held at rest (reservations, places, flights)", text, f"nothing within {within_s:.0f} s", not left)


def bills_equal_engines(admin: Admin, within_s: float = SETTLED_WITHIN_S) -> Verdict:
    """Billed plus wasted output tokens == tokens that the engines emitted, request by request; no attempt unbilled."""
    wait_until(lambda: admin.reconcile()["unsettled"] == 0, within_s)
    books = admin.reconcile()
    billed = sum(tenant["billed_output_tokens"] for tenant in books["tenants"].values())
    wasted = sum(tenant["wasted_tokens"] for tenant in books["tenants"].values())
    emitted = sum(tenant["engine_output_tokens"] for tenant in books["tenants"].values())
    text = f"{billed:,} billed + {wasted:,} wasted, {emitted:,} emitted"
    if books["mismatches"] or books["unsettled"]:
        text += f"; {books['mismatches']} requests differ, {books['unsettled']} unsettled"
    ok = bool(books["ok"]) and books["unsettled"] == 0 and billed + wasted == emitted
    return Verdict("bills == engine truth (output tokens)", text, "equal, request by request", ok)


def chain_holds(admin: Admin) -> Verdict:
    result = admin.get("/admin/audit/verify")
    text = f"{result['rows']:,} rows: {'whole' if result['ok'] else result['message']}"
    return Verdict("audit hash chain", text, "whole", bool(result["ok"]))


def downgrades_match(samples: Sequence[Sample], logged: Sequence[dict[str, Any]]) -> Verdict:
    """The set of requests in the audit == the set of requests whose clients were told of a downgrade."""
    seen = {sample.request_id for sample in samples if sample.status == 200 and sample.degraded != "none"}
    written = {row["request_id"] for row in logged}
    text = f"{len(written)} logged, {len(seen)} seen"
    if seen != written:
        text += f"; {len(written - seen)} only logged, {len(seen - written)} only seen"
    return Verdict("downgrades logged == degraded answers seen", text, "the same requests", seen == written)


def downgrades_first(samples: Sequence[Sample], logged: Sequence[dict[str, Any]]) -> Verdict:
    """Each downgrade was written before the first byte of its answer: by the row's time, and, where the client could look
    into the ledger, by a read of the committed row at that moment."""
    written = {row["request_id"]: row["wall_ns"] for row in logged}
    degraded = [sample for sample in samples if sample.status == 200 and sample.degraded != "none"]
    never_ns = 1 << 62
    late = [one for one in degraded if written.get(one.request_id, never_ns) >= one.first_wall_ns]
    looked = [one for one in degraded if one.committed is not None]
    absent = [one for one in looked if not one.committed]
    text = (
        f"{len(degraded) - len(late)} of {len(degraded)} older; {len(looked) - len(absent)} of {len(looked)} read back"
    )
    return Verdict("audit row before the first byte", text, "all", not late and not absent)


def one_row_each(admin: Admin, samples: Sequence[Sample], tenants: Sequence[str], since_s: int) -> Verdict:
    """As many ledger rows as requests (each try of a client is one), and as many billed tokens as the clients were told. An
    answer that was cut told no count, so with such ones the bill may only be larger."""
    usage = admin.get("/admin/usage", since=since_s)["tenants"]
    rows = sum(usage.get(name, {}).get("requests", 0) for name in tenants)
    tokens = sum(usage.get(name, {}).get("output_tokens", 0) for name in tenants)
    told = sum(sample.tokens for sample in samples)
    cut = sum(sample.tries - 1 for sample in samples) + sum(
        sample.status in (0, 200) and not sample.done for sample in samples
    )
    sent = sum(sample.tries for sample in samples if sample.status or sample.code == GAVE_UP)
    text = f"{rows:,} rows for {sent:,} requests; {tokens:,} tokens billed, {told:,} delivered whole"
    ok = rows == sent and (told <= tokens if cut else told == tokens)
    bar = "equal" if not cut else "equal rows; billed >= delivered whole (some answers were cut)"
    return Verdict("ledger rows == requests, billed == delivered", text, bar, ok)
