"""Four bits a weight: the grid is as good as it can be, products match, a token's result is its own, memory stays small."""

from __future__ import annotations

import logging
import weakref
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from engine.native_kit import ByteVocabulary
from rungway.engine import assemble, int4, precision
from rungway.engine.architecture import read_architecture
from rungway.engine.assemble import Sizes, module_parts
from rungway.engine.errors import ModelError
from rungway.engine.formats import FORMATS, INT8_GPU, Role, four_bits, plain
from rungway.engine.int4 import (
    CpuInt4Linear,
    KernelInt4Linear,
    Layer4,
    best_factors,
    group_for,
    int4_works,
    linear4,
    quantised,
)
from rungway.engine.int8_kernel import KernelInt8Linear
from rungway.engine.model import Decoder
from rungway.engine.native_int4 import NativeInt4Linear, native4_works, native_group
from rungway.engine.precision import Maker, candidates
from rungway.engine.selftest import Likeness, likeness, probe_ids, read_through
from rungway.engine.smoothing import weight_factors
from rungway.engine.stored import Int4Weight
from rungway.engine.weights import DirectoryWeights
from rungway.settings.schema_tiers import DTYPES

CPU = torch.device("cpu")
needs_int4 = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"), reason="no 4-bit operator for this processor"
)


def by_cpu(weight: Int4Weight, bias: torch.Tensor | None = None) -> list[Layer4]:
    """The layer by each way of computing it that this processor has."""
    own = [NativeInt4Linear(weight, bias)] if native4_works() else []
    return [*own, *([CpuInt4Linear(weight, bias)] if int4_works() and weight.shape[0] % 16 == 0 else [])]


@pytest.fixture(scope="module")
def model() -> Any:
    """Wide enough for groups of 128."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(7)
    shape = {"vocab_size": 300, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
    return LlamaForCausalLM(LlamaConfig(**shape, **heads, bos_token_id=None, eos_token_id=None)).eval()


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    group=st.sampled_from([32, 128]),
    symmetric=st.booleans(),
    offset=st.sampled_from([0.0, 3.0, -3.0]),
)
def test_no_weight_is_further_off_than_its_groups_range_allows(
    seed: int, group: int, symmetric: bool, offset: float
) -> None:
    weight = torch.randn(5, 256, generator=torch.Generator().manual_seed(seed)) + offset
    made = quantised(weight, group, symmetric=symmetric)
    assert made.shape == (5, 256) and made.group == group
    assert not symmetric or bool((made.zeros == 8).all())
    groups = weight.view(5, -1, group)
    low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    width = torch.maximum(-low, high) * 2 if symmetric else high - low
    error = (made.dense().view_as(groups) - groups).square().sum(-1)
    # unclipped rounding: half a step each; a step more at an end, where the rounded zero moves the grid
    assert bool((error <= group * (width / 15 * 0.51).square() + 2 * (width / 15).square()).all())


def test_clipping_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    weight = torch.randn(16, 256)

    def error() -> float:
        return float((quantised(weight, 128).dense() - weight).square().mean())

    searched = error()
    monkeypatch.setattr(int4, "_SHRINKS", (1.0,))
    assert searched < 0.95 * error()


def test_rows_are_searched_in_pieces_with_the_same_result(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    weight = torch.randn(37, 64)
    whole = quantised(weight, 32)
    monkeypatch.setattr(int4, "_PIECE", 5 * 64)
    assert torch.equal(whole.packed, quantised(weight, 32).packed)


@needs_int4
@pytest.mark.parametrize("group", [32, 128, 512])
def test_the_operator_computes_what_the_codes_say_and_rows_stay_apart(group: int) -> None:
    torch.manual_seed(0)
    weight, bias, x = quantised(torch.randn(48, 512), group), torch.randn(48), torch.randn(9, 512)
    expected = x @ weight.dense().T + bias
    loud = x.clone()
    loud[1:] *= 50.0
    for layer in by_cpu(weight, bias):
        assert (layer(x) - expected).abs().max() < 0.02 * expected.abs().max()
        assert torch.equal(layer(x)[0], layer(loud)[0]) and torch.equal(layer(x)[3:4], layer(x[3:4]))
        assert torch.allclose(layer.add(x, expected), layer(x) + expected)
    assert torch.equal(layer.add(x, torch.ones(9, 48)), layer(x) + 1.0)


@needs_int4
def test_sorted_inputs_are_put_into_the_order_of_the_columns() -> None:
    torch.manual_seed(0)
    order = torch.randperm(64)
    plain_weight, x = torch.randn(16, 64), torch.randn(3, 64)
    kept = quantised(plain_weight[:, order], 32)
    weight = Int4Weight(kept.packed, kept.scales, kept.zeros, order)
    assert torch.equal(weight.dense()[:, order], kept.dense())
    assert (weight.dense() - plain_weight).abs().max() < 0.5
    expected = x @ weight.dense().T
    for layer in (*by_cpu(weight), KernelInt4Linear(weight)):
        assert (layer(x) - expected).abs().max() < 0.02 * expected.abs().max()


def test_on_a_gpu_eight_bit_weights_go_through_the_kernels_and_activations_stay() -> None:
    """The registry gives the kernels' formulae on CPU: the wiring is the same."""
    torch.manual_seed(0)
    weight, bias, x = torch.randn(40, 64), torch.randn(40), torch.randn(3, 64).bfloat16()
    layer = Maker(INT8_GPU)(Role.DOWN, weight, bias)
    assert isinstance(layer, KernelInt8Linear)
    expected = x.float() @ weight.T + bias
    assert (layer(x) - expected).abs().max() < 0.02 * expected.abs().max()
    assert layer.add(x, x.new_ones(3, 40)).dtype is torch.bfloat16
    assert torch.equal(layer(x)[1:2], layer(x[1:2]))


