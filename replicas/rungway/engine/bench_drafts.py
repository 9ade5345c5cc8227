"""Speculative decoding beside plain decoding of the same model, in one process and taking turns.

One prompt at a time, greedy. Both sides share the weights and the cache; only the drafter differs. Every answer is
compared, so that a faster run that says something else cannot pass for a gain.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch

from rungway.engine.assemble import Sizes, directory_parts, pick_device
from rungway.engine.blocks import BlockPool
from rungway.engine.core import Core
from rungway.engine.drafting import Drafting, make_speculation
from rungway.engine.drafts import Speculation
from rungway.engine.protocol import Sampling, Work
from rungway.engine.runner import Runner
from rungway.engine.scheduler import Scheduler
from rungway.engine.tokenizer import HfTokenizer, Vocabulary

_CLASS = """class Account:
    def __init__(self, owner: str, balance: int = 0) -> None:
        self.owner = owner
        self.balance = balance

    def deposit(self, amount: int) -> None:
        if amount <= 0:
            raise ValueError("amount must be positive")
        self.balance += amount

    def withdraw(self, amount: int) -> None:
        if amount > self.balance:
            raise ValueError("not enough money")
        self.balance -= amount
"""
CODE_PROMPTS = (
    f"Add a docstring to every method of this class and repeat the whole class:\n```python\n{_CLASS}```",
    f"Rename `balance` to `cents` everywhere in this class and repeat the whole class:\n```python\n{_CLASS}```",
    f"Write pytest tests for this class, one for each method:\n```python\n{_CLASS}```",
    "Write a Python function that merges two sorted lists into one sorted list, with type hints.",
    "Write a Python class for a least-recently-used cache with get and put, without using functools.",
    "Write a SQL schema for a library with books, authors, members and loans, and three example queries.",
)


class _Run(NamedTuple):
    """Seconds of decoding (the steps after the first token) by the clock and of processor time; the answer."""

    wall_s: float
    cpu_s: float
    tokens: list[int]


def draft_ratio(
    model_dir: Path,
    draft_dir: Path | None,
    *,
    prompts: tuple[str, ...] = CODE_PROMPTS,
    new_tokens: int = 128,
    rounds: int = 2,
    tokens_max: int = 5,
    dtype: str = "auto",
    temperature: float = 0.0,
) -> dict[str, Any]:
    """`draft_dir` None = drafts from the text itself. `ratio`, `ratio_cpu`: time without drafts / with them, over all prompts,
    median of rounds; `ratios_cpu` by prompt. `accepted`: share of the drafts that were right. `same`: answers that were equal
    in full. A first round, not counted, teaches the pace what things cost here."""
    tokenizer = HfTokenizer(model_dir)
    asked = [tokenizer.encode(tokenizer.render_chat([{"role": "user", "content": text}])) for text in prompts]
    wish = Sizes(1, max(map(len, asked)) + new_tokens, 512, 0, 16)
    device = pick_device("cpu")
    runner, vocabulary, sizes = directory_parts(model_dir, wish, dtype, device)
    speculation = make_speculation(Drafting(draft_dir, tokens_max, 1), vocabulary, sizes, dtype, device)
    assert speculation is not None
    ask = Sampling(max_tokens=new_tokens, temperature=temperature, seed=1)
    plain, drafted = (_core(runner, vocabulary, sizes, what) for what in (None, speculation))
    for ids in asked:
        _run(drafted, ids, ask)
    before = (speculation.drafted, speculation.accepted)
    turns = [[(_run(plain, ids, ask), _run(drafted, ids, ask)) for ids in asked] for _ in range(rounds)]
    made, right = speculation.drafted - before[0], speculation.accepted - before[1]
    walls = [sum(a.wall_s for a, _ in turn) / sum(b.wall_s for _, b in turn) for turn in turns]
    cpus = [sum(a.cpu_s for a, _ in turn) / sum(b.cpu_s for _, b in turn) for turn in turns]
    by_prompt = [[turn[at][0].cpu_s / turn[at][1].cpu_s for turn in turns] for at in range(len(asked))]
    said = sum(len(b.tokens) for turn in turns for _, b in turn)
    return {
        "method": "ngram" if draft_dir is None else "draft",
        "threads": torch.get_num_threads(),
        "dtype": runner.precision,
        "ratio": round(statistics.median(walls), 2),
        "ratio_cpu": round(statistics.median(cpus), 2),
        "ratios_cpu": [round(statistics.median(values), 2) for values in by_prompt],
        "plain_tokens_per_cpu_s": round(said / sum(a.cpu_s for turn in turns for a, _ in turn), 1),
        "drafted": made,
        "accepted": round(right / made, 3) if made else None,
        "drafted_per_token": round(made / said, 2),
        "same": sum(a.tokens == b.tokens for turn in turns for a, b in turn),
        "answers": rounds * len(asked),
    }


def _core(runner: Runner, vocabulary: Vocabulary, sizes: Sizes, speculation: Speculation | None) -> Core:
    scheduler = Scheduler(
        BlockPool(sizes.kv_blocks, sizes.block_tokens),
        max_num_seqs=1,
        max_num_batched_tokens=sizes.max_num_batched_tokens,
        prefix_cache=False,  # the cache is shared with the other side
    )
    return Core(
        runner,
        vocabulary,
        scheduler,
        context=sizes.context,
        waiting_max=1,
        clock_ns=time.perf_counter_ns,
        speculation=speculation,
    )


def _run(core: Core, ids: list[int], ask: Sampling) -> _Run:
    core.add(Work(request_id="r", attempt=1, prompt_ids=ids, prompt_text="", sampling=ask))
    tokens = [token for delta in core.step() for token in delta.token_ids]
    wall, cpu = time.perf_counter(), time.process_time()
    while core.busy:
        tokens += [token for delta in core.step() for token in delta.token_ids]
    return _Run(time.perf_counter() - wall, time.process_time() - cpu, tokens)
