"""Compiles the kernels of this folder with the machine's compiler, once per source, compiler and processor.

The result lies in a cache folder under a name made of all three; it appears there whole or not at all, so that engines
may start side by side. Whatever prevents it is a BuildError with the reason, and the caller does without.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

NEEDS = ("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni")
FLAGS = (
    "-O3",
    "-march=native",
    "-std=c++20",
    "-ffp-contract=off",  # what is fused is written as such: results do not depend on the compiler's mood
    "-fno-math-errno",
    "-shared",
    "-fPIC",
    "-fvisibility=hidden",
    "-pthread",
)
TIMEOUT_S = 180.0
_COMPILERS = ("g++", "clang++", "c++")
_HERE = Path(__file__).parent
_CPU_INFO = Path("/proc/cpuinfo")


class BuildError(RuntimeError):
    """Why there are no compiled kernels here."""


def cache_dir() -> Path:
    """`RUNGWAY_KERNELS_DIR`, else beside the models in the user's cache."""
    given = os.environ.get("RUNGWAY_KERNELS_DIR")
    return Path(given) if given else Path.home() / ".cache" / "rungway" / "kernels"


def processor_flags(info: Path = _CPU_INFO) -> frozenset[str]:
    """What the processor can do, by Linux' names. Empty where that is not known."""
    try:
        lines = info.read_text().splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), []))


def sources() -> list[Path]:
    return sorted([*_HERE.glob("*.h"), *_HERE.glob("*.cpp")])


def compiler() -> str:
    """Path of a C++ compiler: `CXX`, else the first known one. Raises BuildError."""
    wanted = os.environ.get("CXX")
    for name in (wanted,) if wanted else _COMPILERS:
        found = shutil.which(name)
        if found:
            return found
    raise BuildError(f"there is no C++ compiler ({wanted or ', '.join(_COMPILERS)})")


def built(folder: Path | None = None, *, extra: tuple[str, ...] = (), timeout_s: float = TIMEOUT_S) -> Path:
    """The shared library, compiled now if the cache lacks it; seconds then, else at once. `extra` compiler flags. Raises
    BuildError."""
    able = processor_flags()
    missing = [name for name in NEEDS if name not in able]
    if missing:
        raise BuildError(f"the processor lacks {', '.join(missing)}")
    command = [compiler(), *FLAGS, *extra]
    target = (folder or cache_dir()) / f"cpu-{_key(command, able)}.so"
    if target.exists():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as work:
            made = Path(work) / "cpu.so"
            _compile(
                [*command, "-o", str(made), *(str(path) for path in sources() if path.suffix == ".cpp")], timeout_s
            )
            os.replace(made, target)
    except OSError as error:
        raise BuildError(f"compiled kernels cannot be kept in {target.parent}: {error}") from error
    return target


def _compile(command: list[str], timeout_s: float) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired as error:
        raise BuildError(f"{command[0]} took longer than {timeout_s:.0f} s") from error
    if done.returncode != 0:
        said = next((line for line in done.stderr.splitlines() if "error" in line), f"exit status {done.returncode}")
        raise BuildError(f"{command[0]} failed: {said}")


def _key(command: list[str], able: frozenset[str]) -> str:
    try:
        version = subprocess.run([command[0], "--version"], capture_output=True, timeout=30, check=False).stdout
    except subprocess.TimeoutExpired as error:
        raise BuildError(f"{command[0]} does not answer") from error
    parts = [" ".join(command).encode(), version, " ".join(sorted(able)).encode()]
    parts += [path.name.encode() + b"\0" + path.read_bytes() for path in sources()]
    return hashlib.sha256(b"\0\0".join(parts)).hexdigest()[:20]
