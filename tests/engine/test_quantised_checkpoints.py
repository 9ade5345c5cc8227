"""AWQ, GPTQ, compressed-tensors and FP8 checkpoints: each is read through the loader and computes what a float model of its
dequantised weights computes. What is not supported is refused by name."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.native_kit import run_all, work
from engine.quantised_kit import (
    Tensors,
    Writer,
    awq_tensors,
    compressed_tensors,
    gptq_tensors,
    packed_rows,
    random_coded,
    save_pair,
)
from rungway.engine import fp8
from rungway.engine.architecture import read_architecture
from rungway.engine.assemble import Sizes, directory_parts
from rungway.engine.blocks import BlockPool
from rungway.engine.checkpoint import QuantisedWeights, open_weights
from rungway.engine.core import Core
from rungway.engine.errors import ModelError
from rungway.engine.formats import Precision, as_stored, plain
from rungway.engine.int4 import CpuInt4Linear, native4_faster
from rungway.engine.loader import fetch_model
from rungway.engine.model import Decoder
from rungway.engine.native_int4 import NativeInt4Linear
from rungway.engine.precision import candidates
from rungway.engine.scheduler import Scheduler
from rungway.engine.selftest import likeness, read_through
from rungway.engine.stored import Fp8Weight, Int4Weight, kept
from rungway.engine.weights import read_config

CPU = torch.device("cpu")
IDS = [(7 * at + 3) % 257 for at in range(48)]
FOUR_BITS = {"weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": False}}
EIGHT_BITS = {"weights": {"num_bits": 8, "type": "int", "strategy": "channel"}}
FLOATS = {"weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}
needs_int4 = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"), reason="no 4-bit operator for this processor"
)


def seed_of(module: str) -> int:
    return zlib.crc32(module.encode())


def coded(write: Callable[..., Tensors], group: int, width: int = 4, **more: Any) -> Writer:
    own = {name: more.pop(name) for name in ("symmetric", "shuffled") if name in more}

    def writer(module: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        out, inputs = weight.shape
        layer = random_coded(out, inputs, inputs if group == -1 else group, width, seed=seed_of(module), **own)
        return write(layer, **more), layer.weight()

    return writer


def int8_by_row(module: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    codes = torch.randint(-127, 128, weight.shape, generator=torch.Generator().manual_seed(seed_of(module)))
    scales = torch.full((len(weight), 1), 0.003)
    return {"weight": codes.to(torch.int8), "weight_scale": scales}, codes * scales


def floats(shape: str) -> Writer:
    """8-bit floats scaled by `tensor`, `row` or `block`."""

    def writer(module: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        out, inputs = weight.shape
        generator = torch.Generator().manual_seed(seed_of(module))
        codes = (torch.randn(out, inputs, generator=generator) * 20).to(torch.float8_e4m3fn)
        if shape == "tensor":
            scale = torch.tensor(0.003)
            return {"weight": codes, "weight_scale": scale, "input_scale": torch.tensor(9.0)}, codes.float() * scale
        if shape == "row":
            scales = torch.rand(out, 1, generator=generator) * 0.003 + 0.001
            return {"weight": codes, "weight_scale": scales}, codes.float() * scales
        blocks = torch.rand(-(-out // 128), inputs // 128, generator=generator) * 0.003 + 0.001
        dense = codes.float()
        for row in range(out):
            for block in range(inputs // 128):
                dense[row, 128 * block : 128 * block + 128] *= blocks[row // 128, block]
        return {"weight": codes, "weight_scale_inv": blocks}, dense

    return writer


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
PACKED = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": FOUR_BITS}}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}
CASES: dict[str, tuple[dict[str, Any], Writer, str]] = {
    "awq": (AWQ | {"modules_to_not_convert": ["layers.1.self_attn.o_proj"]}, coded(awq_tensors, 32), "int4"),
    "awq-g128": (AWQ | {"group_size": 128}, coded(awq_tensors, 128), "int4"),
    "gptq": (GPTQ, coded(gptq_tensors, 32, symmetric=True), "int4"),
    "gptq-act-order": (GPTQ | {"desc_act": True, "sym": False}, coded(gptq_tensors, 32, shuffled=True), "int4"),
    "gptq-one-group": (GPTQ | {"group_size": -1}, coded(gptq_tensors, -1), "int4"),
    "gptq-v2": (GPTQ | {"checkpoint_format": "gptq_v2"}, coded(gptq_tensors, 64, zero_offset=0), "int4"),
    "gptq-8": (GPTQ | {"bits": 8, "desc_act": True}, coded(gptq_tensors, 32, width=8, bits=8, shuffled=True), "dense"),
    "compressed-4": (PACKED, coded(compressed_tensors, 32, shuffled=True), "int4"),
    "compressed-8-packed": (
        PACKED | {"config_groups": {"group_0": EIGHT_BITS}},
        coded(compressed_tensors, 32, width=8, bits=8),
        "dense",
    ),
    "compressed-8": (
        PACKED | {"format": "int-quantized", "config_groups": {"group_0": EIGHT_BITS}},
        int8_by_row,
        "dense",
    ),
    "compressed-floats": (
        PACKED | {"format": "float-quantized", "config_groups": {"group_0": FLOATS}},
        floats("row"),
        "fp8",
    ),
    "fp8-blocks": (FP8 | {"weight_block_size": [128, 128]}, floats("block"), "fp8"),
    "fp8-tensor": (FP8 | {"activation_scheme": "static"}, floats("tensor"), "fp8"),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Path]]:
    made: dict[str, tuple[Path, Path]] = {}

    def get(name: str) -> tuple[Path, Path]:
        if name not in made:
            made[name] = save_pair(tmp_path_factory.mktemp(name), *CASES[name][:2])
        return made[name]

    return get


def load(path: Path, dtype: str) -> tuple[Core, Any]:
    wish = Sizes(4, 64, 64, 64, 4)
    folder = fetch_model(f"path:{path}", path)
    runner, vocabulary, sizes = directory_parts(folder, wish, dtype, CPU)
    scheduler = Scheduler(BlockPool(64, 4), max_num_seqs=4, max_num_batched_tokens=64)
    return Core(runner, vocabulary, scheduler, context=sizes.context, waiting_max=9, clock_ns=lambda: 0), runner


def greedy(core: Core) -> list[list[int]]:
    prompts = [[72, 101, 108, 108, 111], [1, 200, 33], list(range(40, 60))]
    heard = run_all(core, [work(str(at), prompt, max_tokens=12) for at, prompt in enumerate(prompts)])
    return [heard.tokens(str(at)) for at in range(len(prompts))]


@pytest.mark.parametrize("name", CASES)
def test_every_number_is_what_codes_scales_and_zeros_say(checkpoint: Any, name: str) -> None:
    quantised, plain = checkpoint(name)
    weights = open_weights(quantised, read_config(quantised))
    assert isinstance(weights, QuantisedWeights) and weights.form == CASES[name][2]
    for tensor, expected in load_file(plain / "model.safetensors").items():
        assert torch.allclose(weights(tensor).float(), expected, rtol=1e-6, atol=1e-9), tensor
    with pytest.raises(KeyError):
        weights("model.layers.9.mlp.up_proj.weight")
    kind = {"int4": Int4Weight, "fp8": Fp8Weight, "dense": type(None)}[weights.form]
    assert isinstance(weights.stored("model.layers.0.mlp.up_proj"), kind)
    assert weights.stored("model.layers.1.self_attn.o_proj") is None, "left plain"


@pytest.mark.parametrize("name", CASES)
def test_in_float32_the_answers_are_those_of_the_dequantised_model(checkpoint: Any, name: str) -> None:
    quantised, plain = checkpoint(name)
    tokens = greedy(load(quantised, "float32")[0])
    assert tokens == greedy(load(plain, "float32")[0])
    assert len({tuple(answer) for answer in tokens}) == 3, "models that say one thing show nothing"


def decoder(path: Path, kind: Precision) -> Decoder:
    config = read_config(path)
    with torch.inference_mode():
        return Decoder(read_architecture(config), open_weights(path, config), kind, CPU)


@needs_int4
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case[2] == "int4"])
def test_four_bits_stay_four_bits_and_logits_are_those_of_the_float_model(checkpoint: Any, name: str) -> None:
    quantised, plain_path = checkpoint(name)
    arch = read_architecture(read_config(quantised))
    (kind,) = candidates("auto", arch, CPU, "int4")
    assert kind.name == "int4-stored"
    with torch.inference_mode():
        small, exact = decoder(quantised, kind), decoder(plain_path, plain(torch.float32))
        near = likeness(read_through(exact, IDS), read_through(small, IDS))
    # activations in 8 bits cost a little where own kernels compute
    assert near.divergence < (4e-3 if native4_faster() else 2e-3) and near.agreement >= 0.95
    layer = small._layers[0]._mlp._gate_up
    assert isinstance(layer, (CpuInt4Linear, NativeInt4Linear)), "kept as it is"
    if native4_faster():
        assert small.path == "native", "one call a step, whatever the order of inputs and with plain layers beside"


@pytest.mark.parametrize("name", ["compressed-8", "fp8-blocks", "gptq-8"])
def test_what_this_machine_cannot_compute_with_is_dequantised_and_said(
    checkpoint: Any, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    quantised, _ = checkpoint(name)
    with caplog.at_level(logging.INFO):
        core, runner = load(quantised, "auto")
    assert not runner.precision.endswith("stored")
    assert "dequantised at load" in caplog.text
    assert all(len(answer) == 12 for answer in greedy(core))


def test_floats_of_8_bits_are_kept_where_the_hardware_multiplies_them(
    checkpoint: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch's scaled product runs on CPU as well, only without a gain: it stands in for the hardware's."""
    monkeypatch.setattr(fp8, "fp8_ready", lambda _: True)
    kind = as_stored("fp8", torch.device("cuda"))
    for name, hardware, scaled in (
        ("compressed-floats", True, True),
        ("fp8-tensor", True, True),
        ("fp8-tensor", False, False),
        ("fp8-blocks", True, False),
    ):
        monkeypatch.setattr(fp8, "in_hardware", lambda _, hardware=hardware: hardware)
        quantised, plain_path = checkpoint(name)
        with torch.inference_mode():
            small, exact = decoder(quantised, kind), decoder(plain_path, plain(torch.float32))
            layer = small._layers[0]._mlp._gate_up
            near = likeness(read_through(exact, IDS), read_through(small, IDS))
        assert isinstance(layer, fp8.Fp8Linear) and layer._scaled is scaled
        assert near.divergence < 0.03


