"""Cached beginnings of prompts, used without unfairness: what a replica that holds one is worth, and an order of service
that prefers it within a bound.

The order is deficit longest prefix match ("Locality-aware Fair Scheduling in LLM Serving", arXiv 2501.14312) on the
counters of the weighted VTC (`fairness.py`): a band has a `level`, and a tenant whose counter is below it has a deficit
left. Among those the request whose beginning is held longest, by a replica with room, goes first. Only when none of them
has any left the level is raised, to one quantum above the lowest counter. Counters of tenants that wait so lie between
level - Q and level + U / weight, and over any time in which two of them keep waiting

    |W_f / w_f - W_g / w_g| <= 2 (U / min(w_f, w_g) + Q),    U = max(L, 2 M) as in VTC.

Nobody overtakes a request that does not fit beyond that either: its tenant keeps its deficit, so the level stays, and the
others stop when theirs is spent. Inside a tenant the first in line is overtaken at most `PASSES_MAX` times.

Cost of one choice: at most `LOOKS_MAX` entries are asked how warm they are; beyond them the order is VTC's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from rungway.policies.bands import Band, Judge, Verdict
from rungway.policies.flow import Flow, Queued
from rungway.policies.prefixes import Holders, leading

WINDOW = 16  # first entries of a tenant that may be preferred
LOOKS_MAX = 256
PASSES_MAX = 16


class Warmth(NamedTuple):
    """A prompt of `prompt` tokens, of which `found` says who holds the beginning, in keys of `key_tokens` tokens."""

    prompt: int
    key_tokens: int
    found: Holders

    def cached(self, mask: int) -> int:
        """Tokens that the best of these replicas would not have to compute; the last one of a prompt is always computed."""
        return min(leading(self.found, mask) * self.key_tokens, max(0, self.prompt - 1))


class Local(NamedTuple):
    """How to order by locality. `quantum`: weighted tokens per unit of weight, > 0. `warmth`: tokens of an entry's prompt
    that some replica with room holds."""

    quantum: float
    warmth: Callable[[Queued], int]


def walk(band: Band, judge: Judge, local: Local) -> tuple[Queued | None, bool]:
    """As `Band.walk`, in the order of locality. Raises the band's level where all deficits are spent."""
    band.passed.clear()
    band.floor = band.level - local.quantum
    done: set[int] = set()  # orders of flows of which nothing may run now
    while True:
        eligible = _eligible(band, done)
        for flow, entry in _warmest(eligible, local.warmth):
            if flow.order not in done:
                verdict = _ask(band, flow, entry, judge, done)
                if verdict in (Verdict.TAKE, Verdict.STOP):
                    return entry, verdict is Verdict.TAKE
        for flow in eligible:
            for entry in flow.line():
                if flow.order in done:
                    break
                verdict = _ask(band, flow, entry, judge, done)
                if verdict in (Verdict.TAKE, Verdict.STOP):
                    return entry, verdict is Verdict.TAKE
            if flow.order not in done:
                _pass(band, flow, done)
        if not refill(band, local.quantum, done):
            return None, False


def refill(band: Band, quantum: float, done: set[int]) -> bool:
    """All who may run have spent their deficits: raise the level for the next ones. False where nobody is left. Whoever
    was passed at a cap meanwhile falls out of the bound and is lifted into it once somebody is served."""
    for counter, order, _ in band.ready:
        if order not in done:
            band.level = counter + quantum
            band.floor = counter
            return True
    return False


def _eligible(band: Band, done: set[int]) -> list[Flow]:
    """Flows with a deficit left, those furthest behind first."""
    found = []
    for counter, order, flow in band.ready:
        if counter >= band.level:
            break
        if order not in done:
            found.append(flow)
    return found


def _warmest(flows: list[Flow], warmth: Callable[[Queued], int]) -> list[tuple[Flow, Queued]]:
    """Each flow's warmest entry, the warmest of all first; flows without any are left out."""
    if not flows or (len(flows) == 1 and len(flows[0].waiting) == 1):
        return []  # no choice
    ranked: list[tuple[int, int, Flow, Queued]] = []
    looks = LOOKS_MAX
    for place, flow in enumerate(flows):
        window = flow.window(1 if flow.passes >= PASSES_MAX else WINDOW)
        looks -= len(window)
        most, which = 0, None
        for entry in window:
            tokens = warmth(entry)
            if tokens > most:
                most, which = tokens, entry
        if which is not None:
            ranked.append((-most, place, flow, which))
        if looks <= 0:
            break
    ranked.sort(key=lambda item: item[:2])
    return [(flow, entry) for _, _, flow, entry in ranked]


def _ask(band: Band, flow: Flow, entry: Queued, judge: Judge, done: set[int]) -> Verdict:
    verdict = judge(entry)
    if verdict is Verdict.SKIP_TENANT:
        _pass(band, flow, done)
    return verdict


def _pass(band: Band, flow: Flow, done: set[int]) -> None:
    band.passed.append(flow)
    done.add(flow.order)
