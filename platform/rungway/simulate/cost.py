"""How long a step of a replica takes: a roofline of weights, arithmetic and KV cache.

    step = base + max(weights, tokens x token) + KV read

`weights` is reading all weights once (bytes / bandwidth), `token` the arithmetic of one token (2 x parameters / FLOP/s),
`tokens` the tokens computed in this step (one per decoding sequence plus the prefill chunk), KV read the cache of all
running sequences over the bandwidth. Prefill is computed in chunks inside the step's token budget.
"""

from __future__ import annotations

from dataclasses import dataclass

from rungway.contracts import Version
from rungway.simulate.errors import SimulationError

GB = 1e9


@dataclass(frozen=True, slots=True)
class CostModel:
    """Milliseconds; `kv_ms_per_1k` per 1,000 tokens of cache read in a step; `first_ms` passes before a new prompt
    enters the batch. `max_num_batched_tokens` None = the version's own."""

    weights_ms: float
    token_ms: float
    kv_ms_per_1k: float = 0.0
    base_ms: float = 0.0
    first_ms: float = 0.0
    max_num_batched_tokens: int | None = None

    def step_ms(self, tokens: int, cache_tokens: int) -> float:
        """One step that computes `tokens` tokens with `cache_tokens` tokens of KV cache in use."""
        compute_ms = tokens * self.token_ms
        return self.base_ms + max(self.weights_ms, compute_ms) + cache_tokens * self.kv_ms_per_1k / 1000.0

    def capacity_tokens_per_s(self, sequences: int, input_tokens: float, output_tokens: float) -> float:
        """Output tokens per second of a full batch of such requests, prefill included: what 1.0x load is made from."""
        cache = int(sequences * (input_tokens + output_tokens / 2.0))
        decode_ms = self.step_ms(sequences, cache)
        # Each finished request makes room for one prompt: its tokens are spread over the steps of one answer.
        prefill_per_step = sequences * input_tokens / max(1.0, output_tokens)
        mixed_ms = self.step_ms(int(sequences + prefill_per_step), cache)
        return 1000.0 * sequences / max(decode_ms, mixed_ms)


def roofline(
    *,
    parameters: float,
    bytes_per_parameter: float,
    bandwidth_gb_s: float,
    tflops: float,
    kv_bytes_per_token: float,
    base_ms: float,
    efficiency: float = 0.6,
) -> CostModel:
    """From a data sheet. `efficiency`: the share of peak bandwidth and peak arithmetic that a good engine reaches."""
    bandwidth = bandwidth_gb_s * GB * efficiency
    return CostModel(
        weights_ms=1e3 * parameters * bytes_per_parameter / bandwidth,
        token_ms=1e3 * 2.0 * parameters / (tflops * 1e12 * efficiency),
        kv_ms_per_1k=1e6 * kv_bytes_per_token / bandwidth,
        base_ms=base_ms,
    )


# Data-sheet numbers: bfloat16 weights, dense bfloat16 FLOP/s.
PRESETS: dict[str, CostModel] = {
    "a10g-7b": roofline(
        parameters=6.7e9,
        bytes_per_parameter=2,
        bandwidth_gb_s=600,
        tflops=70,
        kv_bytes_per_token=524_288,
        base_ms=2.0,
    ),
    "h200-8b": roofline(
        parameters=8.0e9,
        bytes_per_parameter=2,
        bandwidth_gb_s=4800,
        tflops=989,
        kv_bytes_per_token=131_072,
        base_ms=1.0,
    ),
    "h200x4-70b": roofline(
        parameters=70.6e9,
        bytes_per_parameter=2,
        bandwidth_gb_s=4 * 4800,
        tflops=4 * 989,
        kv_bytes_per_token=327_680,
        base_ms=2.0,
    ),
    "cpu-135m": CostModel(weights_ms=25.0, token_ms=0.9, kv_ms_per_1k=0.5, base_ms=3.0),
}


def cost_of(version: Version, named: dict[str, str]) -> CostModel:
    """The model of a version: the preset that `named` gives for its tier, else the pace of its fake engine. Raises
    SimulationError when there is neither."""
    preset = named.get(version.tier)
    if preset is not None:
        if preset not in PRESETS:
            raise SimulationError(f"there is no cost model {preset!r} (known: {', '.join(PRESETS)})")
        return PRESETS[preset]
    if version.fake is not None:
        fake = version.fake
        return CostModel(weights_ms=fake.tpot_ms, token_ms=fake.prefill_ms_per_1k / 1000.0, first_ms=fake.ttft_ms)
    if version.backend == "fake":
        return CostModel(weights_ms=5.0, token_ms=0.02, first_ms=5.0)
    raise SimulationError(f"{version.pool} has no cost model; give --cost {version.tier}=NAME ({', '.join(PRESETS)})")