def test_projections_that_sort_their_inputs_differently_are_dequantised(tmp_path: Path) -> None:
    def write(module: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        out, inputs = weight.shape
        layer = random_coded(out, inputs, 32, 4, seed=1, shuffled=not module.endswith("k_proj"))
        return gptq_tensors(layer), layer.weight()

    quantised, plain_path = save_pair(tmp_path, GPTQ, write)
    assert greedy(load(quantised, "float32")[0]) == greedy(load(plain_path, "float32")[0])
    names = [f"model.layers.0.self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj")]
    weights = open_weights(quantised, read_config(quantised))
    assert kept(weights, names, CPU) is None
    assert kept(weights, names[::2], CPU) is not None


UNSUPPORTED: list[tuple[dict[str, Any], str]] = [
    ({"quant_method": "bitsandbytes"}, "kind 'bitsandbytes' are not supported \\(have: awq, gptq"),
    ({}, "kind None"),
    (AWQ | {"bits": 3}, "AWQ weights with bits 3"),
    (AWQ | {"version": "gemv"}, "AWQ weights with version 'gemv'"),
    (AWQ | {"zero_point": False}, "AWQ weights with zero_point False"),
    (GPTQ | {"bits": 2}, "GPTQ weights with bits 2 are not supported \\(have: 4, 8\\)"),
    (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format 'marlin'"),
    (GPTQ | {"is_marlin_format": True}, "is_marlin_format True"),
    (GPTQ | {"dynamic": {"-:.*": {}}}, "dynamic"),
    (FP8 | {"fmt": "e5m2"}, "FP8 weights with fmt 'e5m2'"),
    (FP8 | {"weight_block_size": [64, 64]}, "weight_block_size"),
    (PACKED | {"format": "nvfp4-pack-quantized"}, "format 'nvfp4-pack-quantized'"),
    (PACKED | {"config_groups": {}}, "without config_groups"),
    (PACKED | {"config_groups": {"a": FOUR_BITS, "b": EIGHT_BITS}}, "mix layouts"),
]


@pytest.mark.parametrize(("quantisation", "words"), UNSUPPORTED, ids=[words for _, words in UNSUPPORTED])
def test_what_is_not_supported_is_refused_by_name(checkpoint: Any, quantisation: dict[str, Any], words: str) -> None:
    quantised, _ = checkpoint("awq")
    config = read_config(quantised) | {"quantization_config": quantisation}
    with pytest.raises(ModelError, match=words):
        open_weights(quantised, config)


def test_groups_of_uneven_size_and_tensors_that_do_not_fit_are_refused(checkpoint: Any, tmp_path: Path) -> None:
    quantised, _ = checkpoint("gptq-act-order")
    module = "model.layers.0.mlp.up_proj"
    for key, change, words in (
        ("g_idx", lambda value: torch.zeros_like(value), "differ in size"),
        ("scales", lambda value: value[:3], "do not fit together"),
    ):
        state = load_file(quantised / "model.safetensors")
        state[f"{module}.{key}"] = change(state[f"{module}.{key}"]).contiguous()
        save_file(state, tmp_path / "model.safetensors")
        with pytest.raises(ModelError, match=words):
            open_weights(tmp_path, read_config(quantised))(f"{module}.weight")


def test_a_checkpoint_without_a_layers_tensors_is_refused(checkpoint: Any, tmp_path: Path) -> None:
    quantised, _ = checkpoint("awq")
    state = load_file(quantised / "model.safetensors")
    del state["model.layers.0.mlp.up_proj.qweight"]
    save_file(state, tmp_path / "model.safetensors")
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (tmp_path / name).write_text((quantised / name).read_text())
    with pytest.raises(ModelError, match=r"no tensor .*layers\.0\.mlp\.up_proj"):
        load(tmp_path, "auto")


def test_the_first_code_lies_in_the_lowest_bits() -> None:
    assert packed_rows(torch.tensor([[1, 2, 3, 4, 5, 6, 7, 8]]), 4).tolist() == [[-0x789ABCDF]]
