"""`python -m rungway.kernels.gpu_check`: check and time every kernel on this machine's CUDA device.

Right: on the small cases, in float32, float16 and bfloat16, the error against the float32 reference is at most twice
what the reference itself loses by rounding its result to that type. Fast: on the large cases, in bfloat16, least memory
traffic over time, as a fraction of the bandwidth of a plain copy measured here. Prints one line a case; exits 0 when
all are right, 1 when one is wrong, 2 without CUDA or Triton.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch

from rungway.kernels.case import Args, Case
from rungway.kernels.registry import KERNELS, Kernel, KernelError

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
COPY_BYTES = 1 << 30
REPEATS = 20
_FLOOR = {torch.float32: 2e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}  # of results around 1: a few roundings


def to_device(args: Args) -> Args:
    return tuple(arg.cuda() if isinstance(arg, torch.Tensor) else arg for arg in args)


def widened(args: Args) -> Args:
    """The same numbers in float32, so that the reference rounds nothing."""
    return tuple(arg.float() if isinstance(arg, torch.Tensor) and arg.is_floating_point() else arg for arg in args)


def tensors(result: Any) -> tuple[torch.Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def error_of(kernel: Kernel, case: Case, dtype: torch.dtype) -> tuple[float, float]:
    """(largest error of the kernel, largest error allowed), absolute."""
    args = case.make(dtype)
    exact = tensors(kernel.reference(*widened(args)))
    got = tensors(kernel.triton()(*to_device(args)))
    worst = allowed = 0.0
    for one, true in zip(got, exact, strict=True):
        if true.numel() == 0:
            continue
        rounding = (true.to(dtype).float() - true).abs().max().item()
        difference = (one.float().cpu() - true).abs().max().item()
        scale = max(1.0, true.abs().max().item())
        worst = max(worst, difference if difference == difference else float("inf"))
        allowed = max(allowed, 2 * rounding + _FLOOR[dtype] * scale)
    return worst, allowed


def seconds(call: Callable[[], Any]) -> float:
    """Median time of one call on the device, with the L2 cache flushed in between."""
    flush = torch.empty(1 << 28, dtype=torch.uint8, device="cuda")
    for _ in range(3):
        call()
    times: list[float] = []
    event: Any = torch.cuda.Event
    for _ in range(REPEATS):
        flush.zero_()
        start, end = event(enable_timing=True), event(enable_timing=True)
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1000)
    return statistics.median(times)


def copy_bandwidth() -> float:
    """Bytes read and written per second by a device-to-device copy of 1 GiB."""
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * COPY_BYTES / seconds(lambda: target.copy_(source))


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


def time_all() -> None:
    copy = copy_bandwidth()
    print(f"{torch.cuda.get_device_name()}: copy {copy / 1e12:.2f} TB/s")
    for kernel in KERNELS.values():
        function = kernel.triton()
        for case in kernel.large:
            args = to_device(case.make(torch.bfloat16))
            took = seconds(lambda function=function, args=args: function(*args))  # type: ignore[misc]
            rate = case.bytes_moved(torch.bfloat16) / took
            print(
                f"time  {kernel.name} {case.name}: {took * 1e6:.0f} us, {rate / 1e12:.2f} TB/s, {rate / copy:.0%} of copy"
            )


def main() -> int:
    if not torch.cuda.is_available():
        print("gpu_check: there is no CUDA device here; the kernels were not run", file=sys.stderr)
        return 2
    try:
        wrong = check_all()
    except KernelError as error:
        print(f"gpu_check: {error}", file=sys.stderr)
        return 2
    time_all()
    print("all right" if wrong == 0 else f"{wrong} cases are wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
