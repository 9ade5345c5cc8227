"""Blocks by share (tenant) against soft quotas. Pure counting.

A share's quota is a part of the pool for each unit of its weight. Nobody is refused for it: while blocks are free a share
may hold any number. Only when blocks run short, those over their quotas give up cached blocks first, and are preempted
first within their band.
"""

from __future__ import annotations

from collections.abc import Container


class Quotas:
    """Counts blocks that a share holds or that are cached for it, shared ones once."""

    def __init__(self, total: int, part: float) -> None:
        assert total > 0 and part > 0
        self._unit = total * part
        self._used: dict[str, int] = {}
        self._weights: dict[str, float] = {}  # of shares that have blocks
        self._over: dict[str, None] = {}

    def grow(self, share: str, weight: float, blocks: int) -> None:
        self._used[share] = used = self._used.get(share, 0) + blocks
        self._weights[share] = weight
        if used > self._unit * weight:
            self._over[share] = None
        else:
            self._over.pop(share, None)  # its weight may have changed

    def shrink(self, share: str) -> None:
        """One block fewer."""
        self._used[share] -= 1
        used = self._used[share]
        if used <= self._unit * self._weights[share]:
            self._over.pop(share, None)
        if not used:
            del self._used[share], self._weights[share]

    def used(self, share: str) -> int:
        return self._used.get(share, 0)

    def over(self, share: str) -> bool:
        return share in self._over

    def furthest(self, among: Container[str]) -> str | None:
        """Of the shares `among` the one that is furthest over its quota; None where none is."""
        found = [share for share in self._over if share in among]
        return max(found, key=lambda share: self._used[share] / self._weights[share], default=None)

    def problems(self, owned: dict[str, int]) -> list[str]:
        """What is wrong, given everyone's blocks counted anew."""
        wrong = []
        if owned != self._used or owned.keys() != self._weights.keys():
            wrong.append("blocks by share are miscounted")
        if set(self._over) != {
            share for share, used in owned.items() if used > self._unit * self._weights.get(share, 0.0)
        }:
            wrong.append("the list of shares over their quota is wrong")
        return wrong
