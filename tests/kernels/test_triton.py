"""The Triton kernels without a GPU: run by Triton's interpreter (interpreted.py), and compiled for real GPUs.

Both need a process of their own: whether Triton interprets is decided by the environment when it is first imported.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed (it comes with the extra `dev`)")

ROOT = Path(__file__).parents[2]


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", *arguments]
    return subprocess.run(
        command, cwd=ROOT, env=kept | environment, capture_output=True, text=True, timeout=900, check=False
    )


def test_interpreted_kernels_match_their_references() -> None:
    result = run("pytest", "-q", "-p", "no:cacheprovider", "tests/kernels/interpreted.py", TRITON_INTERPRET="1")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "passed" in result.stdout and "skipped" not in result.stdout


def test_launches_compile_as_the_launch_code_makes_them() -> None:
    result = run("pytest", "-q", "-p", "no:cacheprovider", "tests/kernels/launched.py")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "passed" in result.stdout and "skipped" not in result.stdout


def test_gpu_check_runs_through_under_the_interpreter(tmp_path: Path) -> None:
    """All but the device: its processes, records, files and the search for tiles."""
    files = [f"--{name}={tmp_path / name}" for name in ("json", "markdown", "tiles")]
    result = run("rungway.kernels.gpu_check", "--dry", "--search", *files, "--only", "paged_decode_attention")
    said = json.loads((tmp_path / "json").read_text())
    assert (said["wrong"], said["failed"]) == (0, 0), result.stdout
    kinds = [record["kind"] for record in said["records"]]
    assert [kinds.count(kind) for kind in ("check", "rates", "time", "tile")] == [2, 1, 1, 1]
    assert "| paged_decode_attention |" in (tmp_path / "markdown").read_text()
    assert json.loads((tmp_path / "tiles").read_text()).keys() <= {"paged_decode_attention"}


def test_kernels_compile_for_real_gpus_within_their_budgets() -> None:
    """Ahead of time, without a device: what the interpreter lets pass and a GPU does not; registers, spills, shared memory,
    instructions. Every kernel for Hopper, those with matrix products that differ by architecture for the others."""
    from rungway.kernels.builds import builds

    result = run("rungway.kernels.compile_check", "90")
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count(" ok ") == len(builds(90))
    some = [
        "rope_kv",
        "decode",
        "prefill",
        "prefill_window_cap_256",
        "int8_linear_8",
        "fp8_rows_linear_64",
        "sample_pick",
    ]
    result = run("rungway.kernels.compile_check", "80", "100", *some)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count(" ok ") == 2 * len(some)


def test_compile_check_says_what_is_over_budget_or_missing() -> None:
    from rungway.kernels.builds import builds
    from rungway.kernels.compile_check import compile_one, problems

    build = next(build for build in builds(90) if build.name == "swiglu")
    used, found = compile_one(build, 90)
    assert found == [] and used["REG"] > 8
    tight = build._replace(registers=8, expects={0: ("wgmma",)})
    found = problems(tight, 80, used | {"STACK": 8, "SHARED": 200_000}, "no such instruction")
    assert len(found) == 4 and "registers" in found[1] and "wgmma" in found[3]


def test_compile_check_wants_architectures() -> None:
    assert run("rungway.kernels.compile_check").returncode == 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_gpu_check_says_when_there_is_no_gpu() -> None:
    result = run("rungway.kernels.gpu_check")
    assert (result.returncode, result.stdout) == (2, "")
    assert "no CUDA device" in result.stderr


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_kernels_on_the_gpu() -> None:
    result = run("rungway.kernels.gpu_check")
    assert result.returncode == 0, result.stdout + result.stderr
