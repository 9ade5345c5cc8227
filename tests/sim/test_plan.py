"""Capacity plans: arithmetic done by hand, and what must not happen when a wish grows."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rungway.simulate.cost import PRESETS
from rungway.simulate.errors import SimulationError
from rungway.simulate.fleet import Slo, SloError, place_wait_ms, prompt_wait_ms, size_fleet
from rungway.simulate.hardware import ACCELERATORS, Dtype, KvDtype, accelerator
from rungway.simulate.load import Load, measure_load, steady_load
from rungway.simulate.plan import Question, compute_bound_from, decode_at, make_plan
from rungway.simulate.plan_data import told
from rungway.simulate.rig import Rig, choose_devices, largest
from rungway.simulate.shapes import MODELS, read_shape, shape_of
from rungway.simulate.workload import Arrival

GIB = 2**30


def rig(model: str = "llama-3-70b", device: str = "h100", devices: int = 4, **more: Any) -> Rig:
    return Rig(shape_of(model), accelerator(device), devices, more.pop("dtype", Dtype.BF16), KvDtype.BF16, **more)


def ask(model: str = "llama-3-8b", device: str = "h100", context: int = 8192, **more: Any) -> Question:
    slo = more.pop("slo", Slo(500.0, 50.0))
    return Question(shape_of(model), accelerator(device), context, slo, more.pop("dtype", Dtype.BF16), **more)


# -- memory ---------------------------------------------------------------------------------------------------------


def test_llama_70b_keeps_two_and_a_half_gib_per_8k_tokens_and_forty_per_128k() -> None:
    per_token = shape_of("Llama-3-70B").kv_bytes_per_token(2)
    assert per_token == 80 * 2 * 8 * 128 * 2 == 327_680
    assert per_token * 8192 == 2_684_354_560 == 2.5 * GIB
    assert per_token * 131_072 == 40 * GIB
    assert shape_of("llama-3-70b").kv_bytes_per_token(KvDtype.FP8.bytes) * 8192 == 1.25 * GIB


def test_a_latent_cache_is_far_below() -> None:
    deepseek = shape_of("deepseek-v3")
    assert deepseek.kv_bytes_per_token(2) == 61 * (512 + 64) * 2 == 70_272
    plain = deepseek.layers * deepseek.heads * (deepseek.qk_dim + deepseek.v_dim) * 2
    assert plain / deepseek.kv_bytes_per_token(2) > 70, "against keys and values of all heads"


@pytest.mark.parametrize(
    ("model", "published"),
    [
        ("llama-3-8b", 8_030_261_248),
        ("llama-3-70b", 70_553_706_496),
        ("qwen2.5-0.5b", 494_032_768),
        ("qwen2.5-1.5b", 1_543_714_304),
        ("qwen2.5-7b", 7_615_616_512),
        ("smollm2-135m", 134_515_008),
    ],
)
def test_parameters_are_the_published_ones(model: str, published: int) -> None:
    assert shape_of(model).parameters == shape_of(model).active_parameters == published


def test_experts_are_counted_and_only_some_are_active() -> None:
    shape = shape_of("deepseek-v3")
    assert shape.parameters == pytest.approx(671e9, rel=1e-3) and shape.active_parameters == pytest.approx(
        37.5e9, rel=0.01
    )
    assert shape.native is Dtype.FP8
    assert shape.parameters_read(1) == pytest.approx(shape.active_parameters)
    assert shape.parameters_read(10_000) == pytest.approx(shape.parameters)
    mixtral = MODELS["llama-3-8b"] | {"vocab_size": 32_000, "num_local_experts": 8, "num_experts_per_tok": 2}
    assert read_shape("mixtral", mixtral).parameters == pytest.approx(46.7e9, rel=1e-3)
    assert read_shape("mixtral", mixtral).active_parameters == pytest.approx(12.9e9, rel=1e-2)


def test_sessions_are_what_is_left_over_the_cache_of_one() -> None:
    # (4 x 80 GB x 0.9 - 70,553,706,496 x 2) / 2,684,354,560 = 54.7
    assert rig().sessions(8192) == 54
    assert rig(device="l4", devices=1).sessions(8192) == 0
    assert rig("llama-3-8b", "a10g", 1).sessions(8192) == int((21.6e9 - 16_060_522_496) / GIB) == 5


def test_heads_are_dealt_whole_and_copied_when_there_are_too_few() -> None:
    llama, deepseek = shape_of("llama-3-70b"), shape_of("deepseek-v3")
    assert [llama.kv_copies(count) for count in (1, 2, 8, 16)] == [1, 1, 1, 2]
    assert deepseek.kv_copies(8) == 8, "every device keeps the latent vector"
    assert read_shape("three", MODELS["llama-3-8b"] | {"num_key_value_heads": 3}).kv_copies(2) == pytest.approx(4 / 3)


def test_weights_too_big_for_one_device_say_how_many() -> None:
    def fewest(model: str, device: str, dtype: Dtype = Dtype.BF16) -> int:
        return choose_devices(lambda count: rig(model, device, count, dtype=dtype), None).devices

    assert fewest("llama-3-70b", "h100") == 4 and fewest("llama-3-70b", "h200") == 2
    assert fewest("llama-3-8b", "l4") == 1 and fewest("llama-3-70b", "h100", Dtype.INT4) == 1
    assert fewest("deepseek-v3", "h200", Dtype.FP8) == 8 and fewest("deepseek-v3", "h100", Dtype.FP8) == 16
    with pytest.raises(SimulationError, match=r"141\.1 GB of weights.*needs 4 devices"):
        make_plan(ask("llama-3-70b", devices=1))
    with pytest.raises(SimulationError, match="3 devices cannot share 64"):
        make_plan(ask("llama-3-70b", devices=3))
    with pytest.raises(SimulationError, match="64 x cpu"):
        make_plan(ask("deepseek-v3", "cpu"))
    with pytest.raises(SimulationError, match=r"not one session of 131072.*needs --devices 4"):
        make_plan(ask("llama-3-70b", "h100", 131_072, devices=2))


# -- rooflines ------------------------------------------------------------------------------------------------------


def test_decode_reads_the_weights_and_the_cache() -> None:
    one = rig("llama-3-8b", "h200", 1)
    weights_ms = 1e3 * 8_030_261_248 * 2 / (4800e9 * 0.6)
    cache_ms = 1e3 * 131_072 * 8192 * 10 / (4800e9 * 0.6)
    assert one.step_ms(10, 10 * 8192) == pytest.approx(1.0 + weights_ms + cache_ms)
    # (50 - 1 - 5.577) ms / 0.3728 ms per sequence = 116.5; memory has room for 103.
    assert decode_at(one, 8192, 1000, 50.0).batch == 116 and decode_at(one, 8192, 1000, 50.0).limit == "TPOT"
    at = decode_at(one, 8192, one.sessions(8192), 50.0)
    assert (at.batch, at.limit, at.bound) == (103, "memory", "bandwidth")
    assert decode_at(one, 8192, 103, 5.0).batch == 0
    assert decode_at(one, 16, 5000, 50.0).bound == "compute"


def test_prefill_is_two_flops_per_parameter_and_the_square_of_the_prompt() -> None:
    four = rig()
    peak = 4 * 989e12 * 0.6
    linear_ms = 1e3 * 2 * 70_553_706_496 * 8192 / peak
    attention_ms = 1e3 * 2 * 80 * 64 * 128 * 8192**2 / peak
    steps = 8192 // 2048
    assert four.prefill_ms(8192) == pytest.approx(linear_ms + attention_ms + steps * 2.0)
    short_ms = 1e3 * 70_553_706_496 * 2 / (4 * 3350e9 * 0.6)
    assert four.prefill_ms(10) == pytest.approx(2.0 + short_ms, rel=1e-3), "a short prompt waits for the weights"


def test_the_ridge_is_where_arithmetic_overtakes_the_weights() -> None:
    # 2 bytes per parameter over 2 FLOP per token: 989e12 / 3350e9 = 295.2
    assert compute_bound_from(rig()) == 296
    assert compute_bound_from(rig(dtype=Dtype.INT4)) < 90
    assert rig(dtype=Dtype.FP8).cost(1).token_ms == pytest.approx(rig().cost(1).token_ms * 989 / 1979)
    slow = rig(device="a100", dtype=Dtype.FP8).cost(1).token_ms
    assert slow == rig(device="a100").cost(1).token_ms, "no 8-bit arithmetic there"


def test_the_cpu_row_is_the_simulators_cpu() -> None:
    cost, preset = rig("smollm2-135m", "cpu", 1).cost(1), PRESETS["cpu-135m"]
    assert cost.weights_ms == pytest.approx(preset.weights_ms, rel=0.02)
    assert cost.token_ms == pytest.approx(preset.token_ms, rel=0.02)


# -- replicas, cost, rollback ---------------------------------------------------------------------------------------


def test_the_waits_are_the_textbooks() -> None:
    # M/M/1 at half load: C = 0.5, P(wait > t) = 0.5 exp(-t / 200) for a service of 100 ms.
    assert place_wait_ms(1, 100.0, 0.5) == pytest.approx(200.0 * math.log(50))
    # Erlang C for two servers and one erlang is 1/3.
    assert place_wait_ms(2, 100.0, 0.5) == pytest.approx(100.0 * math.log(100 / 3))
    assert place_wait_ms(200, 100.0, 0.5) == 0.0
    one, load = rig("llama-3-8b", "h100", 1), steady_load(1.0, 1000, 100)
    assert prompt_wait_ms(one, load, 0.5) == pytest.approx(one.prefill_ms(1000) * math.log(50)), (
        "M/D/1: s / (2 (1 - 0.5))"
    )
    assert prompt_wait_ms(one, load, 0.01) == 0.0


def test_replicas_by_hand() -> None:
    load, one = steady_load(100.0, 1000, 100), rig("llama-3-8b", "h100", 1)
    fleet = size_fleet(one, load, Slo(10_000.0, 50.0))
    ridge_free = 1e3 / (989e12 * 0.6)  # ms per FLOP
    attention_ms = 2 * 32 * 32 * 128 * 1000**2 * ridge_free
    per_sequence = 11 * 2 * 8_030_261_248 * ridge_free + attention_ms / 100 + 1e3 * 131_072 * 1050 / (3350e9 * 0.6)
    assert fleet.batch == int(49.0 / per_sequence)
    step_ms = 1.0 + fleet.batch * per_sequence
    assert fleet.tpot_ms == pytest.approx(step_ms, rel=1e-3)
    capacity = 1000 * fleet.batch / (100 * step_ms)
    assert fleet.capacity_per_s == pytest.approx(capacity, rel=1e-3)
    assert fleet.replicas == math.ceil(100 / (capacity * 0.7))


def test_capacity_is_what_the_simulator_takes_as_full_load() -> None:
    one = rig("llama-3-8b", "h100", 1)
    fleet = size_fleet(one, steady_load(10.0, 200, 100), Slo(10_000.0, 50.0))
    simulated = one.cost(1).capacity_tokens_per_s(fleet.batch, 200, 100)
    assert fleet.capacity_per_s * 100 == pytest.approx(simulated, rel=0.01), "apart from the square of the prompt"


def test_costs_add_up_to_the_fleets_price() -> None:
    load = Load(12.0, 8.0, 1500.0, 300.0, 1500.0**2, 1500)
    made = told(make_plan(ask("llama-3-70b", load=load, usd_per_hour=2.5, tenants=4)))
    cost, fleet, rollback = made["cost"], made["fleet"], made["rollback"]
    spent = 8.0 * 3600 * (1500 * cost["usd_per_million_input"] + 300 * cost["usd_per_million_output"]) / 1e6
    assert spent == pytest.approx(cost["usd_per_hour"]) and cost["usd_per_hour"] == 2.5 * fleet["replicas"] * 4
    assert cost["usd_per_million_output"] > cost["usd_per_million_input"] > 0
    assert rollback["warm_replicas"] == fleet["replicas"] and rollback["extra_devices"] == 4 * fleet["replicas"]
    assert rollback["replicas_during_rollout"] == 2 * fleet["replicas"]
    assert made["sessions_per_tenant"] == 54 * fleet["replicas"] // 4


def test_targets_that_no_number_of_replicas_meets() -> None:
    one, load = rig("llama-3-8b", "h100", 1), steady_load(1.0, 8000, 100)
    with pytest.raises(SloError, match="TTFT 100 ms cannot be met: the prefill of 8000 tokens"):
        size_fleet(one, load, Slo(100.0, 50.0))
    with pytest.raises(SloError, match="TPOT 5 ms cannot be met"):
        size_fleet(one, load, Slo(1000.0, 5.0))
    with pytest.raises(SimulationError, match="more than"):
        size_fleet(one, steady_load(1e9, 100, 100), Slo(1000.0, 50.0))
    assert make_plan(ask(slo=Slo(100.0, 50.0), load=load)).problem is not None
    assert make_plan(ask(slo=Slo(500.0, 1.0))).problem is not None


def test_a_trace_gives_its_mean_and_its_busiest_minute() -> None:
    quiet = [Arrival(float(second), "a", 100, 10) for second in range(0, 600, 10)]
    busy = [Arrival(300.0 + 0.5 * number, "a", 300, 30) for number in range(120)]
    long = Arrival(10.0, "a", 9000, 1)
    load = measure_load(sorted([*quiet, *busy, long], key=lambda each: each.at_s), 8192)
    assert load.left_out == 1 and load.mean_per_s == pytest.approx(180 / 590)
    assert load.peak_per_s == pytest.approx(126 / 60)
    assert load.prompt_tokens == pytest.approx((60 * 100 + 120 * 300) / 180) and load.prompt_p99 == 300
    assert load.prompt_squares > load.prompt_tokens**2
    for wrong in ([], [long], [Arrival(1.0, "a", 5, 5)] * 3):
        with pytest.raises(SimulationError):
            measure_load(wrong, 8192)


# -- properties -----------------------------------------------------------------------------------------------------

models = st.sampled_from(sorted(MODELS))
devices = st.sampled_from(sorted(ACCELERATORS))
few = settings(max_examples=60, deadline=None)


@few
@given(models, devices, st.integers(1, 200_000), st.integers(1, 200_000), st.sampled_from([1, 2, 4, 8]))
def test_a_longer_context_never_gives_more_sessions(model: str, device: str, one: int, other: int, count: int) -> None:
    place = rig(model, device, count)
    assert place.sessions(max(one, other)) <= place.sessions(min(one, other))
    assert replace(place, kv_dtype=KvDtype.FP8).sessions(one) >= place.sessions(one)


@few
@given(
    st.sampled_from([("llama-3-8b", "h100", 1), ("llama-3-70b", "h200", 4), ("deepseek-v3", "h200", 8)]),
    st.floats(0.1, 300),
    st.integers(1, 6000),
    st.integers(1, 1000),
    st.tuples(st.floats(10, 200), st.floats(10, 200)),
    st.tuples(st.floats(50, 5000), st.floats(50, 5000)),
)
def test_stricter_targets_and_more_load_never_need_fewer_replicas(
    place: tuple[str, str, int],
    rate: float,
    prompt: int,
    output: int,
    tpot: tuple[float, float],
    ttft: tuple[float, float],
) -> None:
    model, device, count = place
    made = rig(model, device, count, dtype=Dtype.FP8 if model == "deepseek-v3" else Dtype.BF16)
    load, strict = steady_load(rate, prompt, output), Slo(min(ttft), min(tpot))

    def replicas(load: Load, slo: Slo) -> float:
        try:
            return size_fleet(made, load, slo).replicas
        except SloError:
            return math.inf

    least = replicas(load, strict)
    assert least >= replicas(load, replace(strict, tpot_ms=max(tpot)))
    assert least >= replicas(load, replace(strict, ttft_ms=max(ttft)))
    assert least >= replicas(load, replace(strict, headroom=0.0))
    assert least <= replicas(steady_load(rate * 1.5, prompt, output), strict)
    if least < math.inf:
        fleet = size_fleet(made, load, strict)
        assert fleet.tpot_ms <= strict.tpot_ms and fleet.ttft_p99_ms <= strict.ttft_ms
        assert fleet.utilization <= 0.7 + 1e-6 and 0 < fleet.prefill_share < 1


@given(st.integers(0, 50), st.integers(0, 50))
def test_the_search_finds_the_last_that_fits(last: int, most: int) -> None:
    assert largest(lambda number: number <= last, most) == min(last, most)
