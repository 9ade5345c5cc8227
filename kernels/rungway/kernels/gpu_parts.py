"""`python -m rungway.kernels.gpu_parts check|time|search KERNEL [--dry]`: one part of gpu_check for one kernel, in a process of
its own, as a fault of a kernel may leave a device unusable for its process. Prints one JSON object a line: gpu_check.py.

With `--dry` the same is done on the CPU, by Triton's interpreter (TRITON_INTERPRET=1), on few small cases; times mean nothing.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch

from rungway.kernels.case import Args, Case
from rungway.kernels.gpu_time import Stopwatch
from rungway.kernels.registry import KERNELS, Kernel
from rungway.kernels.tiles import changes, key_of

Record = dict[str, Any]
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
TUNED = ("paged_decode_attention", "paged_prefill_attention", "int8_linear", "int4_linear", "fp8_linear")
GAIN_MIN = 0.03  # a tile has to be so much faster than the one in use
_FLOOR = {torch.float32: 2e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}  # of results around 1: a few roundings
_ALIKE = 0.02  # of the largest value: how far a tile's result may be from that of the one in use


def to_device(args: Args, device: str) -> Args:
    """The same arguments there; strides are kept."""
    return tuple(arg.to(device) if isinstance(arg, torch.Tensor) else arg for arg in args)


def widened(args: Args) -> Args:
    """The same numbers in float32, so that the reference rounds nothing. Each its own, as some are written to."""

    def wide(arg: torch.Tensor) -> torch.Tensor:
        return arg.float() if arg.is_floating_point() and arg.dtype != torch.float64 else arg.clone()

    return tuple(wide(arg) if isinstance(arg, torch.Tensor) else arg for arg in args)


def results(kernel: Kernel, returned: Any, args: Args) -> tuple[torch.Tensor, ...]:
    """What a call returned and what it changed."""
    made = returned if isinstance(returned, tuple) else (returned,)
    return (*made, *(args[at] for at in kernel.writes))


def error_of(kernel: Kernel, case: Case, dtype: torch.dtype, device: str) -> tuple[float, float]:
    """(largest error of the kernel, largest error allowed), absolute: at most twice what the reference itself loses by
    rounding its result to `dtype`, and a few roundings. Tokens must be the same."""
    args = case.make(dtype)
    wide, there = widened(args), to_device(args, device)
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


def check(kernel: Kernel, dry: bool) -> Iterator[Record]:
    for case in kernel.small[:2] if dry else kernel.small:
        for dtype in DTYPES[:1] if dry else DTYPES:
            name = f"{case.name} {str(dtype).removeprefix('torch.')}"
            try:
                worst, allowed = error_of(kernel, case, dtype, "cpu" if dry else "cuda")
            except _faults() as error:
                yield {"kind": "failed", "case": name, "why": _short(error)}
                continue
            yield {"kind": "check", "case": name, "worst": worst, "allowed": allowed, "good": worst <= allowed}


def time(kernel: Kernel, dry: bool) -> Iterator[Record]:
    """First what this device's memory and tensor cores reach, then every large case in bfloat16."""
    watch = Stopwatch(dry)
    device = watch.rates()
    yield {"kind": "rates", **device._asdict()}
    for case in kernel.small[:1] if dry else kernel.large:
        try:
            args = to_device(case.make(_dtype(dry)), watch.device)
            timing = watch.measured(kernel.name, case, kernel.triton(), args, device)
        except _faults() as error:
            yield {"kind": "failed", "case": case.name, "why": _short(error)}
            continue
        yield {"kind": "time", **timing._asdict(), "reached": timing.reached}


def search(kernel: Kernel, dry: bool) -> Iterator[Record]:
    """For each key (tiles.py) the neighbour of the tile in use that is fastest over all large cases of that key; tiles that
    do not compile, do not fit or give another result are out."""
    module = importlib.import_module(f"rungway.kernels.{kernel.module}")
    watch = Stopwatch(dry)
    bases: dict[tuple[int, ...], Any] = {}
    spent: dict[tuple[int, ...], dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for case in kernel.small[:1] if dry else kernel.large:
        args = to_device(case.make(_dtype(dry)), watch.device)
        key, base = module.plan(kernel.name, *args)
        bases[key] = base
        expected = kernel.triton()(*args)
        for change in changes(base, module.NEIGHBOURS)[: 2 if dry else None]:
            took = _tried(watch, kernel, args, base._replace(**change), expected)
            spent[key][json.dumps(change)] += float("inf") if took is None else took
    for key, base in bases.items():
        best = min(spent[key], key=spent[key].__getitem__)
        gain = 1.0 - spent[key][best] / spent[key]["{}"] if spent[key]["{}"] < float("inf") else 0.0
        tile = base._replace(**json.loads(best)) if gain >= GAIN_MIN else base
        out = sum(total == float("inf") for total in spent[key].values())
        found = {"key": key_of(key), "tile": list(tile), "gain": gain, "tried": len(spent[key]), "out": out}
        yield {"kind": "tile"} | found


def _tried(watch: Stopwatch, kernel: Kernel, args: Args, config: Any, expected: torch.Tensor) -> float | None:
    """Seconds, or None for a tile that is not possible or not right."""
    try:
        got = kernel.triton()(*args, config=config)
        if not bool((got - expected).abs().max() <= _ALIKE * expected.abs().max()):
            return None
        return watch.seconds(lambda: kernel.triton()(*args, config=config))
    except _faults():
        return None


def _dtype(dry: bool) -> torch.dtype:
    return torch.float32 if dry else torch.bfloat16  # the interpreter's bfloat16 is wrong


def _faults() -> tuple[type[Exception], ...]:
    """What a kernel may end with that must not end the others: errors of its compilation, its launch, its device, and of a
    version of Triton or torch that has other names."""
    from triton.runtime.errors import TritonError

    return (TritonError, RuntimeError, ValueError, TypeError, AssertionError, AttributeError, LookupError, ImportError)


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"


PARTS = {"check": check, "time": time, "search": search}


def main(arguments: list[str]) -> int:
    part, name, *more = arguments
    for record in PARTS[part](KERNELS[name], "--dry" in more):
        print(json.dumps({"kernel": name} | record), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
