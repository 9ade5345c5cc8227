"""`python -m rungway.kernels.launches 90 [kernel ...]`: compile the kernels as their launch code starts them on the cases of
this package, on any machine.

compile_check.py compiles what builds.py says; here the launch code itself runs, over CPU tensors and without a device: Triton
specialises each launch as it would there (types of the tensors, sizes that are 1 or multiples of 16, tiles from the tables)
and compiles it, and nothing is started. What a first run on a device would refuse, it refuses here. Exits 0 when every launch
compiles and fits a multiprocessor, 1 when not, 2 for bad usage or without Triton.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from rungway.kernels.case import Case
from rungway.kernels.compile_check import SHARED_BYTES_MAX, resources
from rungway.kernels.registry import KERNELS, Kernel

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class Launch(NamedTuple):
    """One kernel as compiled for a launch: bytes of shared memory, registers and bytes of stack of a thread."""

    kernel: str
    shared: int
    registers: int
    stack: int

    def __str__(self) -> str:
        return f"{self.kernel}: {self.registers} registers, stack {self.stack} B, shared {self.shared} B"


class _NoDevice:
    """As much of Triton's driver as compiling for a launch asks for."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def compiled_only(architecture: int) -> Iterator[list[Launch]]:
    """Within it, Triton launches compile for `architecture` and do nothing; the list fills with those that were new. Once in
    a process: the driver stays. Compilation errors pass through."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    found: dict[str, Launch] = {}
    listed: list[Launch] = []
    plain = JITFunction.run

    def run(function: Any, *args: Any, grid: Any, warmup: bool, **more: Any) -> Any:
        compiled = plain(function, *args, grid=grid, warmup=True, **more)
        if compiled.hash not in found:
            used = resources(compiled.asm["cubin"])
            launch = Launch(function.__name__, int(compiled.metadata.shared), used["REG"], used["STACK"])
            found[compiled.hash] = launch
            listed.append(launch)
        return compiled

    driver.set_active(_NoDevice(GPUTarget("cuda", architecture, 32)))
    JITFunction.run = run
    try:
        yield listed
    finally:
        JITFunction.run = plain


def refusals(kernel: Kernel, case: Case, dtype: torch.dtype) -> str | None:
    """What Triton says to this launch, or None. Within `compiled_only`."""
    from triton.compiler.errors import CompilationError

    try:
        kernel.triton()(*case.make(dtype))
    except (CompilationError, RuntimeError, ValueError, TypeError, AssertionError) as error:
        return f"{kernel.name} {case.name} {dtype}: {type(error).__name__}: {error}"
    return None


def main(arguments: list[str]) -> int:
    names = arguments[1:] or list(KERNELS)
    if not arguments or not arguments[0].isdigit() or not set(names) <= set(KERNELS):
        print("usage: python -m rungway.kernels.launches 90 [kernel ...]", file=sys.stderr)
        return 2
    architecture = int(arguments[0])
    wrong = 0
    try:
        with compiled_only(architecture) as launches:
            for kernel, case, dtype in (
                (KERNELS[name], case, dtype) for name in names for case in KERNELS[name].small for dtype in DTYPES
            ):
                before = len(launches)
                refused = refusals(kernel, case, dtype)
                large = [one for one in launches[before:] if one.shared > SHARED_BYTES_MAX[architecture]]
                wrong += refused is not None or bool(large)
                for line in (*(() if refused is None else (f"REFUSED {refused}",)), *launches[before:]):
                    print(f"{kernel.name} {case.name} {str(dtype).removeprefix('torch.')} {line}")
    except ModuleNotFoundError as error:
        print(f"cannot compile: {error}", file=sys.stderr)
        return 2
    print(f"sm_{architecture}: {len(launches)} launches, {wrong} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
