"""Tiles that were measured on a device come before those that were reasoned out.

tiles.json: kernel -> key -> the fields of that kernel's Config. A key is what the choice may depend on, as numbers with commas:
the architecture first, never the batch. `gpu_check --search --tiles FILE` measures some neighbours of the tiles in use and
writes such a table; it becomes the one in use by taking the place of tiles.json. Nothing is tuned at run time, so the same
weights give the same bits on each start.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Table = dict[str, dict[str, list[int]]]
Change = dict[str, int]  # fields of a Config that are others


@functools.cache
def table() -> Table:
    """The one in use."""
    found: Table = json.loads((Path(__file__).parent / "tiles.json").read_text())
    return found


def key_of(key: tuple[int, ...]) -> str:
    return ",".join(map(str, key))


def chosen(kernel: str, key: tuple[int, ...]) -> list[int] | None:
    """The measured fields, or None."""
    return table().get(kernel, {}).get(key_of(key))


def changes(base: Any, neighbours: Mapping[str, tuple[int, ...]]) -> list[Change]:
    """None first, then each field of `base` (a Config) at each other value of `neighbours`."""
    return [
        {},
        *({name: value} for name, values in neighbours.items() for value in values if getattr(base, name) != value),
    ]


def merged(old: Table, measured: Table) -> Table:
    """`old` with what was measured in its place."""
    return {name: old.get(name, {}) | measured.get(name, {}) for name in sorted(old.keys() | measured.keys())}
