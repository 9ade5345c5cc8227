"""Who is served next: bands by class with minimum shares, weighted VTC over tenants, deadlines inside a tenant.

Inside a band this is the Virtual Token Counter (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024),
weighted: every token a tenant is served adds price / weight to its counter, input at dispatch and output as it streams;
the smallest counter is next; a tenant that comes back from idle is lifted to the others' level, so idleness earns no
credit. Two tenants that both keep waiting then differ by at most 2U in W / weight, U = max(input_max, 2 x tokens in
flight). The bound needs that nobody overtakes a request that does not fit: see `Verdict.STOP`.

Between bands the higher class goes first, except that a band which has been given less than its minimum share while it
waited goes before it. What a band takes beyond its share while nobody claims it is lent, never held against it.

Cost per operation: O(log n) plus a memory move over the tenants that wait in the band; `select` calls the judge once per
entry that it has to pass. The number of entries is bounded by the caller (queue_max per tenant). With `Local`, the order
inside a band is that of `locality.py`, which prefers cached beginnings and widens the bound by a quantum.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rungway.contracts import CLASS_ORDER
from rungway.overload import LATE_QUANTUM, LATE_TURN
from rungway.policies import locality
from rungway.policies.bands import Band, Judge, Verdict
from rungway.policies.flow import Flow, Queued
from rungway.policies.locality import Local

__all__ = ["FairQueue", "Judge", "Queued", "Verdict"]


class FairQueue:
    """The waiting requests of one pool. `shares`: minimum share per class name, 0 to 1; scaled down if they exceed 1.
    `turn`: a late request is overtaken by at most so many of its tenant before one that is late has its turn; `yields`: a
    tenant that has only late ones falls behind others of its class by at most so much service / weight for their sake."""

    __slots__ = ("_bands", "_index", "_orders", "_seq", "_turn", "_unit", "_weights")

    def __init__(self, shares: Mapping[str, float], turn: int = LATE_TURN, yields: float = LATE_QUANTUM) -> None:
        self._turn = turn
        self._bands = [Band(0.0) for _ in CLASS_ORDER]
        self._index: dict[str, Queued] = {}
        self._weights: dict[str, float] = {}
        self._orders = 0
        self._seq = 0
        self._unit = 0.0  # largest request seen since the queue was last empty: how far an account may run
        self.set_shares(shares)
        self.set_late(turn, yields)

    def set_late(self, turn: int, yields: float) -> None:
        """Take other bounds on what those who are on time may take from those who are late, after a reload."""
        self._turn = turn
        for band in self._bands:
            band.yields = yields
            for flow in band.flows.values():
                flow.turn = turn

    def set_shares(self, shares: Mapping[str, float]) -> None:
        """Take new minimum shares after a reload."""
        total = max(1.0, sum(shares.values()))
        for band, name in zip(self._bands, CLASS_ORDER, strict=True):
            band.share = shares.get(name, 0.0) / total

    def set_weight(self, tenant: str, weight: float) -> None:
        """Make a tenant known, or change its weight for all charges from now on."""
        assert weight > 0
        self._weights[tenant] = weight
        for band in self._bands:
            if (flow := band.flows.get(tenant)) is not None:
                if flow.waiting:
                    band.weight += weight - flow.weight
                flow.weight = weight

    def push(self, entry: Queued) -> None:
        """Add a request; its weight becomes its tenant's weight."""
        assert entry.request_id not in self._index, f"{entry.request_id} is queued already"
        if self._weights.get(entry.tenant) != entry.weight:
            self.set_weight(entry.tenant, entry.weight)
        band = self._bands[entry.band]
        flow = self._flow(band, entry.tenant, entry.weight)
        if not flow.waiting:
            band.enter(flow)
        entry.seq = self._seq
        self._seq += 1
        flow.add(entry)
        band.depth += 1
        band.late += entry.late
        self._index[entry.request_id] = entry
        self._unit = max(self._unit, band.weigh(entry.cost, self._bands))

    def relegate(self, entry: Queued) -> None:
        """A waiting request can no longer begin in time: it goes behind those of its tenant that can, and a tenant that has
        only late ones behind those of its class who have others, by `yields` at most: so much wider is the fairness bound."""
        band = self._bands[entry.band]
        flow = band.flows[entry.tenant]
        flow.drop(entry)
        entry.relegate()
        flow.add(entry)
        band.late += 1

    def newest_late(self, tenant: str) -> Queued | None:
        """The late request of a tenant that came last, or None: where the tenant's line is too long, it leaves."""
        lasts = [flow.waiting[-1][2] for b in self._bands if (flow := b.flows.get(tenant)) is not None and flow.waiting]
        return max((entry for entry in lasts if entry.late), key=lambda entry: entry.enqueued_ns, default=None)

    def remove(self, request_id: str) -> Queued | None:
        """Take a request out without serving it (client gone, deadline passed); None if it does not wait here."""
        entry = self._index.get(request_id)
        if entry is not None:
            self._detach(entry)
        return entry

    def select(self, judge: Judge, local: Local | None = None) -> Queued | None:
        """Remove, charge and return the next request that the judge takes, or None. The judge must not change the
        queue; it may say what part of an entry's cost is `cached`. `local`: order by locality inside a band.

        First the bands that are owed service, then all in class order. A STOP keeps its own and all lower bands from
        the place, except those that are owed service themselves; a band that is owed a whole such request keeps
        everybody from it, or small requests of others would eat every gap before a big one fits.
        """
        barrier = len(self._bands)
        claimants = [band for band in self._bands if band.owed > 0.0 and band.depth]
        for band in claimants:
            entry, taken = _walk(band, judge, local)
            if taken and entry is not None:
                return self._take(band, entry)
            if entry is not None:
                if band.owed >= band.weigh(entry.cost, self._bands):
                    return None
                barrier = min(barrier, entry.band)
        for band in self._bands[:barrier]:
            if band.depth and band not in claimants:
                entry, taken = _walk(band, judge, local)
                if taken and entry is not None:
                    return self._take(band, entry)
                if entry is not None:
                    return None
        return None

    def charge(self, tenant: str, band: int, weighted_tokens: float) -> None:
        """Add service of a running request (output x 2 as it streams; corrections may be negative). Ignored for a
        tenant that is not known here (never pushed nor given a weight, or forgotten)."""
        weight = self._weights.get(tenant)
        if weight is None:
            return
        its_band = self._bands[band]
        flow = its_band.flows.get(tenant) or self._flow(its_band, tenant, weight)
        if flow.waiting:
            its_band.charge(flow, weighted_tokens)
        else:  # no order to keep, and most charges are such: each running answer's at each report
            flow.counter += weighted_tokens / flow.weight
        its_band.charged += weighted_tokens

    def counter(self, tenant: str, band: int) -> float:
        """Service / weight so far, lifts included, above a level that all of a band share; 0.0 for an unknown tenant."""
        flow = self._bands[band].flows.get(tenant)
        return 0.0 if flow is None else flow.counter

    def depth(self, tenant: str | None = None, band: int | None = None) -> int:
        """Waiting requests: all, of a tenant, of a band, or of a tenant in a band."""
        if tenant is None:
            return len(self._index) if band is None else self._bands[band].depth
        bands = self._bands if band is None else (self._bands[band],)
        return sum(len(flow.waiting) for each in bands if (flow := each.flows.get(tenant)) is not None)

    def rival_weight(self, tenant: str, band: int) -> float:
        """Weight of the other tenants that wait in a band."""
        its_band = self._bands[band]
        flow = its_band.flows.get(tenant)
        return its_band.weight - (flow.weight if flow is not None and flow.waiting else 0.0)

    def claimed_below(self, band: int) -> float:
        """Share of dispatch that lower bands which wait may claim from this one."""
        return sum(lower.share for lower in self._bands[band + 1 :] if lower.depth)

    def entries(self) -> Iterator[Queued]:
        """All waiting requests, by arrival. The queue must not change meanwhile: copy first."""
        return iter(self._index.values())

    def forget(self, tenant: str) -> list[Queued]:
        """Drop a tenant that left the configuration, with its counters; returns what it still had waiting."""
        gone: list[Queued] = []
        for band in self._bands:
            if (flow := band.flows.get(tenant)) is not None:
                gone += [entry for _, _, entry in flow.waiting]
        for entry in gone:
            self._detach(entry)
        for band in self._bands:
            band.flows.pop(tenant, None)
        self._weights.pop(tenant, None)
        return gone

    def _flow(self, band: Band, tenant: str, weight: float) -> Flow:
        flow = band.flows.get(tenant)
        if flow is None:
            flow = band.flows[tenant] = Flow(tenant, weight, self._orders, self._turn)
            self._orders += 1
        return flow

    def _detach(self, entry: Queued) -> None:
        band = self._bands[entry.band]
        flow = band.flows[entry.tenant]
        flow.drop(entry)
        if not flow.waiting:
            band.leave(flow)
        band.depth -= 1
        band.late -= entry.late
        del self._index[entry.request_id]
        if not self._index:
            self._unit = 0.0

    def _take(self, band: Band, entry: Queued) -> Queued:
        self._account(band, band.weigh(entry.charge, self._bands))
        band.remember(entry.charge)
        flow = band.flows[entry.tenant]
        flow.served(entry)
        band.overtake(flow)
        self._detach(entry)
        band.charge(flow, entry.charge)
        return entry

    def _account(self, served: Band, cost: float) -> None:
        """Credit every waiting band with its share of `cost` and debit the served one.

        A band that waits cannot be owed more than two largest requests (which it reaches only when it cannot run), and
        an idle one is never owed anything; but what it overdrew is paid off while it is idle, too. A band served in
        class order, not by its claim, used what nobody claimed: no debit.
        """
        limit = 2.0 * max(self._unit, cost)
        for band in self._bands:
            if band is served:
                if band.owed > 0.0:
                    band.owed += (band.share - 1.0) * cost
            elif band.depth:
                band.owed = min(limit, band.owed + band.share * cost)
            else:
                band.owed = min(0.0, band.owed + band.share * cost)


def _walk(band: Band, judge: Judge, local: Local | None) -> tuple[Queued | None, bool]:
    band.rebase()
    return band.walk(judge) if local is None else locality.walk(band, judge, local)
