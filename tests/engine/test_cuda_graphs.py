"""Recorded decode steps without a GPU: a recorder whose replay calls the same function over the same static inputs. What is
tested is all that Python does: padding, block tables, when a step is recorded at all. Capture itself: `make test-gpu`."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine.family_kit import gemma3
from engine.native_kit import ByteVocabulary, generate, make_core, random_model, random_prompts, run_all, work
from engine.spec_kit import ScriptedDrafter, eager, foretold
from rungway.engine.assemble import Sizes, module_parts
from rungway.engine.cuda_graphs import Action, CudaRecorder, DecodeGraphs
from rungway.engine.kernel_ops import KernelOps
from rungway.engine.model import Batch
from rungway.engine.ops import Span
from rungway.engine.parallel.wire import moved
from rungway.engine.runner import TorchRunner, enter

NEW = 12
BLOCK_TOKENS = 4


class FakeRecorder:
    """Replays by calling again; holds `each` bytes for every recording."""

    def __init__(self, each: int = 0) -> None:
        self.each = each
        self.recorded = 0
        self.replayed = 0

    def record(self, action: Action) -> Action:
        self.recorded += 1
        action()

        def replay() -> torch.Tensor:
            self.replayed += 1
            return action()

        return replay

    def held_bytes(self) -> int:
        return self.recorded * self.each


@pytest.fixture(scope="module")
def module() -> Any:
    return random_model("llama")


def make_runner(module: Any) -> TorchRunner:
    wish = Sizes(8, 64, 64, 60, BLOCK_TOKENS)
    return module_parts(module, ByteVocabulary(), wish, "float32", torch.device("cpu"), KernelOps())[0]


def filled(runner: TorchRunner) -> list[torch.Tensor]:
    for at, stored in enumerate(runner._cache):
        stored.copy_(torch.randn(stored.shape, generator=torch.Generator().manual_seed(at)))
    return runner._cache


def decode_batch(lengths: list[int], seed: int) -> Batch:
    """One token for each of sequences of `lengths` (their own blocks, dealt out shuffled)."""
    generator = torch.Generator().manual_seed(seed)
    width = max(-(-length // BLOCK_TOKENS) for length in lengths)
    order = torch.randperm(60, generator=generator) + 1
    blocks = order[: len(lengths) * width].view(len(lengths), width).contiguous()
    positions = torch.tensor(lengths) - 1
    slots = blocks.gather(1, (positions // BLOCK_TOKENS)[:, None])[:, 0] * BLOCK_TOKENS + positions % BLOCK_TOKENS
    ids = torch.randint(0, 200, (len(lengths),), generator=generator)
    span = Span(0, len(lengths), blocks, torch.tensor(lengths), None, chunk=False)
    return Batch(ids=ids, positions=positions, slots=slots, outputs=torch.arange(len(lengths)), spans=[span])


def drafts_batch(counts: list[int], lengths: list[int], seed: int) -> Batch:
    """The newest `counts` tokens of sequences of `lengths`, as steps with drafts have them."""
    whole = decode_batch(lengths, seed)
    tables = whole.spans[0].blocks
    rows = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    positions = torch.cat([torch.arange(end - count, end) for count, end in zip(counts, lengths, strict=True)])
    slots = tables[rows, positions // BLOCK_TOKENS] * BLOCK_TOKENS + positions % BLOCK_TOKENS
    ids = torch.randint(0, 200, (len(rows),), generator=torch.Generator().manual_seed(seed))
    starts = torch.tensor([0, *torch.tensor(counts).cumsum(0)])
    span = Span(0, len(rows), tables, torch.tensor(lengths), None, chunk=False, starts=starts, most=max(counts))
    return Batch(ids=ids, positions=positions, slots=slots, outputs=torch.arange(len(rows)), spans=[span])


def graphs_of(runner: TorchRunner, recorder: FakeRecorder, sizes: list[int], **more: int) -> DecodeGraphs:
    return DecodeGraphs(runner.model, runner._cache, sizes=sizes, width=16, recorder=recorder, **more)


@torch.inference_mode()
def test_a_replay_is_the_eager_step_and_no_row_of_an_earlier_one_stays(module: Any) -> None:
    """Large batches, then small ones, then others: logits and cache are those of the eager step each time."""
    runner, recorder = make_runner(module), FakeRecorder()
    cache = filled(runner)
    graphs = graphs_of(runner, recorder, [1, 4, 8])
    steps = [[9, 17, 3, 30, 1, 8, 5], [4, 2, 11], [6], [12, 13, 14, 15, 16], [33, 1]]
    for seed, lengths in enumerate(steps):
        batch = decode_batch(lengths, seed)
        before = [stored.clone() for stored in cache]
        expected = runner.model.forward(batch, before)
        got = graphs.run(batch)
        assert got is not None and torch.equal(got, expected)
        for stored, alike in zip(cache, before, strict=True):
            assert torch.equal(stored[:, :, 1:], alike[:, :, 1:])  # all but the null block
            assert torch.equal(stored[:, :, 0, 1:], alike[:, :, 0, 1:])  # of which padding may write the first place
    assert recorder.recorded == 3 and recorder.replayed == len(steps)


@torch.inference_mode()
def test_steps_with_drafts_are_replayed_whatever_their_division(module: Any) -> None:
    """Between plain steps of other sizes; the next plain step finds nothing of theirs."""
    runner, recorder = make_runner(module), FakeRecorder()
    cache = filled(runner)
    graphs = graphs_of(runner, recorder, [2, 4, 8], queries=4)
    steps = [([4, 1, 3], [9, 17, 3]), ([1] * 5, [4, 8, 1, 2, 7]), ([1, 2], [1, 12]), ([3, 4], [30, 22]), ([4], [8])]
    for seed, (counts, lengths) in enumerate(steps):
        batch = decode_batch(lengths, seed) if max(counts) == 1 else drafts_batch(counts, lengths, seed)
        before = [stored.clone() for stored in cache]
        expected = runner.model.forward(batch, before)
        got = graphs.run(batch)
        assert got is not None and torch.equal(got, expected)
        for stored, alike in zip(cache, before, strict=True):
            assert torch.equal(stored[:, :, 1:], alike[:, :, 1:])
    assert recorder.recorded == 6 and recorder.replayed == len(steps)
    assert graphs.run(drafts_batch([5], [9], 0)) is None  # more rows of one sequence than were recorded
    plain = graphs_of(runner, FakeRecorder(), [2, 4, 8])
    assert plain.run(drafts_batch([2], [9], 0)) is None


@pytest.mark.parametrize("drafts", [3, 10])
def test_an_engine_with_drafts_replays_and_says_the_same(module: Any, drafts: int) -> None:
    """More drafts than rows of one tile as well: those go another way."""
    prompts = random_prompts(6)
    expected = {str(at): generate(module, prompt, NEW) for at, prompt in enumerate(prompts)}
    speculation = eager(ScriptedDrafter(foretold(expected, 0.3)), tokens_max=drafts)
    core, _ = make_core(module, seqs=4, batched=64, ops=KernelOps(), speculation=speculation)
    recorder = FakeRecorder()
    core._runner.record([4, 8, 16], recorder, drafts)
    heard = run_all(core, [work(str(at), prompt, max_tokens=NEW) for at, prompt in enumerate(prompts)])
    assert {name: heard.tokens(name) for name in expected} == expected
    assert speculation.accepted > 0 and recorder.replayed > (4 if drafts == 3 else 0)


@torch.inference_mode()
def test_other_steps_are_left_to_the_eager_path(module: Any) -> None:
    runner = make_runner(module)
    graphs = graphs_of(runner, FakeRecorder(), [2, 4])
    batch = decode_batch([3, 4, 5], 0)
    assert graphs.run(batch) is not None
    assert graphs.run(decode_batch([3] * 5, 0)) is None  # more rows than the largest size
    span = batch.spans[0]
    chunk = Span(0, 3, span.blocks[:1], span.lengths[:1], None, chunk=True)
    others = [[chunk], [span, chunk], [Span(0, 3, torch.zeros(3, 17).long(), span.lengths, None, chunk=False)]]
    for spans in others:
        assert graphs.run(Batch(batch.ids, batch.positions, batch.slots, batch.outputs, spans)) is None
    fewer = Batch(batch.ids, batch.positions, batch.slots, batch.outputs[:2], batch.spans)
    assert graphs.run(fewer) is None  # a row whose logits nobody wants


@torch.inference_mode()
def test_recording_stops_at_the_bound_of_memory(module: Any) -> None:
    runner = make_runner(module)
    graphs = graphs_of(runner, FakeRecorder(each=10), [8, 1, 2, 4], bytes_max=15)
    assert graphs.sizes == (1, 2)
    assert graphs.run(decode_batch([3] * 3, 0)) is None
    assert graphs_of(runner, FakeRecorder(), []).run(decode_batch([3], 0)) is None


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_an_engine_that_replays_says_what_transformers_says(module: Any, family: str) -> None:
    """Sequences come and go, prompts run between decodes, blocks are preempted and dealt out anew; with windows as well."""
    module = module if family == "llama" else gemma3()
    prompts = random_prompts(10)
    expected = [generate(module, prompt, NEW) for prompt in prompts]
    core, scheduler = make_core(module, seqs=7, batched=16, blocks=24, context=96, ops=KernelOps())
    recorder = FakeRecorder()
    core._runner.record([1, 2, 4, 8], recorder)
    heard = run_all(core, [work(str(at), prompt, max_tokens=NEW) for at, prompt in enumerate(prompts)])
    assert [heard.tokens(str(at)) for at in range(10)] == expected
    assert recorder.replayed > NEW and scheduler.preemptions > 0


@torch.inference_mode()
def test_what_cannot_be_recorded_runs_eagerly(module: Any) -> None:
    class Refusing(FakeRecorder):
        def record(self, action: Action) -> Action:
            if self.recorded == 1:
                raise RuntimeError("operation not permitted when stream is capturing")
            return super().record(action)

    graphs = graphs_of(make_runner(module), Refusing(), [1, 2, 4])
    assert graphs.sizes == (1,)
    assert graphs.run(decode_batch([3], 0)) is not None and graphs.run(decode_batch([3, 4], 0)) is None


def test_batch_sizes_follow_from_the_sequences_and_the_setting() -> None:
    assert Sizes(3, 64, 64, 60, 4).graph_rows == (1, 2, 4, 6)
    assert Sizes(512, 64, 64, 60, 4, graph_rows_max=40).graph_rows == (1, 2, 4, 8, 16, 24, 32, 40)
    assert Sizes(8, 64, 64, 60, 4, graph_rows_max=0).graph_rows == ()


def test_a_thread_takes_the_device_that_was_asked_for_by_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton starts kernels on the thread's own device, whatever the tensors lie on."""
    taken: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    for name in ("cpu", "cuda", "cuda:1"):
        enter(torch.device(name))
    assert taken == [torch.device("cuda:1")]


