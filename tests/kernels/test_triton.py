"""The Triton kernels without a GPU: run by Triton's interpreter (interpreted.py), and compiled for real GPUs.

Both need a process of their own: whether Triton interprets is decided by the environment when it is first imported.
"""

from __future__ import annotations

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
        command, cwd=ROOT, env=kept | environment, capture_output=True, text=True, timeout=300, check=False
    )


def test_interpreted_kernels_match_their_references() -> None:
    result = run("pytest", "-q", "-p", "no:cacheprovider", "tests/kernels/interpreted.py", TRITON_INTERPRET="1")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "passed" in result.stdout and "skipped" not in result.stdout


def test_kernels_compile_for_real_gpus_without_spills() -> None:
    """Ahead of time, without a device: what the interpreter lets pass and a GPU does not."""
    result = run("rungway.kernels.compile_check", "80", "90")
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count(" ok ") == 2 * 5  # five kernels, two architectures


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
