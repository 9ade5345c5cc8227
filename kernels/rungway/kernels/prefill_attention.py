"""Prefill attention over a paged KV cache: many queries of several sequences, causal, online softmax over tiles of keys.

A program takes a block of rows: some consecutive queries of one sequence times all query heads of one kv head, so that keys
are read once for all of these. Tiles that every row sees in full are not masked. Tiles lie at fixed positions of the context:
a token's result does not depend on how its prompt was cut into chunks. Dao, arXiv 2307.08691.
"""

# mypy: allow-untyped-decorators
from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from rungway.kernels.attention_tile import attend_tile, nothing_seen, shape_of
from rungway.kernels.devices import architecture
from rungway.kernels.tiles import chosen


class Config(NamedTuple):
    """`rows` (queries * heads per kv head) of one program, and `tile` keys of one step."""

    rows: int
    tile: int
    warps: int
    stages: int


NEIGHBOURS = {"rows": (64, 128), "tile": (32, 64, 128), "warps": (4, 8), "stages": (2, 3, 5)}


def plan(kernel: str, q: torch.Tensor, *_rest: Any) -> tuple[tuple[int, ...], Config]:
    """As in decode_attention.py."""
    where, dim, itemsize = key = architecture(q), q.shape[2], q.element_size()
    found = chosen(kernel, key)
    return key, config_for(dim, itemsize, where) if found is None else Config(*found)


def config_for(dim: int, itemsize: int, architecture: int) -> Config:
    """Reasoned, not measured. 16-bit: two warp groups of 64 rows each, which is what Hopper's wgmma takes; before Hopper, what registers hold."""
    if itemsize == 4:
        return Config(rows=32, tile=32, warps=4, stages=2)
    if architecture < 90:
        return Config(rows=128 if dim <= 128 else 64, tile=32, warps=8, stages=5 if dim <= 128 else 3)
    return Config(rows=128, tile=64 if dim <= 128 else 32, warps=8, stages=5 if dim <= 128 else 3)


@triton.jit
def _prefill(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    tables_ptr: tl.tensor,
    lens_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    out_ptr: tl.tensor,
    scale: tl.tensor,
    soft_cap: tl.tensor,
    window: tl.tensor,
    heads: tl.tensor,
    table_width: tl.tensor,
    stride_head: tl.tensor,
    stride_block: tl.tensor,
    stride_token: tl.tensor,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    TILE: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
) -> None:
    QUERIES: tl.constexpr = ROWS // GROUP
    row, kv_head = tl.program_id(2).to(tl.int64), tl.program_id(1)
    piece = tl.num_programs(0) - 1 - tl.program_id(0)  # late queries see most keys: they start first
    first = tl.load(starts_ptr + row).to(tl.int64)
    count = (tl.load(starts_ptr + row + 1).to(tl.int64) - first).to(tl.int32)
    context = tl.load(lens_ptr + row).to(tl.int32)
    if context == 0 or piece * QUERIES >= count:
        return
    member, lane = tl.arange(0, ROWS), tl.arange(0, DIM_BLOCK)
    query = piece * QUERIES + member // GROUP
    last = context - count + query
    real = ((query < count) & (member < QUERIES * GROUP))[:, None] & (lane < DIM)[None, :]
    where = ((first + query) * heads + kv_head * GROUP + member % GROUP)[:, None] * DIM + lane[None, :]
    q = tl.load(q_ptr + where, mask=real, other=0.0)
    best, total, acc = nothing_seen(ROWS, DIM_BLOCK)
    shift = kv_head.to(tl.int64) * stride_head
    position = context - count + piece * QUERIES  # of the first query
    end = tl.minimum(position + QUERIES, context)
    if WINDOWED:
        masked_from = tl.maximum(position - window + 1, 0) // TILE * TILE
    else:
        masked_from = (position + 1) // TILE * TILE
        for start in range(0, masked_from, TILE):
            best, total, acc = attend_tile(
                q, best, total, acc, k_ptr + shift, v_ptr + shift, tables_ptr + row * table_width, start, context, last, scale, soft_cap,
                window, stride_block, stride_token, DIM, DIM_BLOCK, BLOCK_TOKENS, TILE, False, False, CAPPED,
            )  # fmt: skip
    for start in range(masked_from, end, TILE):
        best, total, acc = attend_tile(
            q, best, total, acc, k_ptr + shift, v_ptr + shift, tables_ptr + row * table_width, start, context, last, scale, soft_cap, window,
            stride_block, stride_token, DIM, DIM_BLOCK, BLOCK_TOKENS, TILE, True, WINDOWED, CAPPED,
        )  # fmt: skip
    out = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    tl.store(out_ptr + where, out.to(out_ptr.dtype.element_ty), mask=real)


def paged_prefill_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
    query_starts: torch.Tensor,
    max_queries: int,
    window: int = 0,
    soft_cap: float = 0.0,
    *,
    out: torch.Tensor | None = None,
    config: Config | None = None,
) -> torch.Tensor:
    """See attention_reference.paged_attention. Layout of the arguments and rows without a query: as in
    decode_attention.paged_decode_attention."""
    tokens, heads, dim, kv_heads, block_tokens, batch, width = shape_of(q, k_cache, v_cache, block_tables)
    out = torch.zeros_like(q) if out is None else out
    if tokens == 0 or batch == 0:
        return out
    config = config or plan("paged_prefill_attention", q)[1]
    group = heads // kv_heads
    rows = max(config.rows, triton.next_power_of_2(group))
    _prefill[(triton.cdiv(max_queries, rows // group), kv_heads, batch)](
        q, k_cache, v_cache, block_tables, context_lens, query_starts, out, scale, soft_cap, window, heads, width,
        k_cache.stride(0), k_cache.stride(1), k_cache.stride(2),
        GROUP=group, ROWS=rows, DIM=dim, DIM_BLOCK=max(16, triton.next_power_of_2(dim)), BLOCK_TOKENS=block_tokens,
        TILE=config.tile, WINDOWED=window > 0, CAPPED=soft_cap > 0.0, enable_fp_fusion=True, num_warps=config.warps, num_stages=config.stages,
    )  # fmt: skip
    return out