def test_models_whose_steps_depend_on_values_are_not_recorded(module: Any) -> None:
    runner = module_parts(module, ByteVocabulary(), Sizes(8, 64, 64, 60, 4), "float32", torch.device("cpu"))[0]
    recorder = FakeRecorder()
    runner.record([1, 2], recorder)  # plain operations: attention by masks
    assert recorder.recorded == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@torch.inference_mode()
def test_captured_graphs_replay_the_eager_step(module: Any) -> None:
    device = torch.device("cuda")
    wish = Sizes(8, 64, 64, 60, BLOCK_TOKENS)
    runner = module_parts(module.to(device), ByteVocabulary(), wish, "bfloat16", device)[0]
    filled(runner)
    graphs = DecodeGraphs(
        runner.model, runner._cache, sizes=[1, 4, 8], width=16, recorder=CudaRecorder(device), queries=4
    )
    batches = [decode_batch(lengths, at) for at, lengths in enumerate([[9, 17, 3, 30, 1], [4, 2, 11], [6]])]
    batches.insert(1, drafts_batch([4, 1, 2], [9, 17, 3], 7))
    for batch in batches:
        there = moved(batch, device)
        expected = runner.model.forward(there, [stored.clone() for stored in runner._cache])
        got = graphs.run(there)
        assert got is not None
        torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-2)
