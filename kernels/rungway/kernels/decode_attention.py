"""Decode attention over a paged KV cache: split along the context, all query heads of a kv head in one tile.

Each program takes one sequence, one kv head and one segment of the context; a second kernel merges the segments' (maximum,
sum, weighted values). A sequence's segments follow from its own length alone and are merged in a block of fixed size, so
its result does not depend on its batch, while a lone long sequence still fills the GPU. A grid for the longest context, as a
captured graph has it, costs short sequences only programs that return at once. Up to 8 queries of a sequence, as speculative
verification has them, share the tile. Split along the context: Flash-Decoding (Dao et al., 2023).
"""

# mypy: allow-untyped-decorators
from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from rungway.kernels.attention_tile import attend_tile, nothing_seen, shape_of
from rungway.kernels.devices import architecture
from rungway.kernels.sizes import ROWS_MAX
from rungway.kernels.tiles import chosen


class Config(NamedTuple):
    """Segments: at most `segments` of at least `segment` tokens each, a multiple of `tile`."""

    segments: int
    segment: int
    tile: int
    warps: int
    stages: int


NEIGHBOURS = {"tile": (32, 64, 128), "segment": (256, 512, 1024), "warps": (4, 8), "stages": (3, 5)}


def plan(kernel: str, q: torch.Tensor, *_rest: Any) -> tuple[tuple[int, ...], Config]:
    """What the choice of a tile depends on for these arguments, and the tile: tiles.py."""
    key = architecture(q), q.shape[2], q.element_size()
    found = chosen(kernel, key)
    return key, config_for(*key[1:]) if found is None else Config(*found)


def config_for(dim: int, itemsize: int) -> Config:
    """Reasoned, not measured. Two programs of these fit the shared memory of an A100's multiprocessor, three that of an H100's. Addresses come from
    a load themselves: of five stages two are in flight ahead of the products."""
    tile = 64 if dim * itemsize <= 256 else 32 if dim * itemsize <= 512 else 16
    return Config(segments=32, segment=512, tile=tile, warps=4, stages=5)


