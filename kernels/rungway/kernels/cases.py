"""Inputs for every kernel: small ones with all the corners for tests, large ones for timing. Seeded, made on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

Args = tuple[Any, ...]


@dataclass(frozen=True)
class Case:
    """`make(dtype)` gives the arguments on the CPU; `bytes_moved(dtype)` is the least traffic with memory."""

    name: str
    make: Callable[[torch.dtype], Args]
    bytes_moved: Callable[[torch.dtype], int]


def _random(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def rms_norm(tokens: int, hidden: int, residual: bool) -> Case:
    def make(dtype: torch.dtype) -> Args:
        x = _random(tokens, hidden, dtype=dtype, seed=1)
        weight = _random(hidden, dtype=dtype, seed=2)
        return x, weight, 1e-5, _random(tokens, hidden, dtype=dtype, seed=3) if residual else None

    def traffic(dtype: torch.dtype) -> int:
        return (tokens * hidden * (4 if residual else 3) + hidden) * dtype.itemsize

    return Case(f"{tokens}x{hidden}{'+residual' if residual else ''}", make, traffic)


def rope(tokens: int, heads: int, kv_heads: int, dim: int, last: int) -> Case:
    """Positions up to `last`, unordered."""

    def make(dtype: torch.dtype) -> Args:
        positions = torch.randint(0, last + 1, (tokens,), generator=torch.Generator().manual_seed(3))
        frequencies = 10000.0 ** (-torch.arange(0, dim, 2).float() / dim)
        q = _random(tokens, heads, dim, dtype=dtype, seed=1)
        return q, _random(tokens, kv_heads, dim, dtype=dtype, seed=2), positions, frequencies

    def traffic(dtype: torch.dtype) -> int:
        return 2 * tokens * (heads + kv_heads) * dim * dtype.itemsize

    return Case(f"{tokens}x{heads}/{kv_heads}x{dim}@{last}", make, traffic)


def swiglu(tokens: int, size: int) -> Case:
    def make(dtype: torch.dtype) -> Args:
        return (_random(tokens, 2 * size, dtype=dtype, seed=1) * 4,)

    return Case(f"{tokens}x{size}", make, lambda dtype: 3 * tokens * size * dtype.itemsize)


def paged_decode_attention(heads: int, kv_heads: int, dim: int, lengths: list[int], block_tokens: int = 16) -> Case:
    """Blocks are dealt out shuffled; what no sequence owns, and the tail of every last block, is NaN: reading it shows."""
    counts = [-(-length // block_tokens) for length in lengths]

    def make(dtype: torch.dtype) -> Args:
        generator = torch.Generator().manual_seed(4)
        blocks = sum(counts) + 3
        order = torch.randperm(blocks, generator=generator).int()
        tables = torch.full((len(lengths), max(1, *counts)), int(order[-1]), dtype=torch.int32)
        cache = torch.full((2, kv_heads, blocks, block_tokens, dim), float("nan"), dtype=dtype)
        used = 0
        for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
            tables[row, :count] = order[used : used + count]
            used += count
            data = _random(2, kv_heads, count * block_tokens, dim, dtype=dtype, seed=10 + row)
            data[:, :, length:] = float("nan")
            cache[:, :, tables[row, :count].long()] = data.view(2, kv_heads, count, block_tokens, dim)
        q = _random(len(lengths), heads, dim, dtype=dtype, seed=5)
        lens = torch.tensor(lengths, dtype=torch.int32)
        return q, cache[0], cache[1], tables, lens, dim**-0.5

    def traffic(dtype: torch.dtype) -> int:
        return (2 * sum(lengths) * kv_heads + 2 * len(lengths) * heads) * dim * dtype.itemsize

    longest = max(lengths)
    return Case(f"{len(lengths)}x{heads}/{kv_heads}x{dim}@{longest}", make, traffic)


SMALL: dict[str, list[Case]] = {
    "rms_norm": [
        rms_norm(1, 64, residual=False),
        rms_norm(3, 96, residual=True),
        rms_norm(2, 1000, residual=True),
        rms_norm(0, 64, residual=True),
    ],
    "rope": [
        rope(1, 4, 4, 64, 0),
        rope(5, 9, 3, 64, 2048),
        rope(3, 8, 1, 80, 131072),
        rope(0, 4, 2, 64, 1),
    ],
    "swiglu": [swiglu(1, 64), swiglu(3, 1536), swiglu(2, 1023), swiglu(0, 64)],
    "paged_decode_attention": [
        paged_decode_attention(4, 4, 64, [1, 15, 16, 17]),
        paged_decode_attention(9, 3, 64, [0, 63, 64, 65]),
        paged_decode_attention(8, 1, 80, [55]),
        paged_decode_attention(14, 2, 128, [33, 0], block_tokens=8),
        paged_decode_attention(4, 2, 32, [511, 512, 513, 1100]),
    ],
}

LARGE: dict[str, list[Case]] = {
    "rms_norm": [rms_norm(8192, 4096, residual=True), rms_norm(8192, 8192, residual=True)],
    "rope": [rope(8192, 32, 8, 128, 8192)],
    "swiglu": [swiglu(8192, 14336)],
    "paged_decode_attention": [
        paged_decode_attention(32, 8, 128, [4096] * 32),
        paged_decode_attention(32, 8, 128, [32768]),
    ],
}