def test_groups_that_the_kernel_lacks_are_split_or_refused() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 96)
    for group, parts in ((96, 3), (48, 6)):
        weight = quantised(torch.randn(16, 96), group)
        layer = KernelInt4Linear(weight)
        assert layer._weight.scales.shape == (16, parts)
        assert torch.allclose(layer(x).float(), x @ weight.dense().T, atol=0.1)
    with pytest.raises(RuntimeError, match="groups of 24"):
        KernelInt4Linear(quantised(torch.randn(16, 96), 24))


def test_shapes_that_no_operator_has_stay_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(int4, "native4_faster", lambda: False)
    assert [group_for(size, 128) for size in (256, 576, 96, 48)] == [128, 64, 32, None]
    assert linear4(quantised(torch.randn(24, 64), 32), None, torch.float32) is None, "rows come in sixteens"
    made = Maker(four_bits("int4", CPU) or plain(torch.float32))
    x = torch.ones(1, 48)
    assert made(Role.OUT, torch.ones(16, 48))(x).tolist() == [[48.0] * 16]
    assert made(Role.OUT, torch.ones(24, 64))(torch.ones(1, 64)).tolist() == [[64.0] * 24]


def test_own_kernels_take_any_number_of_outputs_and_split_large_groups() -> None:
    weight = quantised(torch.randn(24, 96), 96)
    assert native_group(weight) == 96 and native_group(quantised(torch.randn(8, 256), 256)) == 128
    assert native_group(quantised(torch.randn(8, 48), 48)) is None
    assert native_group(Int4Weight(weight.packed, weight.scales, weight.zeros + 0.5)) is None
    for layer in by_cpu(weight):
        x = torch.randn(3, 96)
        expected = x @ weight.dense().T
        assert (layer(x) - expected).abs().max() < 0.02 * expected.abs().max()


@needs_int4
@pytest.mark.parametrize("name", [name for name in FORMATS if name.startswith("int4")])
def test_a_model_in_four_bits_is_near_the_plain_one(model: Any, name: str) -> None:
    arch, weights = read_architecture(model.config.to_dict()), model.state_dict().__getitem__
    ids = probe_ids(ByteVocabulary(), 48)
    (kind,) = candidates(name, arch, CPU)
    assert kind.name == ("int4-g32" if name == "int4" else name)
    with torch.inference_mode():
        exact, small = (read_through(Decoder(arch, weights, one, CPU), ids) for one in (plain(torch.float32), kind))
    assert 0 < likeness(exact, small).divergence < 0.05