@triton.jit
def _span(row, lens_ptr, starts_ptr, SEGMENTS: tl.constexpr, SEGMENT: tl.constexpr, TILE: tl.constexpr, RAGGED: tl.constexpr):  # type: ignore[no-untyped-def]  # fmt: skip
    """(context, first query, queries, tokens per segment) of a sequence."""
    context = tl.load(lens_ptr + row).to(tl.int32)
    first, count = row, 1
    if RAGGED:
        first = tl.load(starts_ptr + row).to(tl.int64)
        count = (tl.load(starts_ptr + row + 1).to(tl.int64) - first).to(tl.int32)
    share = (context + SEGMENTS - 1) // SEGMENTS
    return context, first, count, tl.maximum((share + TILE - 1) // TILE * TILE, SEGMENT)


@triton.jit
def _attend(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    tables_ptr: tl.tensor,
    lens_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    max_ptr: tl.tensor,
    sum_ptr: tl.tensor,
    acc_ptr: tl.tensor,
    out_ptr: tl.tensor,
    scale: tl.tensor,
    soft_cap: tl.tensor,
    window: tl.tensor,
    heads: tl.tensor,
    table_width: tl.tensor,
    segments: tl.tensor,
    stride_head: tl.tensor,
    stride_block: tl.tensor,
    stride_token: tl.tensor,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    SEGMENTS: tl.constexpr,
    SEGMENT: tl.constexpr,
    TILE: tl.constexpr,
    RAGGED: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
    DIRECT: tl.constexpr,
) -> None:
    row, kv_head, segment = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    context, first, count, length = _span(row, lens_ptr, starts_ptr, SEGMENTS, SEGMENT, TILE, RAGGED)
    begin = segment * length
    if begin >= context or count == 0:
        return
    member, query, lane = tl.arange(0, ROWS), tl.arange(0, ROWS) // GROUP, tl.arange(0, DIM_BLOCK)
    there = query < count
    where = (first + query) * heads + kv_head * GROUP + member % GROUP
    real = there[:, None] & (lane < DIM)[None, :]
    q = tl.load(q_ptr + where[:, None] * DIM + lane[None, :], mask=real, other=0.0)
    best, total, acc = nothing_seen(ROWS, DIM_BLOCK)
    low = tl.maximum(begin, (context - count - window + 1) // TILE * TILE) if WINDOWED else begin
    shift = kv_head.to(tl.int64) * stride_head
    for start in range(low, tl.minimum(begin + length, context), TILE):
        best, total, acc = attend_tile(
            q, best, total, acc, k_ptr + shift, v_ptr + shift, tables_ptr + row * table_width, start, context,
            context - count + query, scale, soft_cap, window, stride_block, stride_token, DIM, DIM_BLOCK,
            BLOCK_TOKENS, TILE, True, WINDOWED, CAPPED,
        )  # fmt: skip
    if DIRECT:
        out = acc / tl.where(total > 0.0, total, 1.0)[:, None]
        tl.store(out_ptr + where[:, None] * DIM + lane[None, :], out.to(out_ptr.dtype.element_ty), mask=real)
    else:
        part = where * segments + segment
        tl.store(max_ptr + part, best, mask=there)
        tl.store(sum_ptr + part, total, mask=there)
        tl.store(acc_ptr + part[:, None] * DIM + lane[None, :], acc, mask=real)


@triton.jit
def _merge(
    max_ptr: tl.tensor,
    sum_ptr: tl.tensor,
    acc_ptr: tl.tensor,
    lens_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    out_ptr: tl.tensor,
    heads: tl.tensor,
    segments: tl.tensor,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    SEGMENTS: tl.constexpr,
    SEGMENT: tl.constexpr,
    TILE: tl.constexpr,
    RAGGED: tl.constexpr,
) -> None:
    row, head, query = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    context, first, count, length = _span(row, lens_ptr, starts_ptr, SEGMENTS, SEGMENT, TILE, RAGGED)
    if context == 0 or query >= count:
        return
    segment, lane = tl.arange(0, SEGMENTS), tl.arange(0, DIM_BLOCK)
    there = segment * length < context
    where = (first + query) * heads + head
    best = tl.load(max_ptr + where * segments + segment, mask=there, other=float("-inf"))
    total = tl.load(sum_ptr + where * segments + segment, mask=there, other=0.0)
    weight = tl.exp2(best - tl.max(best, axis=0))  # a query sees itself, so the maximum is finite
    at = (where * segments + segment)[:, None] * DIM + lane[None, :]
    acc = tl.load(acc_ptr + at, mask=there[:, None] & (lane < DIM)[None, :], other=0.0)
    out = tl.sum(weight[:, None] * acc, axis=0) / tl.sum(weight * total, axis=0)
    tl.store(out_ptr + where * DIM + lane, out.to(out_ptr.dtype.element_ty), mask=lane < DIM)


def paged_decode_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
    query_starts: torch.Tensor | None = None,
    max_queries: int = 1,
    window: int = 0,
    soft_cap: float = 0.0,
    *,
    out: torch.Tensor | None = None,
    config: Config | None = None,
) -> torch.Tensor:
    """See attention_reference.paged_attention; `max_queries` * heads per kv head is at most ROWS_MAX. `q` and
    `block_tables` are contiguous; the caches may be strided views of equal strides whose last dimension is dense.

    Rows of `out` that belong to no query are left as they are (without `out` they are zero). No length is read back from
    the GPU. Scratch: rows of q * heads * segments * (dim + 2) float32, segments <= 32 by the width of `block_tables`.
    """
    tokens, heads, dim, kv_heads, block_tokens, batch, width = shape_of(q, k_cache, v_cache, block_tables)
    group, ragged = heads // kv_heads, query_starts is not None
    assert group * max_queries <= max(ROWS_MAX, group) and (ragged or (max_queries == 1 and tokens == batch))
    out = torch.zeros_like(q) if out is None else out
    if tokens == 0 or batch == 0:
        return out
    config = config or plan("paged_decode_attention", q)[1]
    segments = max(1, min(config.segments, triton.cdiv(width * block_tokens, config.segment)))
    direct = segments == 1  # the same result bit for bit: merging one segment multiplies by 1
    scratch = q.new_empty((tokens * heads, 0 if direct else segments, dim + 2), dtype=torch.float32)
    size = scratch.shape[0] * scratch.shape[1]
    best, total, acc = torch.split(scratch.view(-1), [size, size, size * dim])
    starts = context_lens if query_starts is None else query_starts
    dim_block = max(16, triton.next_power_of_2(dim))
    shape = {"SEGMENTS": config.segments, "SEGMENT": config.segment, "TILE": config.tile, "RAGGED": ragged}
    _attend[(batch, kv_heads, segments)](
        q, k_cache, v_cache, block_tables, context_lens, starts, best, total, acc, out, scale, soft_cap, window, heads,
        width, segments, k_cache.stride(0), k_cache.stride(1), k_cache.stride(2),
        GROUP=group, ROWS=max(16, triton.next_power_of_2(group * max_queries)), DIM=dim, DIM_BLOCK=dim_block,
        BLOCK_TOKENS=block_tokens, WINDOWED=window > 0, CAPPED=soft_cap > 0.0, DIRECT=direct,
        enable_fp_fusion=True, num_warps=config.warps, num_stages=config.stages, **shape,
    )  # fmt: skip
    if not direct:
        _merge[(batch, heads, max_queries)](
            best,
            total,
            acc,
            context_lens,
            starts,
            out,
            heads,
            segments,
            DIM=dim,
            DIM_BLOCK=dim_block,
            enable_fp_fusion=True,
            num_warps=4,
            **shape,
        )
    return out
