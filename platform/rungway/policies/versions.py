"""Which version of a tier serves a request."""

from __future__ import annotations

from collections.abc import Sequence

from rungway.contracts import Version


def pick_version(versions: Sequence[Version], key: int) -> Version:
    """Weighted choice by a stable key, so that a session keeps its version and every caller agrees. At least one version
    has weight."""
    weighted = [version for version in versions if version.weight > 0]
    point = (key % 10_000) / 10_000 * sum(version.weight for version in weighted)
    for version in weighted:
        point -= version.weight
        if point < 0:
            return version
    return weighted[-1]
