"""A decoder's step in one call of our own CPU kernels: the same model, and the same bits whatever else is going on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as hf

from engine.native_kit import VOCAB, ByteVocabulary, Heard, make_core, random_prompts, run_all, work
from engine.spec_kit import ScriptedDrafter, eager, foretold
from rungway.engine import model as model_module
from rungway.engine import native_linear, precision
from rungway.engine.architecture import read_architecture
from rungway.engine.assemble import Sizes, module_parts
from rungway.engine.core import Core
from rungway.engine.formats import INT8, INT8_PART
from rungway.engine.model import Decoder
from rungway.engine.precision import plain
from rungway.engine.selftest import likeness, probe_ids, read_through
from rungway.kernels.cpu import bindings

CPU = torch.device("cpu")
NEW = 20
needs_kernels = pytest.mark.skipif(
    not native_linear.native_works(), reason="our own CPU kernels need a C++ compiler and AVX-512 VNNI"
)
FAMILIES: dict[str, tuple[Any, Any]] = {
    "llama": (hf.LlamaForCausalLM, hf.LlamaConfig),
    "qwen2": (hf.Qwen2ForCausalLM, hf.Qwen2Config),
    "qwen3": (hf.Qwen3ForCausalLM, hf.Qwen3Config),
}


@pytest.fixture(autouse=True)
def _always(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is faster is not the matter here."""
    monkeypatch.setattr(precision, "native_faster", native_linear.native_works)


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def model(request: pytest.FixtureRequest) -> Any:
    """A small model of a shape that the kernels take; weights as large as trained ones, biases and norms not trivial."""
    made, config = FAMILIES[request.param]
    torch.manual_seed(7)
    shape = {"hidden_size": 72, "intermediate_size": 128, "num_hidden_layers": 3, "head_dim": 32, "vocab_size": VOCAB}
    heads = {"num_attention_heads": 6, "num_key_value_heads": 2, "tie_word_embeddings": request.param != "llama"}
    small = made(config(**shape, **heads, max_position_embeddings=512, initializer_range=0.2)).eval()
    for name, value in small.named_parameters():
        if name.endswith(("bias", "norm.weight")):
            torch.nn.init.normal_(value, mean=float("norm" in name), std=0.2)
    return small


NATIVE: dict[str, Any] = {"block_tokens": 16, "blocks": 64, "dtype": "int8"}


def native_core(model: Any, **more: Any) -> Core:
    core, _ = make_core(model, **{**NATIVE, **more})
    assert core.stats().path == "native int8"
    return core


def said(heard: Heard, name: str) -> list[tuple[int, float, list[float]]]:
    """Tokens of a request with their logprobs, and those of the alternatives, to the last bit."""
    found = []
    for delta in heard.deltas[name, 0]:
        for token, logprob in zip(delta.token_ids, delta.logprobs or [], strict=True):
            found.append((token, logprob.logprob, [value for _, _, value in logprob.top]))
    return found


@needs_kernels
@pytest.mark.parametrize("kind", [INT8, INT8_PART], ids=lambda kind: kind.name)
def test_it_is_the_same_model(model: Any, kind: precision.Precision, monkeypatch: pytest.MonkeyPatch) -> None:
    arch, weights, ids = (
        read_architecture(model.config.to_dict()),
        model.state_dict().__getitem__,
        probe_ids(ByteVocabulary(), 90),
    )
    with torch.inference_mode():
        exact = read_through(Decoder(arch, weights, plain(torch.float32), CPU), ids)
        native = Decoder(arch, weights, kind, CPU)
        assert native.path == "native"
        got = read_through(native, ids)
        monkeypatch.setattr(model_module, "native_step", lambda *_: None)
        apart = Decoder(arch, weights, kind, CPU)
        assert apart.path == "torch"
        assert likeness(exact, got).good
        # no worse than the same layers with torch's operations between them
        assert likeness(exact, got).divergence < 1.2 * likeness(exact, read_through(apart, ids)).divergence


