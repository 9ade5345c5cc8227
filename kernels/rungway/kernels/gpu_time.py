"""Times on a CUDA device, and what its memory and its tensor cores reach with plain operations."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from rungway.kernels.case import Args, Case, Metric

COPY_BYTES = 1 << 30
PRODUCT_SIZE = 8192
REPEATS = 20
_FLUSH_BYTES = 1 << 28  # more than any second-level cache


class Rates(NamedTuple):
    """What fractions are of: bytes read and written per second by a copy of 1 GiB, operations per second by a bfloat16
    product of 8192 x 8192 matrices."""

    name: str
    copy: float
    gemm: float

    def __str__(self) -> str:
        return f"{self.name}: copy {self.copy / 1e12:.2f} TB/s, bfloat16 product {self.gemm / 1e12:.0f} TFLOP/s"


class Timing(NamedTuple):
    """One large case. `fraction` of the copy's or the product's rate, by `metric`."""

    kernel: str
    case: str
    seconds: float
    metric: str
    fraction: float
    bar: float | None

    @property
    def reached(self) -> bool:
        return self.bar is None or self.fraction >= self.bar

    def __str__(self) -> str:
        bar = "" if self.bar is None else f" (bar {self.bar:.0%})"
        return f"{self.kernel} {self.case}: {self.seconds * 1e6:.0f} us, {self.fraction:.0%} of {self.metric}{bar}"


class Stopwatch:
    """Times calls on the CUDA device; `dry`: calls of the interpreter, whose times mean nothing, on the CPU."""

    def __init__(self, dry: bool = False) -> None:
        self.device = "cpu" if dry else "cuda"
        self._dry = dry

    def seconds(self, call: Callable[[], Any]) -> float:
        """Median time of one call on the device as it is in a captured graph: without what launching from Python takes, and
        with the second-level cache flushed before each."""
        if self._dry:
            started = time.perf_counter()
            call()
            return time.perf_counter() - started
        return _on_device(call)

    def rates(self) -> Rates:
        """Measured now."""
        if self._dry:
            return Rates("the interpreter", 1e9, 1e9)
        source = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda")
        target = torch.empty_like(source)
        copy = 2 * COPY_BYTES / self.seconds(lambda: target.copy_(source))
        left, right = (torch.randn(PRODUCT_SIZE, PRODUCT_SIZE, dtype=torch.bfloat16, device="cuda") for _ in range(2))
        gemm = 2 * PRODUCT_SIZE**3 / self.seconds(lambda: left @ right)
        return Rates(torch.cuda.get_device_name(), copy, gemm)

    def measured(self, kernel: str, case: Case, function: Callable[..., Any], args: Args, device: Rates) -> Timing:
        """Times one case."""
        return timing_of(kernel, case, self.seconds(lambda: function(*args)), device)


def _on_device(call: Callable[[], Any]) -> float:
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    flush = torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    event: Any = torch.cuda.Event
    times: list[float] = []
    for _ in range(REPEATS):
        flush.zero_()
        start, end = event(enable_timing=True), event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1000)
    return statistics.median(times)


def timing_of(kernel: str, case: Case, took: float, device: Rates) -> Timing:
    """The fraction that `took` seconds are."""
    if case.metric is Metric.FLOPS:
        fraction = case.flops() / took / device.gemm
    else:
        fraction = case.bytes_moved(torch.bfloat16) / took / device.copy
    return Timing(kernel, case.name, took, case.metric.value, fraction, case.bar)
