"""What `make test-gpu` does around its measurements; the measurements themselves need a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rungway.kernels import cases, gpu_check, tiles
from rungway.kernels.case import Metric
from rungway.kernels.gpu_check import all_parts, failed, main, markdown, measured_tiles, records_in, run_part
from rungway.kernels.gpu_parts import results, widened
from rungway.kernels.gpu_time import Rates, timing_of
from rungway.kernels.registry import KERNELS

DEVICE = Rates("a device", copy=4e12, gemm=8e14)
RATES: dict[str, Any] = {"kernel": "rms_norm", "kind": "rates", **DEVICE._asdict()}


def timed(name: str, seconds: float) -> list[dict[str, Any]]:
    timings = [timing_of(name, case, seconds, DEVICE) for case in KERNELS[name].large]
    return [{"kind": "time", **timing._asdict(), "reached": timing.reached} for timing in timings]


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
    lines = markdown([RATES, failed("rope", "1x1", "no"), *timed("rms_norm", 1e-4)]).splitlines()
    assert lines[0].startswith("a device: copy 4.00 TB/s") and len(lines) == 4 + len(KERNELS["rms_norm"].large)
    assert lines[4].startswith("| rms_norm | 8192x4096+residual | 100 | copy | ")


def test_what_is_written_is_whole_at_any_moment(tmp_path: Path) -> None:
    """Who reads between two processes, or after a kill, finds all that was written before."""
    out = tmp_path / "all.json"
    out.write_text("before")
    kept = out.open()
    gpu_check.write(gpu_check.parsed(["--json", str(out)]), [failed("rope", "check", "ended")])
    assert kept.read() == "before", "another file took its place"
    assert json.loads(out.read_text())["failed"] == 1 and list(tmp_path.iterdir()) == [out]
    kept.close()


def test_what_a_kernel_writes_counts_as_its_result() -> None:
    kernel = KERNELS["rope_kv"]
    args = kernel.small[1].make(torch.float16)
    wide = widened(args)
    got = results(kernel, kernel.reference(*wide), wide)
    assert len(got) == 3 and got[1] is wide[4] and all(one.dtype == torch.float32 for one in got)
    assert not torch.equal(wide[4], args[4].float())  # and the arguments themselves are left alone


def test_one_kernel_that_fails_leaves_the_others_and_is_counted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Files are there after each process, whatever the next one does."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    pytest.importorskip("triton")
    out = tmp_path / "all.json"
    seen = []

    def run(part: str, kernel: str, seconds: float) -> list[dict[str, Any]]:
        assert 0 < seconds <= 150
        seen.append((part, kernel, len(json.loads(out.read_text())["records"]) if out.exists() else 0))
        if kernel == "rope":
            return [failed(kernel, part, "ended with -11: ")]
        if part == "check":
            return [{"kernel": kernel, "kind": "check", "case": "a", "worst": 0.0, "allowed": 1.0, "good": True}]
        return [RATES, *timed(kernel, 1e-9)]

    assert main(["--only", "rms_norm", "rope", "swiglu", "--json", str(out)], run) == 1
    printed = capsys.readouterr().out
    assert "FAILED rope time: ended with -11" in printed and "2 failed" in printed and "ok     swiglu a" in printed
    assert [kernel for part, kernel, _ in seen if part == "time"] == ["rms_norm", "rope", "swiglu"]
    assert seen[-1][2] > seen[-2][2] > 0
    assert json.loads(out.read_text())["failed"] == 2


def test_it_ends_in_time_and_says_what_it_did_not_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, begun = [0.0], threading.Barrier(4, lambda: now_s.__setitem__(0, 1.0))
    monkeypatch.setattr(gpu_check, "time", SimpleNamespace(monotonic=lambda: now_s[0]))

    def slow(part: str, kernel: str, seconds: float) -> list[dict[str, Any]]:
        begun.wait(60)  # the time is over as soon as four have begun
        return []

    parts = list(all_parts(list(KERNELS), slow, 0.1, tiles=True))
    late = [record for part in parts for record in part]
    assert len(parts) == 2 * len(KERNELS) + 5 and len(late) == len(parts) - 4  # four had begun
    assert all(record["why"] == "not run: out of time" for record in late)


def test_a_process_that_ends_badly_or_never_is_a_record(monkeypatch: pytest.MonkeyPatch) -> None:
    def behave(code: str, limit_s: float) -> list[dict[str, Any]]:
        plain = subprocess.Popen

        def start(command: list[str], **more: Any) -> Any:
            return plain([sys.executable, "-I", "-S", "-c", code], **more)

        with monkeypatch.context() as patched:
            patched.setattr(gpu_check.subprocess, "Popen", start)
            return run_part("check", "rope", limit_s)

    said = 'print(\'{"kernel": "rope", "kind": "check"}\\n{"kernel": "ro\', flush=True)\n'
    crashed = behave(said + "import os; os.abort()", 60.0)
    assert [record["kind"] for record in crashed] == ["check", "failed"] and "ended with -6" in crashed[1]["why"]
    hung = behave(said + "import time; time.sleep(600)", 3.0)
    assert [record["kind"] for record in hung] == ["check", "failed"] and "not done after 3 s" in hung[1]["why"]


def test_lines_that_are_no_records_are_left_out() -> None:
    assert records_in('noise\n{"kind": "check"}\n{"kind": "ti\n[1]\n3\n') == [{"kind": "check"}]


def test_measured_tiles_take_the_place_of_reasoned_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from rungway.kernels import decode_attention, weight_only

    q, x, codes = torch.empty(1, 8, 128).half(), torch.empty(8, 4096).half(), torch.empty(4096, 4096).char()
    key, base = decode_attention.plan("paged_decode_attention", q)
    assert key == (90, 128, 2) and base == decode_attention.config_for(128, 2)
    tile = base._replace(warps=8)
    record = {
        "kernel": "paged_decode_attention",
        "kind": "tile",
        "key": tiles.key_of(key),
        "tile": list(tile),
        "gain": 0.1,
    }
    found = tiles.merged(
        {"int8_linear": {"90,16": [128, 16, 64, 1, 8, 3]}},
        measured_tiles([record, record | {"key": "80,1", "gain": 0.0}]),
    )
    assert found["paged_decode_attention"] == {"90,128,2": list(tile)}
    monkeypatch.setattr(tiles, "table", lambda: found)
    assert decode_attention.plan("paged_decode_attention", q)[1] == tile
    assert weight_only.plan("int8_linear", x, codes)[1] == weight_only.Config(128, 16, 64, 4, 8, 3)  # its own split
    assert tiles.changes(base, {"warps": (4, 8), "tile": (64,)}) == [{}, {"warps": 8}]


def test_the_table_in_use_names_kernels_and_whole_tiles() -> None:
    for name, by_key in tiles.table().items():
        assert name in KERNELS and all(len(tile) in (4, 5, 6) for tile in by_key.values())


def test_it_needs_torch_and_triton_alone() -> None:
    """A machine with a GPU may have nothing else."""
    code = (
        "import sys\nclass No:\n def find_spec(self, name, *_):\n"
        "  if name.split('.')[0] in ('msgspec', 'pydantic', 'transformers', 'ray', 'zmq'): raise ImportError(name)\n"
        "sys.meta_path.insert(0, No())\nimport rungway.kernels.gpu_check, rungway.kernels.decode_attention, rungway.kernels.sampling"
    )
    pytest.importorskip("triton")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "no CUDA device" in capsys.readouterr().err