@needs_kernels
def test_the_same_bits_alone_in_a_batch_in_chunks_and_preempted(model: Any) -> None:
    works = [
        work(str(at), prompt, max_tokens=NEW, logprobs=2, temperature=0.8 * (at % 2), seed=at)
        for at, prompt in enumerate(random_prompts(8, longest=90))
    ]
    alone = [said(run_all(native_core(model), [item]), item.request_id) for item in works]
    assert all(len(answer) == NEW for answer in alone)
    preempted = 0
    for shape in ({"seqs": 8}, {"seqs": 5, "batched": 16}, {"seqs": 8, "batched": 33, "blocks": 14, "context": 128}):
        core, scheduler = make_core(model, **{**NATIVE, **shape})
        heard = run_all(core, works)
        assert [said(heard, item.request_id) for item in works] == alone
        preempted += scheduler.preemptions
    assert preempted > 0
    # what was computed before is found again, or taken up by another replica
    again = run_all(core := native_core(model), works)
    again = run_all(core, [work("again", works[3].prompt_ids, max_tokens=NEW, logprobs=2, temperature=0.8, seed=3)])
    assert said(again, "again") == alone[3]
    if len(works[3].prompt_ids) > 16:
        assert again.usage("again").cached_tokens >= 16
    tokens = [token for token, _, _ in alone[5]]
    resumed = work("5", works[5].prompt_ids, resume=[tokens[:5]], max_tokens=NEW, logprobs=2, temperature=0.8, seed=5)
    assert said(run_all(native_core(model), [resumed]), "5") == alone[5][5:]


@needs_kernels
def test_the_same_bits_with_drafts_right_and_wrong(model: Any) -> None:
    works = [
        work(str(at), prompt, max_tokens=NEW, logprobs=2) for at, prompt in enumerate(random_prompts(5, longest=40))
    ]
    expected = [said(run_all(native_core(model), [item]), item.request_id) for item in works]
    answers = {str(at): [token for token, _, _ in answer] for at, answer in enumerate(expected)}
    core = native_core(model, speculation=eager(ScriptedDrafter(foretold(answers, wrong=0.3))))
    heard = run_all(core, works)
    assert [said(heard, item.request_id) for item in works] == expected
    assert 0 < core.stats().accepted_tokens < core.stats().drafted_tokens


@needs_kernels
def test_threads_change_nothing(model: Any) -> None:
    works = [work(str(at), prompt, max_tokens=NEW, logprobs=2) for at, prompt in enumerate(random_prompts(4))]
    expected = run_all(native_core(model), works)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        heard = run_all(native_core(model), works)
    finally:
        torch.set_num_threads(threads)
    assert [said(heard, str(at)) for at in range(4)] == [said(expected, str(at)) for at in range(4)]


@needs_kernels
def test_blocks_of_other_sizes_are_served_by_torch(model: Any) -> None:
    core, _ = make_core(model, block_tokens=8, dtype="int8")
    assert core.stats().path == "torch int8"
    heard = run_all(core, [work("r", [1, 2, 3], max_tokens=NEW)])
    assert len(heard.tokens("r")) == NEW


def test_without_a_compiler_torch_computes_and_says_why(
    model: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", "none-such")
    monkeypatch.setenv("RUNGWAY_KERNELS_DIR", "none-such")
    for cached in (bindings.library, native_linear.native_works):
        cached.cache_clear()
    try:
        with caplog.at_level("INFO"):
            wish = Sizes(4, 64, 32, 16, 16)
            runner = module_parts(model, ByteVocabulary(), wish, "auto", CPU)[0]
        assert runner.path.startswith("torch ")
        assert any("own CPU kernels are not used: " in record.message for record in caplog.records)
    finally:
        for cached in (bindings.library, native_linear.native_works):
            cached.cache_clear()


def test_the_kernels_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUNGWAY_CPU_KERNELS", "off")
    for cached in (bindings.library, native_linear.native_works):
        cached.cache_clear()
    try:
        assert not native_linear.native_works()
    finally:
        for cached in (bindings.library, native_linear.native_works):
            cached.cache_clear()
