"""`python -m rungway.kernels.compile_check 80 90 [name ...]`: compile the kernels for these NVIDIA architectures, on any
machine; all of them, or those named.

Needs Triton, but no GPU. Rejects what Triton's interpreter lets pass, and kernels that spill registers to memory, take more
registers than their budget or more shared memory than a multiprocessor has, or lack the instructions that make them fast
(builds.py). Exits 0 when all is well, 1 when not, 2 for bad usage or without Triton.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rungway.kernels.builds import Build

SHARED_BYTES_MAX = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}


def resources(cubin: bytes) -> dict[str, int]:
    """REG, STACK, SHARED and LOCAL of a compiled kernel, as cuobjdump (shipped with Triton) prints them."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        printed = subprocess.run(
            [tool, "--dump-resource-usage", file.name], capture_output=True, text=True, timeout=60, check=True
        ).stdout
    return {name: int(value) for name, value in re.findall(r"\b(REG|STACK|SHARED|LOCAL):(\d+)", printed)}


def compile_one(build: Build, architecture: int) -> tuple[dict[str, int], list[str]]:
    """(resources, what is wrong with them)."""
    from triton import compile as triton_compile
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = build.signature | dict.fromkeys(build.constants, "constexpr")
    ordered = {name: signature[name] for name in build.function.arg_names}
    # Pointers and sizes are multiples of 16 in practice; without saying so loads would not be vectorised.
    hints = {
        (place,): [["tt.divisibility", 16]]
        for place, (name, kind) in enumerate(ordered.items())
        if kind.startswith("*") or (name in build.cuts and kind != "constexpr")
    }
    source = ASTSource(build.function, ordered, build.constants, hints)
    target = GPUTarget("cuda", architecture, 32)
    options = {"num_warps": build.warps, "num_stages": build.stages, "enable_fp_fusion": True}
    compiled = triton_compile(source, target=target, options=options)
    used = resources(compiled.asm["cubin"]) | {"SHARED": int(compiled.metadata.shared)}
    return used, problems(build, architecture, used, compiled.asm["ptx"])


def problems(build: Build, architecture: int, used: dict[str, int], ptx: str) -> list[str]:
    """What is over budget or missing."""
    found = []
    if used.get("LOCAL", 0) or used.get("STACK", 0) > build.stack:
        found.append(f"spills: {used}")
    if used["REG"] > build.registers:
        found.append(f"{used['REG']} registers, budget {build.registers}")
    if used["SHARED"] > SHARED_BYTES_MAX.get(architecture, SHARED_BYTES_MAX[80]):
        found.append(f"{used['SHARED']} bytes of shared memory")
    for pattern in (*build.expects.get(0, ()), *build.expects.get(architecture, ())):
        if not re.search(pattern, ptx):
            found.append(f"no {pattern} in the machine code")
    return found


def main(arguments: list[str]) -> int:
    architectures = [argument for argument in arguments if argument.isdigit()]
    names = [argument for argument in arguments if not argument.isdigit()]
    if not architectures:
        print("usage: python -m rungway.kernels.compile_check 80 [90 ...] [name ...]", file=sys.stderr)
        return 2
    try:
        from rungway.kernels.builds import builds
    except ModuleNotFoundError as error:
        print(f"cannot compile: {error}", file=sys.stderr)
        return 2
    wrong = 0
    for architecture in map(int, architectures):
        for build in builds(architecture):
            if names and build.name not in names:
                continue
            used, found = compile_one(build, architecture)
            wrong += bool(found)
            verdict = "; ".join(found) or "ok"
            print(f"sm_{architecture} {build.name:22} {verdict}  registers {used['REG']}, shared {used['SHARED']} B")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
