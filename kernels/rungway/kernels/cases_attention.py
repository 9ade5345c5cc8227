"""Inputs for paged attention and for what writes the paged cache."""

from __future__ import annotations

import torch

from rungway.kernels.case import Args, Case, Metric, random


def attention(
    heads: int,
    kv_heads: int,
    dim: int,
    lengths: list[int],
    queries: list[int] | None = None,
    *,
    window: int = 0,
    soft_cap: float = 0.0,
    block_tokens: int = 16,
    spare_rows: int = 0,
    bar: float | None = None,
    metric: Metric = Metric.BYTES,
) -> Case:
    """Contexts of `lengths`, the newest `queries` tokens of each asking (None = one each, without query_starts). Blocks are
    dealt out shuffled; what no sequence owns, and the tail of every last block, is NaN: reading it shows. `spare_rows` at
    the end of q belong to no sequence."""
    counts = [-(-length // block_tokens) for length in lengths]
    asked = queries or [1] * len(lengths)

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
            data = random(2, kv_heads, count * block_tokens, dim, dtype=dtype, seed=10 + row)
            data[:, :, length:] = float("nan")
            cache[:, :, tables[row, :count].long()] = data.view(2, kv_heads, count, block_tokens, dim)
        q = random(sum(asked) + spare_rows, heads, dim, dtype=dtype, seed=5)
        lens = torch.tensor(lengths, dtype=torch.int32)
        starts = torch.tensor([0, *torch.tensor(asked).cumsum(0)], dtype=torch.int32)
        given = (None, 1) if queries is None else (starts, max(asked))
        return q, cache[0], cache[1], tables, lens, dim**-0.5, *given, window, soft_cap

    def traffic(dtype: torch.dtype) -> int:
        return (2 * sum(lengths) * kv_heads + 2 * sum(asked) * heads) * dim * dtype.itemsize

    def work() -> int:
        pairs = sum(n * (length - n) + n * (n + 1) // 2 for length, n in zip(lengths, asked, strict=True))
        return 4 * pairs * heads * dim

    shape = f"{len(lengths)}x{heads}/{kv_heads}x{dim}@{max(lengths)}"
    parts = [f"q{max(asked)}" if queries else "", f"w{window}" if window else "", "capped" if soft_cap else ""]
    name = "+".join([shape, *(part for part in parts if part)])
    return Case(name, make, traffic, work, bar=bar, metric=metric)


def rope(tokens: int, heads: int, kv_heads: int, dim: int, last: int, bar: float | None = None) -> Case:
    """Positions up to `last`, unordered."""

    def make(dtype: torch.dtype) -> Args:
        positions = torch.randint(0, last + 1, (tokens,), generator=torch.Generator().manual_seed(3))
        q = random(tokens, heads, dim, dtype=dtype, seed=1)
        return q, random(tokens, kv_heads, dim, dtype=dtype, seed=2), positions, _frequencies(dim)

    def traffic(dtype: torch.dtype) -> int:
        return 2 * tokens * (heads + kv_heads) * dim * dtype.itemsize

    return Case(f"{tokens}x{heads}/{kv_heads}x{dim}@{last}", make, traffic, bar=bar)


def rope_kv(
    tokens: int, heads: int, kv_heads: int, dim: int, *, normed: bool = False, blocks: int = 4, bar: float | None = None
) -> Case:
    """Slots shuffled over the cache, every third token without one (padding)."""
    block_tokens = 16

    def make(dtype: torch.dtype) -> Args:
        generator = torch.Generator().manual_seed(6)
        positions = torch.randint(0, 4096, (tokens,), generator=generator)
        slots = torch.randperm(blocks * block_tokens, generator=generator)[:tokens]
        slots[2::3] = -1
        caches = random(2, kv_heads, blocks, block_tokens, dim, dtype=dtype, seed=7)
        norms = random(heads + kv_heads, dim, dtype=torch.float32, seed=8) if normed else None
        qkv = random(tokens, heads + 2 * kv_heads, dim, dtype=dtype, seed=9)
        return qkv, positions, _frequencies(dim), slots, caches[0], caches[1], norms, 1e-6

    def traffic(dtype: torch.dtype) -> int:
        written = tokens - tokens // 3
        return (tokens * (2 * heads + 2 * kv_heads) + written * 2 * kv_heads) * dim * dtype.itemsize

    return Case(f"{tokens}x{heads}/{kv_heads}x{dim}{'+normed' if normed else ''}", make, traffic, bar=bar)


def _frequencies(dim: int) -> torch.Tensor:
    return 10000.0 ** (-torch.arange(0, dim, 2).float() / dim)


SMALL: dict[str, list[Case]] = {
    "rope": [rope(1, 4, 4, 64, 0), rope(5, 9, 3, 64, 2048), rope(3, 8, 1, 80, 131072), rope(0, 4, 2, 64, 1)],
    "rope_kv": [
        rope_kv(1, 4, 4, 64),
        rope_kv(7, 9, 3, 64),
        rope_kv(4, 32, 8, 80, normed=True),
        rope_kv(5, 14, 2, 128, normed=True),
        rope_kv(0, 4, 2, 64),
    ],
    "paged_decode_attention": [
        attention(4, 4, 64, [1, 15, 16, 17]),
        attention(9, 3, 64, [0, 63, 64, 65]),
        attention(8, 1, 80, [55]),
        attention(14, 2, 128, [33, 0], block_tokens=8),
        attention(4, 2, 32, [511, 512, 513, 1100]),
        attention(8, 2, 64, [8, 70, 0, 530], [8, 3, 0, 1], spare_rows=2),
        attention(4, 2, 64, [600, 20], [4, 1], window=33),
        attention(4, 1, 256, [40, 3], soft_cap=5.0),
    ],
    "paged_prefill_attention": [
        attention(4, 4, 64, [1, 16, 17], [1, 16, 17]),
        attention(9, 3, 64, [70, 0, 65, 9], [33, 0, 1, 9], spare_rows=3),
        attention(14, 2, 128, [100], [37], block_tokens=8),
        attention(4, 1, 80, [90, 200], [90, 7], window=20),
        attention(8, 2, 256, [40, 70], [40, 5], soft_cap=5.0),
        attention(4, 2, 64, [150], [70], window=16, soft_cap=3.0),
    ],
}

LARGE: dict[str, list[Case]] = {
    "rope": [rope(8192, 32, 8, 128, 8192, bar=0.85)],
    "rope_kv": [rope_kv(8192, 32, 8, 128, blocks=512, bar=0.85)],
    "paged_decode_attention": [
        attention(32, 8, 128, [2048] * 32, bar=0.8),
        attention(32, 8, 128, [4096] * 32, bar=0.8),
        attention(28, 4, 128, [4096] * 64, bar=0.8),
        attention(32, 8, 128, [1000 + 97 * row for row in range(64)], bar=0.8),
        attention(32, 8, 128, [4096] * 32, [4] * 32),
        attention(32, 8, 128, [32768]),
    ],
    "paged_prefill_attention": [
        attention(32, 8, 128, [8192], [8192], bar=0.55, metric=Metric.FLOPS),
        attention(32, 8, 128, [16384], [2048], metric=Metric.FLOPS),
        attention(32, 8, 128, [1024] * 8, [1024] * 8, metric=Metric.FLOPS),
    ],
}
