"""What an operator may set about an engine's scheduling."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Rules:
    """`prefix_keys_max`: prefix blocks whose keys are told to the controller, 0 = none."""

    prefix_keys_max: int = 4096


DEFAULT_RULES = Rules()
