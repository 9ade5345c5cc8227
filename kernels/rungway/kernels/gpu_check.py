"""`python -m rungway.kernels.gpu_check [--json FILE] [--markdown FILE]`: check and time every kernel on this machine's CUDA
device.

Right: on the small cases, in float32, float16 and bfloat16, the error against the float32 reference is at most twice what
the reference itself loses by rounding its result to that type; sampled tokens are the same. Fast: on the large cases, in
bfloat16, the least memory traffic over time as a fraction of the bandwidth of a plain copy, or operations over time as a
fraction of the rate of a large product, both measured here. Prints one line a case; exits 0 when all are right and every bar
is reached, 1 when not, 2 without CUDA or Triton.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch

from rungway.kernels.case import Args, Case
from rungway.kernels.gpu_time import Rates, Timing, measured, rates
from rungway.kernels.registry import KERNELS, Kernel, KernelError

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_FLOOR = {torch.float32: 2e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}  # of results around 1: a few roundings


def to_device(args: Args) -> Args:
    """The same arguments on the GPU; strides are kept."""
    return tuple(arg.cuda() if isinstance(arg, torch.Tensor) else arg for arg in args)


def widened(args: Args) -> Args:
    """The same numbers in float32, so that the reference rounds nothing. Each its own, as some are written to."""

    def wide(arg: torch.Tensor) -> torch.Tensor:
        return arg.float() if arg.is_floating_point() and arg.dtype != torch.float64 else arg.clone()

    return tuple(wide(arg) if isinstance(arg, torch.Tensor) else arg for arg in args)


def results(kernel: Kernel, returned: Any, args: Args) -> tuple[torch.Tensor, ...]:
    """What a call returned and what it changed."""
    made = returned if isinstance(returned, tuple) else (returned,)
    return (*made, *(args[at] for at in kernel.writes))


def error_of(kernel: Kernel, case: Case, dtype: torch.dtype) -> tuple[float, float]:
    """(largest error of the kernel, largest error allowed), absolute."""
    args = case.make(dtype)
    wide, there = widened(args), to_device(args)
    exact = results(kernel, kernel.reference(*wide), wide)
    got = results(kernel, kernel.triton()(*there), there)
    worst = allowed = 0.0
    for one, true in zip(got, exact, strict=True):
        if true.numel() == 0:
            continue
        if not true.is_floating_point():
            worst = max(worst, 0.0 if torch.equal(one.cpu(), true) else float("inf"))
            continue
        rounding = (true.to(dtype).float() - true).abs().max().item()
        difference = (one.float().cpu() - true.float()).abs().max().item()
        scale = max(1.0, true.abs().max().item())
        worst = max(worst, difference if difference == difference else float("inf"))
        allowed = max(allowed, 2 * rounding + _FLOOR[dtype] * scale)
    return worst, allowed


def check_all() -> int:
    """Number of wrong cases."""
    wrong = 0
    for kernel in KERNELS.values():
        for case in kernel.small:
            for dtype in DTYPES:
                worst, allowed = error_of(kernel, case, dtype)
                good = worst <= allowed
                wrong += not good
                name = str(dtype).removeprefix("torch.")
                print(f"{'ok' if good else 'WRONG':5} {kernel.name} {case.name} {name}: {worst:.2e} of {allowed:.2e}")
    return wrong


def time_all(device: Rates) -> list[Timing]:
    """Every large case in bfloat16, printed as it is measured."""
    timings = []
    for kernel in KERNELS.values():
        function = kernel.triton()
        for case in kernel.large:
            timing = measured(kernel.name, case, function, to_device(case.make(torch.bfloat16)), device)
            timings.append(timing)
            print(f"{'time' if timing.reached else 'SLOW':5} {timing}")
    return timings


def markdown(device: Rates, timings: list[Timing]) -> str:
    """Rows for docs/benchmarks.md."""
    lines = [f"{device}", "", "| kernel | case | us | of | fraction | bar |", "|---|---|---|---|---|---|"]
    for one in timings:
        bar = "" if one.bar is None else f"{one.bar:.0%}"
        lines.append(
            f"| {one.kernel} | {one.case} | {one.seconds * 1e6:.0f} | {one.metric} | {one.fraction:.0%} | {bar} |"
        )
    return "\n".join(lines) + "\n"


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="gpu_check")
    parser.add_argument("--json", type=Path, help="write the timings here")
    parser.add_argument("--markdown", type=Path, help="write rows for docs/benchmarks.md here")
    asked = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("gpu_check: there is no CUDA device here; the kernels were not run", file=sys.stderr)
        return 2
    try:
        wrong = check_all()
    except KernelError as error:
        print(f"gpu_check: {error}", file=sys.stderr)
        return 2
    device = rates()
    print(device)
    timings = time_all(device)
    if asked.json:
        rows = [one._asdict() | {"reached": one.reached} for one in timings]
        asked.json.write_text(json.dumps({"device": device._asdict(), "wrong": wrong, "timings": rows}, indent=1))
    if asked.markdown:
        asked.markdown.write_text(markdown(device, timings))
    slow = sum(not one.reached for one in timings)
    print("all right" if wrong + slow == 0 else f"{wrong} cases are wrong, {slow} below their bar")
    return 1 if wrong + slow else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
