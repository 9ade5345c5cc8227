"""What `make test-gpu` makes of its measurements; the measurements themselves need a GPU."""

from __future__ import annotations

import pytest
import torch

from rungway.kernels import cases
from rungway.kernels.case import Metric
from rungway.kernels.gpu_check import main, markdown, results, widened
from rungway.kernels.gpu_time import Rates, timing_of
from rungway.kernels.registry import KERNELS

DEVICE = Rates("a device", copy=4e12, gemm=8e14)


def test_fractions_are_of_the_copy_or_of_the_product() -> None:
    decode = next(case for case in cases.LARGE["paged_decode_attention"] if case.bar)
    took = decode.bytes_moved(torch.bfloat16) / 2e12
    timing = timing_of("paged_decode_attention", decode, took, DEVICE)
    assert timing.fraction == pytest.approx(0.5) and timing.metric == "copy" and not timing.reached
    assert timing_of("paged_decode_attention", decode, took / 1.7, DEVICE).reached
    prefill = next(case for case in cases.LARGE["paged_prefill_attention"] if case.bar)
    assert prefill.metric is Metric.FLOPS
    assert timing_of("paged_prefill_attention", prefill, prefill.flops() / 4e14, DEVICE).fraction == pytest.approx(0.5)


def test_causal_attention_counts_half_the_square() -> None:
    case = next(case for case in cases.LARGE["paged_prefill_attention"] if case.bar)
    heads, dim, length = 32, 128, 8192
    assert case.flops() == pytest.approx(2 * heads * dim * length * length, rel=1e-3)


def test_the_bars_are_those_that_were_set() -> None:
    bars = {name: {case.bar for case in kernel.large if case.bar} for name, kernel in KERNELS.items()}
    assert bars["paged_decode_attention"] == {0.8} and bars["paged_prefill_attention"] == {0.55}
    assert bars["int8_linear"] == {0.65} and bars["int4_linear"] == {0.5}
    assert all(bars[name] == {0.85} for name in ("rms_norm", "rope", "rope_kv", "swiglu", "geglu"))


def test_the_table_has_a_row_for_each_timing() -> None:
    kernel = KERNELS["rms_norm"]
    timings = [timing_of("rms_norm", case, 1e-4, DEVICE) for case in kernel.large]
    lines = markdown(DEVICE, timings).splitlines()
    assert lines[0].startswith("a device: copy 4.00 TB/s") and len(lines) == 4 + len(kernel.large)
    assert lines[4].startswith("| rms_norm | 8192x4096+residual | 100 | copy | ")


def test_what_a_kernel_writes_counts_as_its_result() -> None:
    kernel = KERNELS["rope_kv"]
    args = kernel.small[1].make(torch.float16)
    wide = widened(args)
    got = results(kernel, kernel.reference(*wide), wide)
    assert len(got) == 3 and got[1] is wide[4] and all(one.dtype == torch.float32 for one in got)
    assert not torch.equal(wide[4], args[4].float())  # and the arguments themselves are left alone


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "no CUDA device" in capsys.readouterr().err
