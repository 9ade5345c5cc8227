"""Linear layers through this project's own CPU kernels, with 8-bit or bfloat16 weights packed once.

8 bits: one scale for each output row and one for each token, as in int8.py; sums are exact, so that what a token gets
depends on nothing else in its batch. bfloat16: each sum runs over the inputs in one order, with the same effect. 4 bits:
native_int4.py.
"""

from __future__ import annotations

import ctypes
import functools
import logging

import torch
import torch.nn.functional as F

from rungway.kernels.cpu import bindings, layouts
from rungway.kernels.cpu.build import BuildError

_PEAK = 127.0
_log = logging.getLogger(__name__)


class PackedLinear:
    """y = x W^T + b, optionally + residual. `x`: [tokens, in] of any float type; result [tokens, out] in float32, or in
    `dtype` where no residual is added."""

    __slots__ = ("_dtype", "_kept", "_library", "packed")

    def __init__(self, packed: bindings.Linear, kept: tuple[object, ...], dtype: torch.dtype) -> None:
        """`kept`: what owns the memory that `packed` points to. Raises BuildError where the kernels are not to be had."""
        self._library = bindings.library()
        self._dtype = dtype
        self._kept = kept
        self.packed = packed

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._run(x, torch.empty(x.shape[0], self.packed.outputs), add=False).to(self._dtype)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """y + residual."""
        return self._run(x, residual.float().clone(memory_format=torch.contiguous_format), add=True)

    def _run(self, x: torch.Tensor, y: torch.Tensor, *, add: bool) -> torch.Tensor:
        x = x.float().contiguous()
        failed = self._library.rw_linear(
            ctypes.byref(self.packed), x.data_ptr(), x.shape[0], y.data_ptr(), add, torch.get_num_threads()
        )
        if failed:
            raise RuntimeError("no memory for the rows of a step")
        return y


class NativeLinear(PackedLinear):
    """With weights of 8 bits, or bfloat16."""

    __slots__ = ()

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        dtype: torch.dtype = torch.float32,
        eight_bits: bool = True,
    ) -> None:
        """Raises BuildError where the kernels are not to be had."""
        outputs, inputs = weight.shape
        scales = None
        if eight_bits:
            whole = weight.float()
            by = whole.abs().amax(1, keepdim=True).clamp_min_(1e-12) / _PEAK
            codes, scales = layouts.pack_codes((whole / by).round_().to(torch.int8)), layouts.pad_row(by[:, 0])
        else:
            codes = layouts.pack_halves(weight)
        offset = None if bias is None else layouts.pad_row(bias.float())
        kept = (codes, scales, offset)
        packed = bindings.Linear(
            *(None if part is None else part.data_ptr() for part in kept),
            bindings.CODES if eight_bits else bindings.HALVES,
            outputs,
            inputs,
            layouts.padded(inputs),
        )
        super().__init__(packed, kept, dtype)


@functools.cache
def native_works() -> bool:
    """Whether this project's CPU kernels can be compiled and loaded here, and agree with plain products."""
    try:
        bindings.library()
    except BuildError as error:
        _log.info("own CPU kernels are not used: %s", error)
        return False
    generator = torch.Generator().manual_seed(1)
    weight, bias = torch.randn(100, 72, generator=generator), torch.randn(100, generator=generator)
    x = torch.randn(9, 72, generator=generator)
    x[1] = 0.0
    x[2] = weight[0] = 1.0
    expected = F.linear(x, weight, bias)
    for eight_bits in (True, False):
        layer = NativeLinear(weight, bias, eight_bits=eight_bits)
        got, alone = layer(x), layer(x[8:])
        close = F.cosine_similarity(got, expected).min() > 0.999 and torch.allclose(
            got[2, 0], expected[2, 0], rtol=1e-3
        )
        if not (close and torch.equal(got[8:], alone) and torch.equal(layer.add(x, got), got + got)):
            _log.warning("own CPU kernels are not used: they disagree with plain products")
            return False
    return True
