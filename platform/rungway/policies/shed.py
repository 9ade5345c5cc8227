"""Who is turned away between full and over-full: some at first, more as the queue grows, the lowest class first.

Turning away everybody at one threshold makes load and answers swing between nothing and too much. So each request gets a
number from its id (the same in every replay and on every try) and is turned away where that is below the probability.
"""

from __future__ import annotations

from zlib import crc32

from rungway.contracts import TenantClass
from rungway.overload import Ramp, ShedSpec

RETRY_AFTER_MAX_S = 60


def ramp_of(spec: ShedSpec, tenant_class: TenantClass) -> Ramp:
    return {
        TenantClass.INTERACTIVE: spec.interactive,
        TenantClass.STANDARD: spec.standard,
        TenantClass.BATCH: spec.batch,
    }[tenant_class]


def probability(load: float, ramp: Ramp, *, over: bool) -> float:
    """0 to 1 at `load` = expected wait / first-token target. `over`: the tenant takes more than its share; one that does not
    is turned away only where such a one surely is, over another stretch of the same length."""
    begin = ramp.begin if over else ramp.full
    return min(1.0, max(0.0, (load - begin) / (ramp.full - ramp.begin)))


def draw(request_id: str) -> float:
    """0 to 1 (exclusive), evenly over ids, always the same for one id."""
    return crc32(b"shed:" + request_id.encode()) / 2**32


def spread_s(retry_after_s: int, request_id: str) -> int:
    """A Retry-After that is never too short and up to twice as long, so that clients who were turned away together do not
    come back together. 1 to 60 seconds."""
    longer = int((retry_after_s + 1) * draw(request_id[::-1]))
    return max(1, min(RETRY_AFTER_MAX_S, retry_after_s + longer))
