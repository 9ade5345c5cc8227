"""`python -m rungway.kernels.compile_check 80 90`: compile every kernel for these NVIDIA architectures, on any machine.

Needs Triton, but no GPU. Rejects what Triton's interpreter lets pass, and kernels that spill registers to memory or take
more shared memory than a multiprocessor has. Exits 0 when all is well, 1 when not, 2 for bad usage or without Triton.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

SHARED_BYTES_MAX = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}


class Build(NamedTuple):
    """One kernel as it is launched: argument types and constants, for bfloat16 data."""

    name: str
    function: Any
    signature: dict[str, str]
    constants: dict[str, int | bool]
    warps: int


def builds() -> list[Build]:
    """Every kernel with the constants of a Llama of head size 128 and hidden size 4096."""
    from rungway.kernels import paged_attention, rms_norm, rope, swiglu

    def pointers(kind: str, *names: str) -> dict[str, str]:
        return dict.fromkeys(names, kind)

    norm = pointers("*bf16", "x_ptr", "residual_ptr", "weight_ptr", "out_ptr", "h_ptr") | {
        "hidden": "i32",
        "eps": "fp32",
    }
    turn = pointers("*bf16", "q_ptr", "k_ptr", "q_out_ptr", "k_out_ptr")
    turn |= {"positions_ptr": "*i64", "frequencies_ptr": "*fp32", "heads": "i32", "kv_heads": "i32"}
    attend = pointers("*bf16", "q_ptr", "k_ptr", "v_ptr") | pointers("*i32", "tables_ptr", "lens_ptr")
    attend |= pointers("*fp32", "max_ptr", "sum_ptr", "acc_ptr") | {"scale": "fp32"}
    attend |= pointers("i32", "heads", "table_width", "segments")
    attend |= pointers("i32", "stride_head", "stride_block", "stride_token", "block_tokens")
    merge = pointers("*fp32", "max_ptr", "sum_ptr", "acc_ptr") | {"out_ptr": "*bf16", "segments": "i32"}
    sizes = {"SEGMENT": paged_attention.SEGMENT, "TILE": paged_attention.TILE}
    head = {"DIM": 128, "DIM_BLOCK": 128}
    glu = {"gate_up_ptr": "*bf16", "out_ptr": "*bf16", "size": "i32"}
    turned = {"HALF": 64, "HALF_BLOCK": 64, "HEADS_BLOCK": 32}
    group = {"GROUP": 4, "GROUP_BLOCK": 16}
    return [
        Build("rms_norm", rms_norm._rms_norm, norm, {"HAS_RESIDUAL": True, "BLOCK": 4096}, 8),
        Build("rope", rope._rope, turn, turned, 4),
        Build("swiglu", swiglu._swiglu, glu, {"BLOCK": swiglu.BLOCK}, 4),
        Build("paged_attend", paged_attention._attend, attend, group | head | sizes, 4),
        Build("paged_merge", paged_attention._merge, merge, head | {"SEGMENTS_BLOCK": 64}, 4),
    ]


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
        if kind.startswith("*") or name.startswith("stride") or name == "hidden"
    }
    source = ASTSource(build.function, ordered, build.constants, hints)
    target = GPUTarget("cuda", architecture, 32)
    compiled = triton_compile(source, target=target, options={"num_warps": build.warps, "enable_fp_fusion": True})
    used = resources(compiled.asm["cubin"])
    shared = int(compiled.metadata.shared)
    problems = []
    if used.get("LOCAL", 0) or used.get("STACK", 0):
        problems.append(f"spills: {used}")
    if shared > SHARED_BYTES_MAX.get(architecture, SHARED_BYTES_MAX[80]):
        problems.append(f"{shared} bytes of shared memory")
    return used | {"SHARED": shared}, problems


def main(arguments: list[str]) -> int:
    if not arguments or not all(argument.isdigit() for argument in arguments):
        print("usage: python -m rungway.kernels.compile_check 80 [90 ...]", file=sys.stderr)
        return 2
    try:
        wanted = builds()
    except ModuleNotFoundError as error:
        print(f"cannot compile: {error}", file=sys.stderr)
        return 2
    wrong = 0
    for architecture in map(int, arguments):
        for build in wanted:
            used, problems = compile_one(build, architecture)
            wrong += len(problems)
            verdict = "; ".join(problems) or "ok"
            print(f"sm_{architecture} {build.name:14} {verdict}  registers {used['REG']}, shared {used['SHARED']} B")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
