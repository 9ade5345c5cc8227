"""Decode speed of the native engine beside `transformers.generate`, in one process and taking turns.

Both get the same prompts, padded to one length for generate, and the same number of new tokens, greedy, with end
tokens ignored. Generate runs in whichever of bfloat16 and float32 is faster here. Machines drift and are shared, so only
the ratios are meant to be quoted: medians over rounds of neighbouring runs, by the clock and by processor time.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from rungway.engine.assemble import Sizes, directory_parts, pick_device
from rungway.engine.blocks import BlockPool
from rungway.engine.core import Core
from rungway.engine.protocol import Sampling, Work
from rungway.engine.scheduler import Scheduler
from rungway.engine.tokenizer import HfTokenizer

_TOPICS = ("the moon", "bread", "rivers", "chess", "the violin", "whales", "glass", "winter")


_REFERENCE_DTYPES = ("bfloat16", "float32")


class _Spent(NamedTuple):
    """Seconds by the clock, and of processor time over all threads."""

    wall_s: float
    cpu_s: float


def decode_ratio(
    model_dir: Path,
    batch: int = 8,
    new_tokens: int = 64,
    *,
    rounds: int = 3,
    dtype: str = "auto",
) -> dict[str, Any]:
    """Both sides' speed of decoding `batch` answers at once: without the step that reads the prompt (a run of one token,
    taken off). `*_tokens_per_s` are medians by the clock. `ratio` and `ratio_cpu` are medians of the rounds' own
    ratios, native / generate, by the clock and by processor time; `ratios` has every round's as (clock, processor).
    `prompt_tokens` is the padded length; `same_first_tokens` counts prompts whose first token agrees, a sign that both ran
    the same model."""
    prompts = _prompts(HfTokenizer(model_dir), batch)
    native = _Native(model_dir, prompts, new_tokens, dtype)
    reference = min((_Reference(model_dir, prompts, dtype) for dtype in _REFERENCE_DTYPES), key=_warm_cost)
    native.run(2)
    decoded = batch * (new_tokens - 1)
    turns = [(_decode(native.run, new_tokens), _decode(reference.run, new_tokens)) for _ in range(rounds)]
    ratios = [(theirs.wall_s / ours.wall_s, theirs.cpu_s / ours.cpu_s) for ours, theirs in turns]
    return {
        "batch": batch,
        "new_tokens": new_tokens,
        "prompt_tokens": max(map(len, prompts)),
        "threads": torch.get_num_threads(),
        "native_dtype": native.dtype,
        "generate_dtype": reference.dtype,
        "native_tokens_per_s": round(decoded / statistics.median(ours.wall_s for ours, _ in turns), 1),
        "generate_tokens_per_s": round(decoded / statistics.median(theirs.wall_s for _, theirs in turns), 1),
        "ratio": round(statistics.median(wall for wall, _ in ratios), 2),
        "ratio_cpu": round(statistics.median(cpu for _, cpu in ratios), 2),
        "ratios": [(round(wall, 2), round(cpu, 2)) for wall, cpu in ratios],
        "same_first_tokens": sum(map(int.__eq__, native.first, reference.first)),
    }


def _prompts(tokenizer: HfTokenizer, count: int) -> list[list[int]]:
    texts = [f"Tell me about {_TOPICS[at % len(_TOPICS)]}, {at}." for at in range(count)]
    return [tokenizer.encode(tokenizer.render_chat([{"role": "user", "content": text}])) for text in texts]


def _decode(run: Callable[[int], None], new_tokens: int) -> _Spent:
    """What all tokens but the first cost. Never below a nanosecond, for runs too short to tell."""
    first, whole = _spent(run, 1), _spent(run, new_tokens)
    return _Spent(max(1e-9, whole.wall_s - first.wall_s), max(1e-9, whole.cpu_s - first.cpu_s))


def _spent(run: Callable[[int], None], new_tokens: int) -> _Spent:
    wall, cpu = time.perf_counter(), time.process_time()
    run(new_tokens)
    return _Spent(time.perf_counter() - wall, time.process_time() - cpu)


def _warm_cost(reference: _Reference) -> float:
    reference.run(2)
    return min(_spent(reference.run, 6).cpu_s for _ in range(2))


class _Native:
    def __init__(self, model_dir: Path, prompts: list[list[int]], new_tokens: int, dtype: str) -> None:
        context = max(map(len, prompts)) + new_tokens
        wish = Sizes(len(prompts), context, max(512, len(prompts)), 0, 16)
        runner, vocabulary, sizes = directory_parts(model_dir, wish, dtype, pick_device("cpu"))
        scheduler = Scheduler(
            BlockPool(sizes.kv_blocks, sizes.block_tokens),
            max_num_seqs=sizes.max_num_seqs,
            max_num_batched_tokens=sizes.max_num_batched_tokens,
        )
        self._core = Core(
            runner, vocabulary, scheduler, context=context, waiting_max=len(prompts), clock_ns=time.perf_counter_ns
        )
        self._prompts = prompts
        self.dtype = runner.precision
        self.first: list[int] = []

    def run(self, new_tokens: int) -> None:
        ask = Sampling(max_tokens=new_tokens, temperature=0.0, ignore_eos=True)
        out: dict[str, list[int]] = {str(at): [] for at in range(len(self._prompts))}
        for at, prompt in enumerate(self._prompts):
            self._core.add(Work(request_id=str(at), attempt=1, prompt_ids=prompt, prompt_text="", sampling=ask))
        while self._core.busy:
            for delta in self._core.step():
                out[delta.request_id] += delta.token_ids
        self.first = [tokens[0] for tokens in out.values()]


class _Reference:
    def __init__(self, model_dir: Path, prompts: list[list[int]], dtype: str) -> None:
        from transformers import AutoModelForCausalLM

        self.dtype = dtype
        self._model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=getattr(torch, dtype)).eval()
        longest = max(map(len, prompts))
        pads = [longest - len(prompt) for prompt in prompts]
        self._ids = torch.tensor([[0] * pad + prompt for pad, prompt in zip(pads, prompts, strict=True)])
        self._mask = torch.tensor([[0] * pad + [1] * (longest - pad) for pad in pads])
        self.first: list[int] = []

    def run(self, new_tokens: int) -> None:
        with torch.inference_mode():
            out = self._model.generate(
                input_ids=self._ids,
                attention_mask=self._mask,
                max_new_tokens=new_tokens,
                min_new_tokens=new_tokens,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
        self.first = out[:, self._ids.shape[1]].tolist()
