"""Models with 4-bit weights through our own CPU kernels: the same model, one call a step, and the same bits in any company."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as hf

from engine.native_kit import VOCAB, ByteVocabulary, make_core, random_prompts, run_all, work
from engine.spec_kit import ScriptedDrafter, eager, foretold
from rungway.engine import int4, native_int4, precision
from rungway.engine import model as model_module
from rungway.engine.architecture import read_architecture
from rungway.engine.core import Core
from rungway.engine.formats import four_bits
from rungway.engine.model import Decoder
from rungway.engine.native_int4 import NativeInt4Linear, native4_works
from rungway.engine.precision import plain
from rungway.engine.selftest import likeness, probe_ids, read_through

CPU = torch.device("cpu")
NEW = 16
pytestmark = pytest.mark.skipif(not native4_works(), reason="our own CPU kernels need a compiler and AVX-512 VNNI")


@pytest.fixture(autouse=True)
def _always(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is faster is not the matter here."""
    monkeypatch.setattr(precision, "native_faster", lambda: True)
    monkeypatch.setattr(int4, "native4_faster", lambda: True)


@pytest.fixture(scope="module")
def model() -> Any:
    """With biases, and sizes that groups of 64 do not divide."""
    torch.manual_seed(7)
    shape = {"hidden_size": 96, "intermediate_size": 192, "num_hidden_layers": 3, "vocab_size": VOCAB}
    heads = {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 32, "tie_word_embeddings": True}
    small = hf.Qwen2ForCausalLM(hf.Qwen2Config(**shape, **heads, max_position_embeddings=512, initializer_range=0.2))
    for name, value in small.named_parameters():
        if name.endswith(("bias", "norm.weight")):
            torch.nn.init.normal_(value, mean=float("norm" in name), std=0.2)
    return small.eval()


def native_core(model: Any, dtype: str = "int4", **more: Any) -> Core:
    core, _ = make_core(model, **{"block_tokens": 16, "blocks": 64, "dtype": dtype, **more})
    assert core.stats().path.startswith("native int4")
    return core


def said(core: Core, works: list[Any]) -> dict[str, list[tuple[int, float]]]:
    """Tokens of each request with their logprobs, to the last bit."""
    heard = run_all(core, works)
    return {
        item.request_id: [
            (token, logprob.logprob)
            for delta in heard.deltas[item.request_id, 0]
            for token, logprob in zip(delta.token_ids, delta.logprobs or [], strict=True)
        ]
        for item in works
    }


@pytest.mark.parametrize("name", ["int4-g32", "int4-g128-sym"])
def test_it_is_the_same_model(model: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = four_bits(name, CPU)
    assert kind is not None
    arch, weights = read_architecture(model.config.to_dict()), model.state_dict().__getitem__
    ids = probe_ids(ByteVocabulary(), 90)
    with torch.inference_mode():
        native = Decoder(arch, weights, kind, CPU)
        assert native.path == "native" and isinstance(native._layers[0]._mlp._gate_up, NativeInt4Linear)
        got = read_through(native, ids)
        monkeypatch.setattr(model_module, "native_step", lambda *_: None)
        layers = read_through(Decoder(arch, weights, kind, CPU), ids)
        monkeypatch.setattr(int4, "native4_faster", lambda: False)
        torch_int4 = read_through(Decoder(arch, weights, kind, CPU), ids)
        exact = read_through(Decoder(arch, weights, plain(torch.float32), CPU), ids)
    own = likeness(exact, got).divergence
    assert 0 < own < 1.2 * likeness(exact, layers).divergence, "no worse than with torch's operations between them"
    if int4.int4_works():
        # activations in 8 bits cost little beside weights in 4
        assert own < 1.3 * likeness(exact, torch_int4).divergence


def test_the_same_bits_alone_in_a_batch_in_chunks_and_with_drafts(model: Any) -> None:
    works = [
        work(str(at), prompt, max_tokens=NEW, logprobs=1, temperature=0.8 * (at % 2), seed=at)
        for at, prompt in enumerate(random_prompts(7, longest=70))
    ]
    alone = {}
    for item in works:
        alone |= said(native_core(model), [item])
    assert all(len(answer) == NEW for answer in alone.values())
    for shape in ({"seqs": 8}, {"seqs": 5, "batched": 16}, {"seqs": 8, "batched": 33, "blocks": 14, "context": 128}):
        assert said(native_core(model, **shape), works) == alone
    answers = {name: [token for token, _ in answer] for name, answer in alone.items()}
    drafted = native_core(model, speculation=eager(ScriptedDrafter(foretold(answers, wrong=0.3))))
    assert said(drafted, works) == alone
    assert 0 < drafted.stats().accepted_tokens < drafted.stats().drafted_tokens


def test_kernels_that_are_wrong_are_not_used(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    packed = native_int4.pack_nibbles
    monkeypatch.setattr(
        native_int4, "pack_nibbles", lambda codes, scales, zeros: packed(codes, scales, (zeros + 1).clamp(0, 16))
    )
    native4_works.cache_clear()
    try:
        assert not native4_works()
        assert "not used for 4 bits" in caplog.text
    finally:
        native4_works.cache_clear()
