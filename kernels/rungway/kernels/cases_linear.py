"""Inputs for linear layers with quantised weights (layouts.py)."""

from __future__ import annotations

import torch

from rungway.kernels.case import Args, Case, Metric, random
from rungway.kernels.layouts import BLOCK, pack_int4


def int8(tokens: int, outs: int, ins: int, *, bias: bool = False, bar: float | None = None) -> Case:
    def make(dtype: torch.dtype) -> Args:
        codes = torch.randint(-127, 128, (outs, ins), generator=torch.Generator().manual_seed(2)).to(torch.int8)
        return random(tokens, ins, dtype=dtype, seed=1), codes, _scales(outs) / ins**0.5, _bias(outs, bias, dtype)

    return _case(tokens, outs, ins, "", 8, make, outs * 4, bar)


def int4(tokens: int, outs: int, ins: int, group: int, *, bias: bool = False, bar: float | None = None) -> Case:
    """Zeros 0 .. 16, not whole codes alone: the layout allows any number."""

    def make(dtype: torch.dtype) -> Args:
        generator = torch.Generator().manual_seed(3)
        packed = pack_int4(torch.randint(0, 16, (outs, ins), generator=generator))
        scales = (torch.rand(outs, ins // group, generator=generator) + 0.5).to(dtype) / ins**0.5
        zeros = torch.randint(0, 17, (outs, ins // group), generator=generator).to(dtype)
        return random(tokens, ins, dtype=dtype, seed=1), packed, scales, zeros, _bias(outs, bias, dtype)

    return _case(tokens, outs, ins, f"g{group}", 4, make, 4 * outs * ins // group, bar)


def fp8(tokens: int, outs: int, ins: int, *, blocks: bool, bias: bool = False, bar: float | None = None) -> Case:
    """Codes of every kind, denormals among them (but not NaN)."""

    def make(dtype: torch.dtype) -> Args:
        bits = torch.randint(0, 256, (outs, ins), generator=torch.Generator().manual_seed(4)).to(torch.uint8)
        bits[(bits & 0x7F) == 0x7F] = 1
        scales = (
            _scales(outs) if not blocks else _scales(-(-outs // BLOCK) * -(-ins // BLOCK)).view(-(-outs // BLOCK), -1)
        )
        return (
            random(tokens, ins, dtype=dtype, seed=1),
            bits.view(torch.float8_e4m3fn),
            scales / (100 * ins**0.5),
            _bias(outs, bias, dtype),
        )

    return _case(tokens, outs, ins, "blocks" if blocks else "rows", 8, make, outs * 4, bar)


def _scales(count: int) -> torch.Tensor:
    return torch.rand(count, generator=torch.Generator().manual_seed(5)) / 50 + 0.01


def _bias(outs: int, wanted: bool, dtype: torch.dtype) -> torch.Tensor | None:
    return random(outs, dtype=dtype, seed=6) if wanted else None


def _case(tokens: int, outs: int, ins: int, kind: str, bits: int, make, extra: int, bar: float | None) -> Case:  # type: ignore[no-untyped-def]
    def traffic(dtype: torch.dtype) -> int:
        return outs * ins * bits // 8 + extra + tokens * (ins + outs) * dtype.itemsize

    metric = Metric.BYTES if tokens <= 64 else Metric.FLOPS
    name = f"{tokens}x{outs}x{ins}" + (f"+{kind}" if kind else "")
    return Case(name, make, traffic, lambda: 2 * tokens * outs * ins, bar=bar, metric=metric)


SMALL: dict[str, list[Case]] = {
    "int8_linear": [
        int8(1, 64, 1024),
        int8(3, 70, 160, bias=True),
        int8(20, 96, 64),
        int8(70, 130, 200, bias=True),
        int8(0, 64, 64),
    ],
    "int4_linear": [
        int4(1, 64, 1024, 128),
        int4(3, 70, 160, 32, bias=True),
        int4(20, 96, 512, 256),
        int4(70, 130, 192, 64),
        int4(2, 48, 96, 16),
        int4(0, 64, 64, 32),
    ],
    "fp8_linear": [
        fp8(1, 64, 1024, blocks=False),
        fp8(3, 140, 272, blocks=True, bias=True),
        fp8(20, 96, 128, blocks=False, bias=True),
        fp8(70, 130, 192, blocks=True),
        fp8(0, 64, 64, blocks=True),
    ],
}

LARGE: dict[str, list[Case]] = {
    "int8_linear": [
        int8(1, 28672, 4096, bar=0.65),
        int8(8, 28672, 4096, bar=0.65),
        int8(8, 4096, 14336, bar=0.65),
        int8(8, 6144, 4096),
        int8(64, 28672, 4096),
        int8(4096, 28672, 4096),
    ],
    "int4_linear": [
        int4(1, 28672, 4096, 128, bar=0.5),
        int4(8, 28672, 4096, 128, bar=0.5),
        int4(8, 4096, 14336, 32),
        int4(4096, 28672, 4096, 128),
    ],
    "fp8_linear": [
        fp8(8, 28672, 4096, blocks=False, bar=0.65),
        fp8(8, 4096, 14336, blocks=True),
        fp8(4096, 28672, 4096, blocks=True),
    ],
}
