"""Accelerators and number formats, as a capacity plan sees them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from rungway.simulate.errors import SimulationError


class Dtype(StrEnum):
    """How weights are stored."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP8 = "fp8"
    INT8 = "int8"
    INT4 = "int4"

    @property
    def bytes(self) -> float:
        """Per parameter. int4 carries one 16-bit scale per group of 32."""
        return {"fp32": 4.0, "bf16": 2.0, "fp8": 1.0, "int8": 1.0, "int4": 0.5 + 2 / 32}[self]


class KvDtype(StrEnum):
    """How keys and values are cached."""

    BF16 = "bf16"
    FP8 = "fp8"

    @property
    def bytes(self) -> int:
        return 2 if self is KvDtype.BF16 else 1


@dataclass(frozen=True, slots=True)
class Accelerator:
    """One device. Memory in GB and bandwidth in GB/s (10^9), arithmetic in dense TFLOP/s (no sparsity) of 16-bit and, where
    the device has it, 8-bit floats."""

    name: str
    memory_gb: float
    bandwidth_gb_s: float
    tflops: float
    fp8_tflops: float | None = None

    def peak_tflops(self, dtype: Dtype) -> float:
        """What weights of this format are multiplied at. int8 and int4 are unpacked to 16 bits first."""
        return self.fp8_tflops if dtype is Dtype.FP8 and self.fp8_tflops is not None else self.tflops


# Nominal figures of the vendors' public data sheets (SXM variants where there are several), a GB taken as 10^9 bytes. `cpu`
# is no data sheet: two cores of a server, chosen so that at 60 % efficiency it is the simulator's `cpu-135m`.
ACCELERATORS: dict[str, Accelerator] = {
    row.name: row
    for row in (
        Accelerator("b200", 180, 8000, 2250, 4500),
        Accelerator("h200", 141, 4800, 989, 1979),
        Accelerator("h100", 80, 3350, 989, 1979),
        Accelerator("a100", 80, 2039, 312),
        Accelerator("a100-40gb", 40, 1555, 312),
        Accelerator("l40s", 48, 864, 362, 733),
        Accelerator("a10g", 24, 600, 70),
        Accelerator("l4", 24, 300, 121, 242),
        Accelerator("cpu", 16, 18, 0.5),
    )
}


def accelerator(name: str) -> Accelerator:
    """By name, in any case. Raises SimulationError."""
    found = ACCELERATORS.get(name.lower())
    if found is None:
        raise SimulationError(f"there is no hardware {name!r} (known: {', '.join(ACCELERATORS)})")
    return found
