"""Linear layers with 4-bit weights by group and 8-bit activations, one scale for each token, through this project's own CPU
kernels.

Weights come from memory in half the bytes of 8 bits and are unpacked in registers. The sum of each group is exact, and groups
are added up in one order: what a token gets depends on nothing else in its batch.
"""

from __future__ import annotations

import functools
import logging

import torch
import torch.nn.functional as F

from rungway.engine.native_linear import PackedLinear, native_works
from rungway.engine.stored import Int4Weight
from rungway.kernels import layouts
from rungway.kernels.cpu import bindings
from rungway.kernels.cpu.layouts import pack_nibbles, pad_row, padded

_GROUPS = (128, 96, 64, 32)  # what the kernels have
_log = logging.getLogger(__name__)


class NativeInt4Linear(PackedLinear):
    """With weights of 4 bits. Raises RuntimeError for groups that the kernels do not have."""

    __slots__ = ()

    def __init__(
        self, weight: Int4Weight, bias: torch.Tensor | None = None, *, dtype: torch.dtype = torch.float32
    ) -> None:
        outputs, inputs = weight.shape
        group = native_group(weight)
        if group is None:
            raise RuntimeError(f"no 4-bit kernel for groups of {weight.group}")
        parts = weight.group // group
        nibbles = pack_nibbles(
            layouts.unpack_int4(weight.packed),
            weight.scales.repeat_interleave(parts, 1),
            weight.zeros.repeat_interleave(parts, 1),
        )
        offset = None if bias is None else pad_row(bias.float())
        order = None if weight.order is None else weight.order.int().contiguous()
        packed = bindings.Linear(
            weight=nibbles.blocks.data_ptr(),
            scales=nibbles.scales.data_ptr(),
            bias=None if offset is None else offset.data_ptr(),
            kind=bindings.ZEROED if nibbles.zeroed else bindings.MIDDLED,
            outputs=outputs,
            inputs=inputs,
            stride=padded(inputs),
            group=group,
            offsets=nibbles.offsets.data_ptr(),
            order=None if order is None else order.data_ptr(),
        )
        super().__init__(packed, (nibbles, offset, order), dtype)


def native_group(weight: Int4Weight) -> int | None:
    """The kernels' group size for this weight: larger groups are split. None where there is none, or a zero is no whole
    number."""
    if not torch.equal(weight.zeros, weight.zeros.round()):
        return None
    return next((group for group in _GROUPS if weight.group % group == 0), None)


@functools.cache
def native4_works() -> bool:
    """Whether the kernels' products with 4 bits agree with the codes' own, with and without zeros, and keep tokens apart."""
    if not native_works():
        return False
    generator = torch.Generator().manual_seed(1)
    codes = torch.randint(0, 16, (100, 192), generator=generator)
    scales = torch.rand(100, 3, generator=generator).add_(0.5).bfloat16()
    zeros = torch.randint(0, 17, (100, 3), generator=generator).bfloat16()
    x = torch.randn(9, 192, generator=generator)
    x[1] = 0.0
    for middle in (zeros, torch.full_like(zeros, 8.0)):
        weight = Int4Weight(layouts.pack_int4(codes), scales, middle, torch.randperm(192, generator=generator))
        layer = NativeInt4Linear(weight)
        expected = F.linear(x, weight.dense())
        got, alone = layer(x), layer(x[8:])
        close = (got - expected).abs().max() < 0.02 * expected.abs().max()
        if not (close and torch.equal(got[8:], alone) and torch.equal(layer.add(x, got), got + got)):
            _log.warning("own CPU kernels are not used for 4 bits: they disagree with plain products")
            return False
    return True
