"""Which version of a tier serves a request."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from rungway.contracts import Version

_POINTS = 10_000


def pick_version(versions: Sequence[Version], key: int, served: Collection[str]) -> Version:
    """Weighted choice by a stable key, so that a session keeps its version and every caller agrees. At least one version
    has weight. Where the choice is none of `served`, the names of those that have replicas, the others take its part: a
    version that is lost, or not there yet, keeps nobody waiting."""
    weighted = [version for version in versions if version.weight > 0]
    chosen = _at(weighted, key)
    if chosen.name in served:
        return chosen
    able = [version for version in weighted if version.name in served]
    return _at(able, key // _POINTS) if able else chosen


def _at(weighted: Sequence[Version], key: int) -> Version:
    point = (key % _POINTS) / _POINTS * sum(version.weight for version in weighted)
    for version in weighted:
        point -= version.weight
        if point < 0:
            return version
    return weighted[-1]
