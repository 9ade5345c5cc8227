"""One replica on paper: a model on one or more devices, its memory and the time of its steps.

The time of a step is the simulator's roofline (`cost.py`). Devices share a replica by tensor parallelism: memory, bandwidth
and arithmetic add up, what they tell each other is in `base_ms` and in the efficiency.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from rungway.simulate.cost import GB, CostModel, roofline
from rungway.simulate.errors import SimulationError
from rungway.simulate.hardware import Accelerator, Dtype, KvDtype
from rungway.simulate.shapes import Shape

WEIGHTS_SHARE = 0.8  # of the usable memory, when the number of devices is chosen: the rest is for the KV cache
DEVICES_MAX = 64
PREFILL_CHUNK = 2048  # tokens of a prompt computed in one step; each step reads the weights once
BASE_MS = 1.0  # launching one step; as in the simulator's presets, twice that when devices wait for each other


@dataclass(frozen=True, slots=True)
class Rig:
    """`reserve`: share of memory for activations, graphs and fragments. `efficiency`: see `cost.roofline`."""

    shape: Shape
    device: Accelerator
    devices: int
    dtype: Dtype
    kv_dtype: KvDtype
    reserve: float = 0.1
    efficiency: float = 0.6

    # -- memory, in bytes of all devices ------------------------------------------------------------------------

    @property
    def weights(self) -> float:
        return self.shape.parameters * self.dtype.bytes

    @property
    def usable(self) -> float:
        return self.devices * self.device.memory_gb * GB * (1.0 - self.reserve)

    @property
    def kv_per_token(self) -> float:
        """As stored: copies on several devices count."""
        return self.shape.kv_bytes_per_token(self.kv_dtype.bytes) * self.shape.kv_copies(self.devices)

    def sessions(self, tokens: float) -> int:
        """How many sequences of so many tokens the memory holds beside the weights."""
        return max(0, math.floor((self.usable - self.weights) / (self.kv_per_token * tokens)))

    # -- time, in milliseconds ----------------------------------------------------------------------------------

    def cost(self, tokens: float) -> CostModel:
        """The roofline of a step that computes so many tokens (of a dense model the same for any number)."""
        model = roofline(
            parameters=self.shape.active_parameters,
            bytes_per_parameter=self.dtype.bytes,
            bandwidth_gb_s=self.devices * self.device.bandwidth_gb_s,
            tflops=self.devices * self.device.peak_tflops(self.dtype),
            kv_bytes_per_token=self.kv_per_token,
            base_ms=BASE_MS if self.devices == 1 else 2 * BASE_MS,
            efficiency=self.efficiency,
        )
        read = self.shape.parameters_read(tokens) / self.shape.active_parameters
        return replace(model, weights_ms=model.weights_ms * read)

    def step_ms(self, tokens: float, cache_tokens: float) -> float:
        return self.cost(tokens).step_ms(math.ceil(tokens), math.ceil(cache_tokens))

    def attention_ms(self, prompt_squares: float) -> float:
        """Arithmetic of causal attention over a prompt, at the 16-bit peak. `prompt_squares`: (mean of) tokens^2."""
        peak = self.devices * self.device.tflops * 1e12 * self.efficiency
        return 1e3 * self.shape.attention_flops(prompt_squares) / peak

    def prefill_ms(self, prompt: float, prompt_squares: float | None = None) -> float:
        """A prompt alone on the replica, in chunks."""
        whole, rest = divmod(prompt, PREFILL_CHUNK)
        chunks = whole * self.step_ms(PREFILL_CHUNK, 0) + (self.step_ms(rest, 0) if rest else 0.0)
        return chunks + self.attention_ms(prompt**2 if prompt_squares is None else prompt_squares)


def choose_devices(make: Callable[[int], Rig], wanted: int | None) -> Rig:
    """The fewest devices (a power of two that divides the heads) whose usable memory the weights fill to at most
    `WEIGHTS_SHARE`; or `wanted`, when the weights fit there at all. Raises SimulationError."""
    one = make(1)
    counts = [2**power for power in range(DEVICES_MAX.bit_length()) if one.shape.heads % 2**power == 0]
    rigs = [make(count) for count in counts]
    roomy = next((rig for rig in rigs if rig.weights <= WEIGHTS_SHARE * rig.usable), None)
    needs = f"{one.shape.name} in {one.dtype} has {one.weights / GB:.1f} GB of weights"
    if wanted is None:
        if roomy is None:
            at_most = f"the most its {one.shape.heads} heads can share is {counts[-1]} x {one.device.name}"
            raise SimulationError(f"{needs}; {at_most} with {rigs[-1].usable / GB:.1f} GB usable")
        return roomy
    rig = make(wanted)
    if one.shape.heads % wanted:
        raise SimulationError(f"{wanted} devices cannot share {one.shape.heads} attention heads evenly")
    if rig.weights >= rig.usable:
        more = f"; it needs {roomy.devices} devices (tensor parallel)" if roomy else ""
        raise SimulationError(f"{needs}; {wanted} x {one.device.name} have {rig.usable / GB:.1f} GB usable{more}")
    return rig


def largest(fits: Callable[[int], bool], most: int) -> int:
    """The largest number in 0..most that fits, when everything below one that fits does so too."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low
