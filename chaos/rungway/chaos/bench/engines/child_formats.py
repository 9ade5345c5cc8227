"""A model in one format, in a process of its own: how well it predicts texts, what it answers, what it weighs, how fast it is."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

from rungway.chaos.bench.engines.wire import claim_stdout
from rungway.engine.assemble import Sizes, directory_parts, pick_device
from rungway.engine.blocks import BlockPool
from rungway.engine.core import Core
from rungway.engine.errors import ModelError
from rungway.engine.protocol import Sampling, Work
from rungway.engine.roofline import weight_bytes
from rungway.engine.runner import TorchRunner
from rungway.engine.scheduler import Scheduler
from rungway.engine.selftest import read_through
from rungway.engine.tokenizer import Vocabulary

ROWS = 8
CONTEXT = 640
BLOCK = 16


def main(config: dict[str, Any]) -> None:
    write = claim_stdout()
    work = json.loads(Path(config["work"]).read_text(encoding="utf-8"))
    wish = Sizes(ROWS, CONTEXT, 512, 0, BLOCK)
    try:
        runner, vocabulary, _ = directory_parts(Path(config["model"]), wish, config["dtype"], pick_device("cpu"))
    except ModelError as error:
        write({"ready": {"not_here": str(error)}})
        return
    found = {
        "path": runner.path,
        "precision": runner.precision,
        "weight_bytes": weight_bytes(runner.model.arch, runner.model.precision),
        "nats": {name: _nats(runner, windows) for name, windows in work["windows"].items()},
        "answers": _answers(runner, vocabulary, work["prompts"], work["answer_tokens"]),
        "decode_per_cpu_s": _decode_rate(runner, vocabulary, work["prompts"][:ROWS], work["answer_tokens"]),
        "resident_bytes": _resident_bytes(),
    }
    write({"ready": found})


@torch.inference_mode()
def _nats(runner: TorchRunner, windows: list[list[int]]) -> float:
    """Mean negative log-probability of every token but a window's first."""
    total = count = 0.0
    for ids in windows:
        scores = read_through(runner.model, ids)
        total -= float(scores[:-1].gather(1, torch.tensor(ids[1:])[:, None]).sum())
        count += len(ids) - 1
    return total / count


def _core(runner: TorchRunner, vocabulary: Vocabulary, prompts: list[list[int]], new_tokens: int, *, on: bool) -> Core:
    """`on`: go on after an end token."""
    scheduler = Scheduler(
        BlockPool(ROWS * CONTEXT // BLOCK, BLOCK), max_num_seqs=ROWS, max_num_batched_tokens=512, prefix_cache=False
    )
    core = Core(
        runner,
        vocabulary,
        scheduler,
        context=CONTEXT,
        waiting_max=len(prompts),
        clock_ns=time.perf_counter_ns,
    )
    ask = Sampling(max_tokens=new_tokens, temperature=0.0, ignore_eos=on)
    for at, prompt in enumerate(prompts):
        core.add(Work(request_id=str(at), attempt=1, prompt_ids=prompt, prompt_text="", sampling=ask))
    return core


def _answers(runner: TorchRunner, vocabulary: Vocabulary, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
    core = _core(runner, vocabulary, prompts, new_tokens, on=False)
    answers: list[list[int]] = [[] for _ in prompts]
    while core.busy:
        for delta in core.step():
            answers[int(delta.request_id)] += delta.token_ids
    return answers


def _decode_rate(runner: TorchRunner, vocabulary: Vocabulary, prompts: list[list[int]], new_tokens: int) -> float:
    """Tokens per second of processor time while all prompts decode."""
    core = _core(runner, vocabulary, prompts, new_tokens + len(prompts), on=True)
    begun: set[str] = set()
    while len(begun) < len(prompts):
        begun |= {delta.request_id for delta in core.step()}
    started, tokens = time.process_time(), 0
    for _ in range(new_tokens // 2):
        tokens += sum(len(delta.token_ids) for delta in core.step())
    return tokens / (time.process_time() - started)


def _resident_bytes() -> int:
    """Of this process, the interpreter and torch (about 300 MB) included; 0 where the system does not say."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS:")), 0)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
