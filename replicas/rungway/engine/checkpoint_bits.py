"""Small codes in 32-bit words, as quantised checkpoints pack them, and what their readers share."""

from __future__ import annotations

from typing import Any

import torch

from rungway.engine.errors import ModelError
from rungway.engine.stored import Int4Weight
from rungway.kernels import layouts


def unpacked(words: torch.Tensor, bits: int) -> torch.Tensor:
    """int32 [rows, n] -> uint8 [rows, n * 32 / bits]: of each word the lowest bits first."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    codes = (words[:, :, None] >> shifts) & ((1 << bits) - 1)
    return codes.to(torch.uint8).view(words.shape[0], -1)


def int4_weight(
    codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, order: torch.Tensor | None = None
) -> Int4Weight:
    """Of codes [out, in], scales and zeros [out, groups] in any types."""
    return Int4Weight(layouts.pack_int4(codes), scales.contiguous(), zeros.to(scales.dtype).contiguous(), order)


def dense(codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, order: torch.Tensor | None) -> torch.Tensor:
    """(code - zero) * scale in float32, [out, in], with columns in the order of the inputs."""
    rows, groups = scales.shape
    spread = codes.float().view(rows, groups, -1)
    columns = spread.sub_(zeros.float()[:, :, None]).mul_(scales.float()[:, :, None]).view(rows, -1)
    if order is None:
        return columns
    weight = torch.empty_like(columns)
    weight[:, order] = columns
    return weight


def sorted_inputs(groups: torch.Tensor | None, count: int, module: str) -> torch.Tensor | None:
    """From the group of each input to the order that puts groups side by side; None = they already are. Raises ModelError
    where the `count` groups are not of one size."""
    if groups is None:
        return None
    size = len(groups) // count
    plain = torch.arange(len(groups)) // size
    if torch.equal(groups.long(), plain):
        return None
    order = torch.argsort(groups, stable=True)
    if not torch.equal(groups[order].long(), plain):
        raise ModelError(f"the groups of {module} differ in size, which is not supported")
    return order


def require(config: dict[str, Any], what: str, key: str, supported: tuple[object, ...], default: object) -> Any:
    """A value of quantization_config, one of `supported`. Raises ModelError that names what is not."""
    value = config.get(key, default)
    if value not in supported:
        have = ", ".join(map(str, supported))
        raise ModelError(f"{what} weights with {key} {value!r} are not supported (have: {have})")
    return value
