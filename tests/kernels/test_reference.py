"""The references against independent formulae, and the registry without Triton."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from rungway.kernels import cases, ops, reference
from rungway.kernels.registry import KERNELS, KernelError, get


@pytest.mark.parametrize("case", cases.SMALL["rms_norm"], ids=lambda case: case.name)
def test_rms_norm_is_torchs(case: cases.Case) -> None:
    x, weight, eps, residual = case.make(torch.float64)
    total = x if residual is None else x + residual
    out, h = reference.rms_norm(x, weight, eps, residual)
    torch.testing.assert_close(h, total, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(out, F.rms_norm(total, (total.shape[1],), weight, eps), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", cases.SMALL["rope"][:2], ids=lambda case: case.name)
def test_rope_turns_complex_numbers(case: cases.Case) -> None:
    q, k, positions, frequencies = case.make(torch.float32)
    turn = torch.polar(torch.ones((), dtype=torch.float64), positions[:, None].double() * frequencies.double())[:, None]
    for given, got in zip((q, k), reference.rope(q, k, positions, frequencies), strict=True):
        half = given.shape[-1] // 2
        turned = torch.complex(given[..., :half].double(), given[..., half:].double()) * turn
        torch.testing.assert_close(got, torch.cat([turned.real, turned.imag], -1).float(), rtol=1e-3, atol=1e-3)


def test_rope_depends_on_distance_alone() -> None:
    q, k, _, frequencies = cases.rope(1, 2, 2, 64, 0).make(torch.float32)

    def score(at_q: int, at_k: int) -> torch.Tensor:
        turned_q, _ = reference.rope(q, k, torch.tensor([at_q]), frequencies)
        _, turned_k = reference.rope(q, k, torch.tensor([at_k]), frequencies)
        return (turned_q * turned_k).sum(-1)

    torch.testing.assert_close(score(7, 3), score(107, 103), rtol=1e-3, atol=1e-3)
    assert not torch.allclose(score(7, 3), score(7, 4), atol=1e-2)


@pytest.mark.parametrize("case", cases.SMALL["swiglu"], ids=lambda case: case.name)
def test_swiglu_is_silu_times_up(case: cases.Case) -> None:
    (gate_up,) = case.make(torch.float32)
    size = gate_up.shape[1] // 2
    torch.testing.assert_close(reference.swiglu(gate_up), F.silu(gate_up[:, :size]) * gate_up[:, size:])


@pytest.mark.parametrize("case", cases.SMALL["paged_decode_attention"], ids=lambda case: case.name)
def test_paged_attention_is_attention_over_the_gathered_tokens(case: cases.Case) -> None:
    q, k_cache, v_cache, tables, lens, scale = case.make(torch.float32)
    got = reference.paged_decode_attention(q, k_cache, v_cache, tables, lens, scale)
    block_tokens = k_cache.shape[2]
    for row, length in enumerate(lens.tolist()):
        if length == 0:
            assert not got[row].any()
            continue
        places = [(int(tables[row, token // block_tokens]), token % block_tokens) for token in range(length)]
        keys = torch.stack([k_cache[:, block, at] for block, at in places], 1)
        values = torch.stack([v_cache[:, block, at] for block, at in places], 1)
        expected = F.scaled_dot_product_attention(
            q[row][None, :, None], keys[None], values[None], scale=scale, enable_gqa=True
        )
        torch.testing.assert_close(got[row], expected[0, :, 0], rtol=1e-4, atol=1e-5)


def test_results_have_the_inputs_dtype() -> None:
    for name, kernel in KERNELS.items():
        args = cases.SMALL[name][0].make(torch.bfloat16)
        results = kernel.reference(*args)
        for result in results if isinstance(results, tuple) else (results,):
            assert result.dtype == torch.bfloat16


def test_every_kernel_has_formula_source_and_cases() -> None:
    for name, kernel in KERNELS.items():
        assert "Source: " in kernel.formula, name
        assert kernel.small and kernel.large
        for case in kernel.large:
            assert case.bytes_moved(torch.bfloat16) > 1_000_000


def test_ops_go_where_the_tensor_is() -> None:
    assert get("swiglu", "cpu") is reference.swiglu
    x = torch.ones(1, 4)
    torch.testing.assert_close(ops.swiglu(x), reference.swiglu(x))
    torch.testing.assert_close(ops.rms_norm(x, x[0], 0.0, x)[1], 2 * x)
    q, k, positions, frequencies = cases.SMALL["rope"][1].make(torch.float32)
    torch.testing.assert_close(ops.rope(q, k, positions, frequencies), reference.rope(q, k, positions, frequencies))
    args = cases.SMALL["paged_decode_attention"][0].make(torch.float32)
    torch.testing.assert_close(ops.paged_decode_attention(*args), reference.paged_decode_attention(*args))
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


@pytest.mark.parametrize("case", cases.LARGE["paged_decode_attention"], ids=lambda case: case.name)
def test_traffic_is_what_has_to_be_read_and_written(case: cases.Case) -> None:
    batch, rest = case.name.split("x", 1)
    heads, kv_heads, dim, length = (
        int(part) for part in rest.replace("/", " ").replace("x", " ").replace("@", " ").split()
    )
    tokens = int(batch) * length
    assert case.bytes_moved(torch.bfloat16) == 2 * (2 * tokens * kv_heads * dim + 2 * int(batch) * heads * dim)