@needs_int4
def test_asked_for_by_name_four_bits_are_obeyed_and_what_they_cost_is_said(
    model: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = Sizes(4, 64, 32, 16, 4)
    monkeypatch.setattr(assemble, "likeness", lambda *_: Likeness(0.2, 3.0))
    with caplog.at_level(logging.INFO):
        assert module_parts(model, ByteVocabulary(), sizes, "int4-g128", CPU)[0].precision == "int4-g128"
    assert "int4-g128 beside bfloat16: Likeness(agreement=0.2" in caplog.text
    monkeypatch.setattr(assemble, "plain_fits", lambda *_: False)
    with caplog.at_level(logging.INFO):
        assert module_parts(model, ByteVocabulary(), sizes, "int4-g128", CPU)[0].precision == "int4-g128"
    assert "int4-g128 is taken as asked for, without a test" in caplog.text


def test_the_plain_model_is_only_made_first_where_it_fits(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    save_file({"one": torch.zeros(1000)}, tmp_path / "model.safetensors")
    weights = DirectoryWeights(tmp_path)
    assert 4000 < weights.nbytes < 5000
    for pages, fits in ((3, True), (1, False)):
        monkeypatch.setattr(
            "os.sysconf", lambda name, pages=pages: {"SC_AVPHYS_PAGES": pages, "SC_PAGE_SIZE": 4096}[name]
        )
        assert assemble.plain_fits(weights) is fits


@needs_int4
def test_channels_that_carry_much_lose_least(model: Any) -> None:
    """A model whose norms blow up a few channels, as trained ones do."""
    state = {name: value.clone() for name, value in model.state_dict().items()}
    for name, value in state.items():
        if name.endswith("layernorm.weight"):
            value[::16] *= 40.0
    arch, ids = read_architecture(model.config.to_dict()), probe_ids(ByteVocabulary(), 64)
    kind, exact = four_bits("int4-g128", CPU), plain(torch.float32)
    assert kind is not None
    watch = Maker(exact)
    watch.watching = True
    with torch.inference_mode():
        reference = read_through(Decoder(arch, state.__getitem__, exact, CPU, None, watch), ids)
        known = {place: layer.seen for place, layer in watch.watched.items()}
        blind, aware = (
            likeness(reference, read_through(Decoder(arch, state.__getitem__, kind, CPU, None, Maker(kind, seen)), ids))
            for seen in (None, known)
        )
    assert aware.divergence < 0.9 * blind.divergence


@pytest.mark.parametrize(("group", "gain"), [(32, 0.7), (128, 1.0)])
def test_loud_channels_cost_a_product_less_when_their_columns_are_made_larger(group: int, gain: float) -> None:
    """In groups of 128 a few long columns would cost the others more: they are left, or follow a little."""
    torch.manual_seed(0)
    weight, x = torch.randn(64, 256), torch.randn(50, 256)
    x[:, ::16] *= 8.0
    by = best_factors(weight, x.square().sum(0), group)
    by = torch.ones(256) if by is None else by
    exact = x @ weight.T
    blind = (x @ quantised(weight, group).dense().T - exact).square().mean()
    aware = ((x / by) @ quantised(weight * by, group).dense().T - exact).square().mean()
    assert aware <= gain * blind


def test_factors_change_no_product_and_leave_silent_channels_alone() -> None:
    weight, squares = torch.randn(8, 4), torch.tensor([1.0, 100.0, 0.0, 1.0])
    by = weight_factors(squares, weight, 0.5)
    assert by[1] > by[0] and float(by.log().mean()) == pytest.approx(0.0, abs=1e-5)
    x = torch.randn(3, 4)
    assert torch.allclose((x / by) @ (weight * by).T, x @ weight.T, atol=1e-4)


def test_four_bits_are_refused_where_nothing_computes_them(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rungway.engine.precision.int4_ready", lambda _: False)
    arch = read_architecture(model.config.to_dict())
    with pytest.raises(ModelError, match="int4-g128 is not supported here"):
        candidates("int4-g128", arch, CPU)
    assert set(DTYPES) == {"auto", *FORMATS}, "what the configuration takes is what there is"
    with pytest.raises(ModelError, match="none of auto"):
        candidates("int4-g64", arch, CPU)


def test_auto_never_takes_four_bits_of_its_own(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """However fast they are: what they cost in answers is accepted by name, or by serving a checkpoint that has them."""
    monkeypatch.setattr(precision, "_decode_cost_s", lambda _, kind: 1.0 if not kind.int4 else 0.1)
    kinds = candidates("auto", read_architecture(model.config.to_dict()), CPU)
    assert not any(kind.int4 for kind in kinds)
    assert kinds[-1].name in ("bfloat16", "float32"), "the last one is taken without a test"


@needs_int4
def test_weights_are_made_small_one_by_one(model: Any) -> None:
    """Of the plain weights no more than one projection's parts are alive at a time, embedding and head aside."""
    alive: dict[int, int] = {}
    most = 0

    def weights(name: str) -> torch.Tensor:
        nonlocal most
        tensor = model.state_dict()[name].clone()
        if "layers" in name:
            alive[id(tensor)] = tensor.nbytes
            weakref.finalize(tensor, alive.pop, id(tensor))
            most = max(most, sum(alive.values()))
        return tensor

    kind = four_bits("int4", CPU)
    assert kind is not None
    with torch.inference_mode():
        Decoder(read_architecture(model.config.to_dict()), weights, kind, CPU)
    largest = 2 * 256 * 128 * 4  # gate and up, float32
    assert alive == {} or sum(alive.values()) < 5 * 128 * 4, "at most norms are still shared"
    assert most <= largest + 2 * 128 * 256 * 4
