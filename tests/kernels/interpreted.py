"""Run by test_triton.py in a process with TRITON_INTERPRET=1: every kernel against its reference, on the CPU.

The interpreter is silently wrong in bfloat16 (it computes on the bit patterns), so cases run in float32 and float16; it
does not check bounds, so every tensor that a kernel gets or makes lies in a larger buffer: of NaN (integers: a huge number),
so that what is read beyond its ends shows in the result, and unchanged afterwards, so that nothing is written there.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from rungway.kernels import cases
from rungway.kernels.case import Case
from rungway.kernels.registry import KERNELS

assert os.environ.get("TRITON_INTERPRET") == "1", "test_triton.py runs this file"

ALL = [(name, case) for name, kernel in KERNELS.items() for case in kernel.small]
TOLERANCE = {torch.float32: {"rtol": 1e-4, "atol": 2e-5}, torch.float16: {"rtol": 4e-3, "atol": 4e-3}}
PAD = 257


class Guard:
    """Puts tensors into guarded buffers and checks these at the end."""

    def __init__(self) -> None:
        self._bands: list[tuple[torch.Tensor, torch.Tensor]] = []

    def buffer(self, shape: Any, dtype: torch.dtype) -> torch.Tensor:
        """Room of `shape` in the middle of a buffer; all of it is NaN or huge."""
        size = torch.Size(shape).numel()
        bits = torch.empty(size + 2 * PAD, dtype=dtype)
        if dtype.is_floating_point and dtype.itemsize > 1:
            bits.fill_(float("nan"))
        else:
            bits.view(torch.uint8).fill_(0x7F)  # one-byte floats: NaN
        raw = bits.view(torch.uint8)
        for band in (raw[: PAD * dtype.itemsize], raw[-PAD * dtype.itemsize :]):
            self._bands.append((band, band.clone()))
        return bits[PAD : PAD + size].view(shape)

    def copy(self, value: Any) -> Any:
        return self.buffer(value.shape, value.dtype).copy_(value) if isinstance(value, torch.Tensor) else value

    def check(self) -> None:
        assert self._bands and all(torch.equal(band, before) for band, before in self._bands)


@pytest.fixture
def guard(monkeypatch: pytest.MonkeyPatch) -> Iterator[Guard]:
    """Guards what kernels allocate, too."""
    it = Guard()

    plain = torch.Tensor.new_empty

    def new_empty(like: torch.Tensor, shape: Any, *, dtype: torch.dtype | None = None, **more: Any) -> torch.Tensor:
        if more:  # the interpreter's own
            return plain(like, shape, dtype=dtype, **more)
        return it.buffer((shape,) if isinstance(shape, int) else shape, dtype or like.dtype)

    monkeypatch.setattr(torch, "empty_like", lambda like: it.buffer(like.shape, like.dtype))
    monkeypatch.setattr(torch, "zeros_like", lambda like: it.buffer(like.shape, like.dtype).zero_())
    monkeypatch.setattr(torch.Tensor, "new_empty", new_empty)
    yield it
    it.check()


def compare(got: Any, expected: Any, dtype: torch.dtype) -> None:
    got, expected = (x if isinstance(x, tuple) else (x,) for x in (got, expected))
    for one, other in zip(got, expected, strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other, equal_nan=True, **TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
@pytest.mark.parametrize(("name", "case"), ALL, ids=[f"{name}-{case.name}" for name, case in ALL])
def test_interpreted_kernel_matches_its_reference(name: str, case: Case, dtype: torch.dtype, guard: Guard) -> None:
    kernel = KERNELS[name]
    args = case.make(dtype)
    if name == "rope" and dtype == torch.float16 and "131072" in case.name:
        args = (*args[:2], args[2] % 4096, args[3])  # angles are float32 either way; keep the half-precision case small
    given = tuple(guard.copy(arg) for arg in args)
    got, expected = kernel.triton()(*given), kernel.reference(*args)
    if name == "int4_linear" and dtype == torch.float16:  # weights are rounded to the type of x before the product
        torch.testing.assert_close(got, expected, rtol=1e-2, atol=2e-2)
    else:
        compare(got, expected, dtype)
    for at, (mine, plain) in enumerate(zip(given, args, strict=True)):
        if isinstance(plain, torch.Tensor) and (at in kernel.writes or plain.dtype.itemsize > 1):
            torch.testing.assert_close(mine, plain, equal_nan=True, **TOLERANCE[dtype])


def test_strided_caches_are_read_in_place() -> None:
    for name in ("paged_decode_attention", "paged_prefill_attention"):
        case = next(case for case in cases.SMALL[name] if "+q" in case.name)
        q, k, v, *rest = case.make(torch.float32)
        joined = torch.stack([k, v], 1)  # [kv_heads, 2, blocks, ...]: neither half is contiguous
        got = KERNELS[name].triton()(q, joined[:, 0], joined[:, 1], *rest)
        compare(got, KERNELS[name].reference(q, k, v, *rest), torch.float32)


def test_strided_caches_are_written_in_place() -> None:
    qkv, positions, frequencies, slots, k, v, *rest = cases.SMALL["rope_kv"][1].make(torch.float32)
    joined = torch.stack([k, v], 1)
    KERNELS["rope_kv"].triton()(qkv, positions, frequencies, slots, joined[:, 0], joined[:, 1], *rest)
    KERNELS["rope_kv"].reference(qkv, positions, frequencies, slots, k, v, *rest)
    compare((joined[:, 0], joined[:, 1]), (k, v), torch.float32)


def test_decode_attention_does_not_depend_on_the_batch() -> None:
    """Nor on the width of the table: a captured graph has the widest."""
    attend = KERNELS["paged_decode_attention"].triton()
    q, k, v, tables, lens, scale, *_ = cases.attention(4, 2, 32, [70, 3, 600]).make(torch.float32)
    together = attend(q, k, v, tables, lens, scale)
    wide = torch.cat([tables, tables.new_full((3, 90), int(tables[1, 1]))], 1)
    assert torch.equal(attend(q, k, v, wide, lens, scale), together)
    for row in range(3):
        count = -(-int(lens[row]) // 16)
        table = tables[row : row + 1, :count].contiguous()
        assert torch.equal(attend(q[row : row + 1], k, v, table, lens[row : row + 1], scale)[0], together[row])


def test_prefill_attention_does_not_depend_on_how_a_prompt_was_cut() -> None:
    attend = KERNELS["paged_prefill_attention"].triton()
    q, k, v, tables, _, scale, *_ = cases.attention(4, 2, 32, [100], [100]).make(torch.float32)

    def chunk(first: int, stop: int) -> torch.Tensor:
        lens, starts = torch.tensor([stop], dtype=torch.int32), torch.tensor([0, stop - first], dtype=torch.int32)
        return attend(q[first:stop].contiguous(), k, v, tables, lens, scale, starts, stop - first)

    assert torch.equal(torch.cat([chunk(0, 37), chunk(37, 38), chunk(38, 100)]), chunk(0, 100))


@pytest.mark.parametrize("window", [0, 20])
def test_empty_segments_merge_as_nothing(window: int) -> None:
    """Segments past the context, before the window, and seen by some queries of a sequence only."""
    from rungway.kernels.decode_attention import Config

    case = cases.attention(4, 2, 32, [1, 130, 49, 0], [1, 4, 3, 0], window=window)
    args = case.make(torch.float32)
    for config in (Config(4, 16, 16, 4, 2), Config(16, 16, 16, 4, 2), Config(8, 48, 16, 4, 2)):
        got = KERNELS["paged_decode_attention"].triton()(*args, config=config)
        compare(got, KERNELS["paged_decode_attention"].reference(*args), torch.float32)


@pytest.mark.parametrize("name", ["paged_decode_attention", "paged_prefill_attention"])
def test_rows_without_a_sequence_are_left_as_they_are(name: str) -> None:
    args = cases.attention(4, 2, 32, [5, 0, 20], [1, 2, 3], spare_rows=2).make(torch.float32)
    out = torch.full_like(args[0], 7.0)
    assert KERNELS[name].triton()(*args, out=out) is out
    assert (out[[1, 2, 6, 7]] == 7.0).all() and not (out[[0, 3, 4, 5]] == 7.0).any()


def test_int8_products_do_not_depend_on_the_rest_of_a_decode_batch() -> None:
    multiply = KERNELS["int8_linear"].triton()
    x, codes, scales, _ = cases.SMALL["int8_linear"][0].make(torch.float32)
    others = torch.randn(9, x.shape[1])
    assert torch.equal(multiply(torch.cat([others, x]), codes, scales)[9:], multiply(x, codes, scales))


def test_a_row_that_is_not_finite_has_no_finite_logprob_and_neighbours_do_not_notice() -> None:
    args = cases.SMALL["sample"][0].make(torch.float32)
    tokens, logprobs = KERNELS["sample"].triton()(*args)
    args[0][4, 5] = float("nan")
    args[0][1] = float("-inf")
    spoilt, spoilt_logprobs = KERNELS["sample"].triton()(*args)
    kept = [row for row in range(9) if row not in (1, 4)]
    assert torch.equal(spoilt[kept], tokens[kept]) and torch.equal(spoilt_logprobs[kept], logprobs[kept])
    assert not torch.isfinite(spoilt_logprobs[[1, 4]]).any()
    assert ((spoilt >= 0) & (spoilt < args[0].shape[1])).all()


def test_samples_agree_with_the_cpu_sampler() -> None:
    """The engine's own sampler is the contract: same request, same token."""
    from rungway.engine.protocol import Sampling
    from rungway.engine.sampler import Row, sample, uniform
    from rungway.kernels.cases_sampling import ASKS

    logits = torch.randn(len(ASKS), 900, generator=torch.Generator().manual_seed(9)) * 3
    asks = [Sampling(max_tokens=9, temperature=t, top_k=k, top_p=p, min_p=m) for t, k, p, m in ASKS]
    expected = sample(logits, [Row(ask, [1, 2], 2, 77, 0, at) for at, ask in enumerate(asks)])
    points = torch.tensor([uniform(77, 0, at) for at in range(len(ASKS))], dtype=torch.float64)
    heat, top_k, top_p, min_p = (torch.tensor(column) for column in zip(*ASKS, strict=True))
    tokens, logprobs = KERNELS["sample"].triton()(logits, heat, top_k.int(), top_p, min_p, points)
    assert tokens.tolist() == [one.token for one in expected]
    assert logprobs.tolist() == pytest.approx([one.logprob for one in expected], rel=1e-4, abs=1e-5)


