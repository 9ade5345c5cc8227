"""Decode speed of the native engine beside `transformers.generate`, in one process and taking turns.

Both get the same prompts, padded to one length for generate, and the same number of new tokens, greedy, with end
tokens ignored. Machines drift, so only the ratio is meant to be quoted.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import torch

from rungway.engine.assemble import Sizes, directory_parts, pick_device
from rungway.engine.blocks import BlockPool
from rungway.engine.core import Core
from rungway.engine.protocol import Sampling, Work
from rungway.engine.scheduler import Scheduler
from rungway.engine.tokenizer import HfTokenizer

_TOPICS = ("the moon", "bread", "rivers", "chess", "the violin", "whales", "glass", "winter")


def decode_ratio(
    model_dir: Path,
    batch: int = 8,
    new_tokens: int = 64,
    *,
    rounds: int = 3,
    dtype: str = "auto",
    reference_dtype: str = "bfloat16",
) -> dict[str, Any]:
    """Tokens per second of both sides, medians of `rounds`: `*_decode_tokens_per_s` without the step that reads the prompt
    (a run of one token, taken off), `*_total_tokens_per_s` with it. `ratio` is of the decode figures, native / generate.
    `prompt_tokens` is the padded length. `same_first_tokens` = prompts whose first token agrees, a sign that both ran the same model."""
    tokenizer = HfTokenizer(model_dir)
    prompts = [
        tokenizer.encode(
            tokenizer.render_chat([{"role": "user", "content": f"Tell me about {_TOPICS[at % 8]}, {at}."}])
        )
        for at in range(batch)
    ]
    native = _Native(model_dir, prompts, new_tokens, dtype)
    reference = _Reference(model_dir, prompts, reference_dtype)
    sides: tuple[tuple[str, _Native | _Reference], ...] = (("native", native), ("generate", reference))
    times: dict[tuple[str, int], list[float]] = {(name, count): [] for name, _ in sides for count in (1, new_tokens)}
    for turn in range(rounds + 1):
        for name, side in sides:
            for count in (1, new_tokens):
                started = time.perf_counter()
                side.run(count)
                if turn > 0:  # the first turn warms caches and thread pools
                    times[name, count].append(time.perf_counter() - started)
    speeds: dict[str, float] = {}
    for name, _ in sides:
        first, whole = (statistics.median(times[name, count]) for count in (1, new_tokens))
        speeds[f"{name}_decode_tokens_per_s"] = round(batch * (new_tokens - 1) / (whole - first), 1)
        speeds[f"{name}_total_tokens_per_s"] = round(batch * new_tokens / whole, 1)
    agreed = sum(1 for ours, theirs in zip(native.first, reference.first, strict=True) if ours == theirs)
    return {
        "batch": batch,
        "new_tokens": new_tokens,
        "prompt_tokens": max(map(len, prompts)),
        "threads": torch.get_num_threads(),
        "native_dtype": native.dtype,
        "generate_dtype": reference_dtype,
        **speeds,
        "ratio": round(speeds["native_decode_tokens_per_s"] / speeds["generate_decode_tokens_per_s"], 2),
        "same_first_tokens": agreed,
    }


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
        self.dtype = str(runner.dtype).removeprefix("torch.")
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
