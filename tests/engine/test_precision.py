"""Fewer bits: what a token gets depends on nothing else in its batch, and the model is still the same model."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine.native_kit import VOCAB, ByteVocabulary, make_core, random_model, random_prompts, run_all, work
from rungway.engine import assemble, precision
from rungway.engine.architecture import read_architecture
from rungway.engine.assemble import Sizes, module_parts
from rungway.engine.errors import ModelError
from rungway.engine.int8 import Int8Linear, int8_works
from rungway.engine.model import Decoder
from rungway.engine.precision import INT8, INT8_PART, Maker, Role, candidates, plain
from rungway.engine.selftest import Likeness, likeness, probe_ids, read_through
from rungway.engine.smoothing import factors

CPU = torch.device("cpu")
needs_int8 = pytest.mark.skipif(not int8_works(), reason="the 8-bit operator is not usable on this processor")


@pytest.fixture(scope="module")
def model() -> Any:
    return random_model("qwen2")


@needs_int8
def test_a_neighbours_outlier_changes_no_bit_of_a_row() -> None:
    torch.manual_seed(0)
    layer = Int8Linear(torch.randn(40, 64), torch.randn(40))
    x = torch.randn(9, 64)
    loud = x.clone()
    loud[1:] *= 50.0
    assert torch.equal(layer(x)[0], layer(loud)[0])
    assert torch.equal(layer(x)[3:4], layer(x[3:4]))
    assert torch.equal(layer.add(x, torch.zeros(9, 40)), layer(x))


@needs_int8
def test_int8_is_close_and_rows_of_zeros_or_nonsense_stay_so() -> None:
    torch.manual_seed(0)
    weight, bias = torch.randn(40, 64), torch.randn(40)
    x = torch.randn(4, 64)
    x[1] = 0.0
    x[2, 5] = float("nan")
    got = Int8Linear(weight, bias)(x)
    expected = torch.nn.functional.linear(x, weight, bias)
    assert (got - expected)[[0, 3]].abs().max() < 0.05 * expected[[0, 3]].abs().max()
    assert torch.equal(got[1], bias)
    assert got[2].isnan().all()


@needs_int8
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_int8_answers_are_the_same_alone_in_a_batch_and_preempted(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache is bfloat16 and padding changes the order of its sums, hence first tokens and most others, not all."""
    model = random_model(family)
    prompts = random_prompts(8, longest=30)
    monkeypatch.setattr(assemble, "candidates", lambda *_: [INT8])
    monkeypatch.setattr(precision, "_best_s", lambda actions: [0.0] * len(actions))  # 8 bits everywhere, however busy
    works = [work(str(at), prompt, max_tokens=8) for at, prompt in enumerate(prompts)]
    alone = [run_all(make_core(model)[0], [item]).tokens(item.request_id) for item in works]
    together = run_all(make_core(model, seqs=5, batched=16)[0], works)
    same = sum(alone[at][0] == together.tokens(str(at))[0] for at in range(8))
    assert same == 8


@needs_int8
def test_the_model_in_int8_is_still_the_same_model(model: Any) -> None:
    arch, weights = read_architecture(model.config.to_dict()), model.state_dict().__getitem__
    ids = probe_ids(ByteVocabulary(), 64)
    with torch.inference_mode():
        exact, small = (read_through(Decoder(arch, weights, kind, CPU), ids) for kind in (plain(torch.float32), INT8))
        reference = torch.log_softmax(model(torch.tensor([ids])).logits[0].float(), -1)
    assert likeness(reference, exact).divergence == pytest.approx(0.0, abs=1e-5)
    assert likeness(reference, small).good
    assert not likeness(reference, torch.roll(exact, 1, -1)).good


@needs_int8
def test_a_model_that_suffers_from_int8_is_served_in_plain_numbers(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    bfloat16 = plain(torch.bfloat16)
    monkeypatch.setattr(assemble, "candidates", lambda *_: [INT8, INT8_PART, bfloat16])
    sizes = Sizes(4, 64, 32, 16, 4)

    def chosen() -> str:
        return module_parts(model, ByteVocabulary(), sizes, "auto", CPU)[0].precision

    monkeypatch.setattr(assemble, "likeness", lambda *_: Likeness(1.0, 0.0))
    assert chosen() == "int8"
    monkeypatch.setattr(assemble, "likeness", lambda *_: Likeness(0.2, 3.0))
    assert chosen() == "bfloat16"
    verdicts = iter([Likeness(0.2, 3.0), Likeness(1.0, 0.0)])
    monkeypatch.setattr(assemble, "likeness", lambda *_: next(verdicts))
    assert chosen() == "int8+bfloat16"


def test_float32_is_never_anything_else(model: Any) -> None:
    arch = read_architecture(model.config.to_dict())
    assert candidates("float32", arch, CPU) == [plain(torch.float32)]
    assert candidates("auto", arch, CPU)[-1] is not INT8, "the last one is taken without a test"
    for wrong in ("int3", "float16"):
        with pytest.raises(ModelError):
            candidates(wrong, arch, CPU)


@needs_int8
def test_each_shape_is_measured_once_and_both_forms_compute_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "native_faster", lambda: False)  # else there is no choice
    torch.manual_seed(0)
    weight, x = torch.randn(VOCAB, 64), torch.randn(3, 64)
    expected = x @ weight.T
    for kind in ("int8", "bfloat16"):
        make = Maker(INT8)
        make.chosen[VOCAB, 64] = kind
        layer = make(Role.HEAD, weight)
        assert torch.nn.functional.cosine_similarity(layer(x), expected).min() > 0.999
        assert layer(x).dtype == layer.add(x, expected).dtype == torch.float32
        assert make(Role.HEAD, weight, dtype=torch.bfloat16)(x).dtype == torch.bfloat16
    make = Maker(INT8)
    make(Role.HEAD, weight)
    assert set(make.chosen) == {(VOCAB, 64)}


@needs_int8
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_balancing_changes_no_product_and_helps_where_channels_are_uneven(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model whose norms blow up a few channels, as trained ones do."""
    monkeypatch.setattr(precision, "_best_s", lambda actions: [0.0] * len(actions))  # 8 bits everywhere
    model = random_model(family)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    for name, value in state.items():
        if name.endswith("layernorm.weight"):
            value[::16] *= 40.0
        if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight", "gate_proj.weight", "up_proj.weight")):
            value[:, ::16] /= 40.0
    arch, ids = read_architecture(model.config.to_dict()), probe_ids(ByteVocabulary(), 64)
    exact = plain(torch.float32)
    watch = Maker(exact)
    watch.watching = True
    with torch.inference_mode():
        reference = read_through(Decoder(arch, state.__getitem__, exact, CPU, None, watch), ids)
        known = {place: layer.seen for place, layer in watch.watched.items()}
        uneven, even = (
            likeness(reference, read_through(Decoder(arch, state.__getitem__, INT8, CPU, None, Maker(INT8, seen)), ids))
            for seen in (None, known)
        )
    assert len(known) == 4 * arch.layers
    assert even.divergence < 0.5 * uneven.divergence and even.good


def test_channels_that_were_never_seen_are_left_alone() -> None:
    weight = torch.randn(8, 4)
    by = factors(torch.tensor([1.0, 100.0, 0.0, 1.0]), weight)
    assert bool((by > 0).all()) and float(by.log().mean()) == pytest.approx(0.0, abs=1e-5)
    x = torch.randn(3, 4)
    assert torch.allclose((x / by) @ (weight * by).T, x @ weight.T, atol=1e-4)