def test_blocks_far_in_a_large_pool_are_read_and_written_where_they_are() -> None:
    """Offsets beyond 2^31 elements: sums and products of places in the cache are 64 bits wide. Of the pool only what is
    touched takes memory."""
    kv_heads, block_tokens, dim = 2, 16, 64
    blocks = (1 << 31) // (block_tokens * dim) + 50
    pool = torch.empty(2 * kv_heads, blocks, block_tokens, dim, dtype=torch.float16)
    caches = pool[:kv_heads], pool[kv_heads:]
    near = [torch.zeros(kv_heads, 8, block_tokens, dim, dtype=torch.float16) for _ in range(2)]
    far = blocks - 8
    for at in range(2):
        caches[at][:, far:] = near[at]
    qkv = torch.randn(20, 4 + 2 * kv_heads, dim, generator=torch.Generator().manual_seed(3)).half()
    positions, frequencies = torch.arange(20), torch.ones(dim // 2) / 7
    slots = torch.arange(20) + block_tokens
    q = KERNELS["rope_kv"].triton()(qkv, positions, frequencies, slots + far * block_tokens, *caches)
    compare(q, KERNELS["rope_kv"].reference(qkv, positions, frequencies, slots, *near), torch.float16)
    for at in range(2):
        compare(caches[at][:, far:], near[at], torch.float16)
    table, lens, starts = (torch.tensor(values, dtype=torch.int32) for values in ([[1, 2]], [20], [0, 3]))
    for name in ("paged_decode_attention", "paged_prefill_attention"):
        asked = (q[17:].contiguous(), *caches, table + far, lens, dim**-0.5, starts, 3)
        expected = KERNELS[name].reference(asked[0], *near, table, *asked[4:])
        compare(KERNELS[name].triton()(*asked), expected, torch.float16)


@pytest.mark.parametrize("family", ["gemma3"])
def test_an_engine_through_the_kernels_says_what_transformers_says(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts in chunks, decodes and drafts of one engine, with every kernel of the GPU path: residuals, norms of heads and
    windows as well."""
    from engine.family_kit import MODELS
    from engine.native_kit import generate, make_core, random_prompts, run_all, work
    from engine.spec_kit import ScriptedDrafter, eager, foretold
    from rungway.engine.kernel_ops import KernelOps
    from rungway.kernels import ops

    used = set()

    def everywhere(name: str, device: torch.device) -> Any:
        used.add(name)
        return KERNELS[name].triton()

    monkeypatch.setattr(ops, "get", everywhere)
    model = MODELS[family]()
    prompts = [prompt[:9] for prompt in random_prompts(2, seed=3)]
    expected = {str(at): generate(model, prompt, 5) for at, prompt in enumerate(prompts)}
    speculation = eager(ScriptedDrafter(foretold(expected, 0.2)), tokens_max=2)
    core, _ = make_core(model, seqs=2, batched=11, ops=KernelOps(), speculation=speculation)
    heard = run_all(core, [work(name, prompts[int(name)], max_tokens=5) for name in expected])
    assert {name: heard.tokens(name) for name in expected} == expected
    assert {"rms_norm", "rope_kv", "paged_decode_attention"} <= used and speculation.accepted > 0
