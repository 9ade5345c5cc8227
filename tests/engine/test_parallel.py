"""One model over two processes (gloo): the same answers as one process, and no hang when a rank is gone or stands still."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.family_kit import MODELS, gemma3
from engine.native_kit import random_prompts, run_all, work
from engine.test_tokenizer import save
from rungway.contracts import Version
from rungway.engine.architecture import read_architecture
from rungway.engine.assemble import Sizes, directory_parts
from rungway.engine.blocks import BlockPool
from rungway.engine.core import Core
from rungway.engine.engine import NativeEngine
from rungway.engine.errors import ModelError
from rungway.engine.parallel import lead as lead_module
from rungway.engine.parallel.lead import LeadDecoder
from rungway.engine.parallel.shards import ShardedWeights, share_of
from rungway.engine.protocol import Delta
from rungway.engine.runner import TorchRunner
from rungway.engine.scheduler import Scheduler
from rungway.replica.build import build_engine
from rungway.settings.schema_tiers import Version as VersionIn

CPU = torch.device("cpu")
WISH = Sizes(5, 96, 16, 24, 4)
TIMEOUT_S = 5.0


def directory(model: Any, folder: Path) -> Path:
    model.save_pretrained(folder)
    (folder / "apart").mkdir()
    save(folder / "apart")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.move(folder / "apart" / file, folder / file)
    return folder


def core_of(runner: TorchRunner, vocabulary: Any, sizes: Sizes) -> tuple[Core, Scheduler]:
    scheduler = Scheduler(
        BlockPool(sizes.kv_blocks, sizes.block_tokens),
        max_num_seqs=sizes.max_num_seqs,
        max_num_batched_tokens=sizes.max_num_batched_tokens,
    )
    return Core(runner, vocabulary, scheduler, context=sizes.context, waiting_max=100, clock_ns=lambda: 0), scheduler


def answers(path: Path, ranks: int) -> tuple[list[list[int]], int]:
    """Greedy answers to prompts that are chunked and preempted; and how often."""
    parts = directory_parts(path, WISH, "float32", CPU, ranks=ranks, ranks_timeout_s=60.0)
    try:
        core, scheduler = core_of(*parts)
        prompts = random_prompts(6, seed=9)
        heard = run_all(core, [work(str(at), prompt, max_tokens=10) for at, prompt in enumerate(prompts)])
        return [heard.tokens(str(at)) for at in range(6)], scheduler.preemptions
    finally:
        model = parts[0].model
        parts[0].close()
        if isinstance(model, LeadDecoder):
            assert [process.returncode for process in model.followers._processes] == [0], "it ends when told, by itself"


@pytest.mark.parametrize("name", ["qwen2-window", "deepseek-v3", "uneven"])
def test_two_ranks_say_what_one_says(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`uneven`: a tied vocabulary of odd size, norms after the sums, a cap on the joined logits."""
    monkeypatch.setattr(lead_module, "_END_WAIT_S", 60.0)  # to unload torch takes seconds on a busy machine
    model = gemma3(vocab_size=301, final_logit_softcapping=2.0) if name == "uneven" else MODELS[name]()
    path = directory(model, tmp_path)
    one, preemptions = answers(path, 1)
    assert answers(path, 2) == (one, preemptions) and preemptions > 0


@pytest.mark.parametrize("name", list(MODELS))
def test_shares_add_up_to_the_model(name: str) -> None:
    """Without processes: every tensor is whole on both ranks, or divided so that the parts give it back."""
    model = MODELS[name]()
    arch, state = read_architecture(model.config.to_dict()), model.state_dict()
    share = share_of(arch, 2)
    assert share.heads * 2 == arch.heads
    ranks = [ShardedWeights(state.__getitem__, rank, 2) for rank in range(2)]
    divided = 0
    for tensor_name, whole in state.items():
        first, second = (rank(tensor_name) for rank in ranks)
        if first.shape == whole.shape:
            assert torch.equal(first, whole) and (torch.equal(second, whole) or not second.any())
            continue
        divided += 1
        if tensor_name.endswith("experts.gate_up_proj"):
            halves = [torch.cat(pair, 1) for pair in zip(first.chunk(2, 1), second.chunk(2, 1), strict=True)]
            assert torch.equal(torch.cat(halves, 1), whole)
        else:
            dim = next(at for at in range(whole.dim()) if first.shape[at] != whole.shape[at])
            assert torch.equal(torch.cat([first, second], dim), whole)
    assert divided >= 3 * arch.layers


