"""The references against independent formulae, and the registry without Triton."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from rungway.kernels import cases, cases_attention, ops, reference
from rungway.kernels.attention_reference import paged_attention
from rungway.kernels.case import Case
from rungway.kernels.registry import KERNELS, KernelError, get
from rungway.kernels.sampling_reference import sample


@pytest.mark.parametrize("case", cases.SMALL["rms_norm"], ids=lambda case: case.name)
def test_rms_norm_is_torchs(case: Case) -> None:
    x, weight, eps, residual = case.make(torch.float64)
    total = x if residual is None else x + residual
    out, h = reference.rms_norm(x, weight, eps, residual)
    torch.testing.assert_close(h, total, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(out, F.rms_norm(total, (total.shape[1],), weight, eps), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", cases.SMALL["rope"][:2], ids=lambda case: case.name)
def test_rope_turns_complex_numbers(case: Case) -> None:
    q, k, positions, frequencies = case.make(torch.float32)
    turn = torch.polar(torch.ones((), dtype=torch.float64), positions[:, None].double() * frequencies.double())[:, None]
    for given, got in zip((q, k), reference.rope(q, k, positions, frequencies), strict=True):
        half = given.shape[-1] // 2
        turned = torch.complex(given[..., :half].double(), given[..., half:].double()) * turn
        torch.testing.assert_close(got, torch.cat([turned.real, turned.imag], -1).float(), rtol=1e-3, atol=1e-3)


def test_rope_depends_on_distance_alone() -> None:
    q, k, _, frequencies = cases_attention.rope(1, 2, 2, 64, 0).make(torch.float32)

    def score(at_q: int, at_k: int) -> torch.Tensor:
        turned_q, _ = reference.rope(q, k, torch.tensor([at_q]), frequencies)
        _, turned_k = reference.rope(q, k, torch.tensor([at_k]), frequencies)
        return (turned_q * turned_k).sum(-1)

    torch.testing.assert_close(score(7, 3), score(107, 103), rtol=1e-3, atol=1e-3)
    assert not torch.allclose(score(7, 3), score(7, 4), atol=1e-2)


@pytest.mark.parametrize("case", cases.SMALL["swiglu"], ids=lambda case: case.name)
def test_swiglu_is_silu_times_up(case: Case) -> None:
    (gate_up,) = case.make(torch.float32)
    size = gate_up.shape[1] // 2
    torch.testing.assert_close(reference.swiglu(gate_up), F.silu(gate_up[:, :size]) * gate_up[:, size:])


ATTENTION = [*cases.SMALL["paged_decode_attention"], *cases.SMALL["paged_prefill_attention"]]


@pytest.mark.parametrize("case", ATTENTION, ids=lambda case: case.name)
def test_paged_attention_is_attention_over_the_gathered_tokens(case: Case) -> None:
    q, k_cache, v_cache, tables, lens, scale, starts, most, window, cap = case.make(torch.float32)
    got = paged_attention(q, k_cache, v_cache, tables, lens, scale, starts, most, window, cap)
    block_tokens = k_cache.shape[2]
    starts = torch.arange(len(lens) + 1) if starts is None else starts
    assert not got[int(starts[-1]) :].any()
    for row, length in enumerate(lens.tolist()):
        for at in range(int(starts[row]), int(starts[row + 1])):
            position = length - int(starts[row + 1]) + at
            seen = range(max(0, position - window + 1) if window else 0, position + 1)
            if length == 0:
                assert not got[at].any()
                continue
            places = [(int(tables[row, token // block_tokens]), token % block_tokens) for token in seen]
            keys = torch.stack([k_cache[:, block, place] for block, place in places], 1)
            values = torch.stack([v_cache[:, block, place] for block, place in places], 1)
            if cap:
                scores = torch.einsum("ghd,gkd->ghk", q[at].view(len(keys), -1, q.shape[-1]), keys) * scale
                expected = (torch.softmax(cap * torch.tanh(scores / cap), -1) @ values).reshape(got[at].shape)
            else:
                expected = F.scaled_dot_product_attention(
                    q[at][None, :, None], keys[None], values[None], scale=scale, enable_gqa=True
                )[0, :, 0]
            torch.testing.assert_close(got[at], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("case", cases.SMALL["geglu"], ids=lambda case: case.name)
def test_geglu_is_gelu_times_up(case: Case) -> None:
    (gate_up,) = case.make(torch.float32)
    size = gate_up.shape[1] // 2
    expected = F.gelu(gate_up[:, :size], approximate="tanh") * gate_up[:, size:]
    torch.testing.assert_close(reference.geglu(gate_up), expected)


def test_rope_kv_rotates_what_rope_rotates_and_writes_to_slots() -> None:
    qkv, positions, frequencies, slots, k_cache, v_cache, _, _ = cases.SMALL["rope_kv"][1].make(torch.float32)
    kv_heads, heads = k_cache.shape[0], qkv.shape[1] - 2 * k_cache.shape[0]
    q, k = reference.rope(qkv[:, :heads], qkv[:, heads : heads + kv_heads], positions, frequencies)
    before = v_cache.clone()
    assert torch.equal(reference.rope_kv(qkv, positions, frequencies, slots, k_cache, v_cache), q)
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            assert torch.equal(k_cache[:, slot // 16, slot % 16], k[token])
            assert torch.equal(v_cache[:, slot // 16, slot % 16], qkv[token, heads + kv_heads :])
    assert (v_cache != before).any(-1)[0].sum() == (slots >= 0).sum()


def test_rope_kv_normalises_heads_first() -> None:
    qkv, positions, frequencies, slots, k_cache, v_cache, norms, eps = cases.SMALL["rope_kv"][2].make(torch.float32)
    heads = qkv.shape[1] - 2 * k_cache.shape[0]
    got = reference.rope_kv(qkv, positions, frequencies, slots, k_cache, v_cache, norms, eps)
    q = F.rms_norm(qkv[:, :heads], (qkv.shape[2],), None, eps) * norms[:heads]
    torch.testing.assert_close(got, reference.rope(q, q, positions, frequencies)[0], rtol=1e-4, atol=1e-5)


def test_samples_follow_the_distribution_that_was_asked_for() -> None:
    """Counts over many points in 0 .. 1: of the kept tokens, in proportion to their probability."""
    logits = torch.tensor([[0.0, 2.0, 1.0, -1.0, 1.5]])
    count = 4000
    points = (torch.arange(count, dtype=torch.float64) + 0.5) / count

    def shares(heat: float, top_k: int, top_p: float, min_p: float) -> list[float]:
        columns = (torch.full((count,), value) for value in (heat, top_k, top_p, min_p))
        heat_c, top_k_c, top_p_c, min_p_c = columns
        tokens, logprobs = sample(logits.expand(count, 5), heat_c, top_k_c, top_p_c, min_p_c, points)
        torch.testing.assert_close(logprobs, torch.log_softmax(logits, -1)[0][tokens])
        return (torch.bincount(tokens, minlength=5) / count).tolist()

    p = torch.softmax(logits[0] / 0.8, -1)
    assert shares(0.8, 0, 1.0, 0.0) == pytest.approx(p.tolist(), abs=1e-3)
    best = p * torch.tensor([0.0, 1.0, 0.0, 0.0, 1.0])
    for asked in ((0.8, 2, 1.0, 0.0), (0.8, 0, 0.7, 0.0), (0.8, 0, 1.0, 0.5)):
        assert shares(*asked) == pytest.approx((best / best.sum()).tolist(), abs=1e-3)
    assert shares(0.0, 0, 1.0, 0.0) == [0.0, 1.0, 0.0, 0.0, 0.0]


def test_results_have_the_inputs_dtype() -> None:
    for name, kernel in KERNELS.items():
        args = cases.SMALL[name][0].make(torch.bfloat16)
        results = kernel.reference(*args)
        for result in results if isinstance(results, tuple) else (results,):
            assert result.dtype in (torch.bfloat16, torch.int64) or name == "sample"


def test_every_kernel_has_formula_source_and_cases() -> None:
    for name, kernel in KERNELS.items():
        assert "Source: " in kernel.formula, name
        assert kernel.small and kernel.large
        assert any(case.bar for case in kernel.large) or name == "sample"
        for case in kernel.large:
            assert case.bytes_moved(torch.bfloat16) > 100_000


def test_ops_go_where_the_tensor_is() -> None:
    assert get("swiglu", "cpu") is reference.swiglu
    x = torch.ones(1, 4)
    torch.testing.assert_close(ops.swiglu(x), reference.swiglu(x))
    torch.testing.assert_close(ops.rms_norm(x, x[0], 0.0, x)[1], 2 * x)
    q, k, positions, frequencies = cases.SMALL["rope"][1].make(torch.float32)
    torch.testing.assert_close(ops.rope(q, k, positions, frequencies), reference.rope(q, k, positions, frequencies))
    for name in ("rope_kv", "geglu", "paged_decode_attention", "paged_prefill_attention", "sample"):
        args = cases.SMALL[name][0].make(torch.float32)
        torch.testing.assert_close(getattr(ops, name)(*args), KERNELS[name].reference(*args))
    with pytest.raises(KeyError):
        get("conv", "cpu")


def test_without_triton_a_gpu_is_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise ModuleNotFoundError("No module named 'triton'", name="triton")

    monkeypatch.setattr(importlib, "import_module", absent)
    with pytest.raises(KernelError, match="needs the package triton"):
        get("rope", "cuda")


def test_importing_the_registry_does_not_import_triton() -> None:
    code = "import sys, rungway.kernels.ops; sys.exit('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


@pytest.mark.parametrize("case", cases.SMALL["paged_decode_attention"][:5], ids=lambda case: case.name)
def test_traffic_is_what_has_to_be_read_and_written(case: Case) -> None:
    q, k_cache, _, _, lens, *_ = case.make(torch.bfloat16)
    row = k_cache.shape[0] * k_cache.shape[3]
    assert case.bytes_moved(torch.bfloat16) == 2 * (2 * int(lens.sum()) * row + 2 * q.numel())