def test_what_cannot_be_divided_is_refused_before_anything_starts(tmp_path: Path) -> None:
    path = directory(MODELS["llama-yarn"](), tmp_path)
    with pytest.raises(ModelError, match=r"2 key heads cannot be divided over 3 ranks"):
        directory_parts(path, WISH, "float32", CPU, ranks=3)
    with pytest.raises(ModelError, match="int8"):
        directory_parts(path, WISH, "int8", CPU, ranks=2)


def test_a_rank_that_cannot_load_ends_the_start(tmp_path: Path) -> None:
    """The other ranks read the directory themselves: here they find it gone."""
    path = directory(MODELS["llama-yarn"](), tmp_path)
    from rungway.engine.checkpoint import open_weights
    from rungway.engine.parallel.lead import lead
    from rungway.engine.weights import read_config

    config = read_config(path)
    with pytest.raises(ModelError, match="rank 1 of the model ended with code 1"):
        lead(path / "gone", read_architecture(config), open_weights(path, config), "float32", CPU, 2, TIMEOUT_S)


@pytest.mark.parametrize(
    "more",
    [{"backend": "fake"}, {"backend": "native", "model": "path:/x", "num_gpus": 1}],
)
def test_a_configuration_that_cannot_work_is_refused(more: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="tensor_parallel"):
        VersionIn(**more, tensor_parallel=2)
    VersionIn(**more, tensor_parallel=1)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[NativeEngine]:
    version = Version(
        name="v",
        tier="t",
        model=f"path:{directory(MODELS['llama-yarn'](), tmp_path)}",
        backend="native",
        replicas_min=1,
        replicas_max=1,
        replica_cost_nusd_per_hour=0,
        max_num_seqs=4,
        max_context=128,
        dtype="float32",
        device="cpu",
        tensor_parallel=2,
        tensor_parallel_timeout_s=TIMEOUT_S,
    )
    engine = build_engine(version, tmp_path)
    assert isinstance(engine, NativeEngine)
    yield engine
    runner = engine._core._runner
    assert isinstance(runner, TorchRunner)
    runner.close()


def rank_one(engine: NativeEngine) -> int:
    runner = engine._core._runner
    assert isinstance(runner, TorchRunner) and isinstance(runner.model, LeadDecoder)
    (pid,) = runner.model.followers.pids
    return pid


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_lost_rank_ends_the_engine_with_an_error(engine: NativeEngine, how: signal.Signals) -> None:
    heard: list[Delta] = []
    spoke, ended, second = asyncio.Event(), asyncio.Event(), asyncio.Event()

    def take(deltas: list[Delta]) -> None:
        heard.extend(deltas)
        spoke.set()
        for delta in deltas:
            if delta.finish is not None:
                (ended if delta.request_id == "first" else second).set()

    await engine.start(take)
    engine.submit(work("first", [1, 2, 3], max_tokens=120))
    await asyncio.wait_for(spoke.wait(), 60.0)
    assert engine.check() == []
    os.kill(rank_one(engine), how)
    await asyncio.wait_for(ended.wait(), 60.0)
    last = heard[-1]
    assert last.finish == "error" and "engine failure: RankError" in (last.error or "")
    engine.submit(work("second", [1, 2, 3], max_tokens=4))
    await asyncio.wait_for(second.wait(), 60.0)
    assert heard[-1].finish == "error"
    assert any("step loop has died" in problem for problem in engine.check()), "the replica calls itself unhealthy"
    await engine.stop()
    assert not os.path.exists(f"/proc/{rank_one(engine)}/exe")
