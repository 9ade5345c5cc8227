"""transformers' `generate` in a process of its own, in whichever of bfloat16 and float32 is faster here.

Prompts of a job are padded to one length. A stopping criterion that never stops is told of every token, which is all the
streaming that `generate` has for a batch.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from rungway.chaos.bench.engines.wire import Book, claim_stdout, commands

_DTYPES = ("bfloat16", "float32")
_WARM_TOKENS = 6


def _run(model: Any, job: dict[str, Any]) -> dict[str, Any]:
    book = Book(job)

    def told(ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        for stream in range(book.streams):
            book.got(stream, 1)
        return torch.zeros(ids.shape[0], dtype=torch.bool)

    longest = max(map(len, job["prompts"]))
    pads = [longest - len(prompt) for prompt in job["prompts"]]
    torch.manual_seed(job["seed"])
    heat = {"temperature": job["temperature"], "top_p": job["top_p"], "top_k": 0} if job["temperature"] else {}
    with torch.inference_mode():
        model.generate(
            input_ids=torch.tensor([[0] * pad + prompt for pad, prompt in zip(pads, job["prompts"], strict=True)]),
            attention_mask=torch.tensor([[0] * pad + [1] * (longest - pad) for pad in pads]),
            max_new_tokens=job["max_tokens"],
            min_new_tokens=job["max_tokens"],
            do_sample=bool(heat),
            eos_token_id=None,
            pad_token_id=0,
            stopping_criteria=[told],
            **heat,
        )
    return book.answer([])


def _cost_s(model: Any) -> float:
    job = {"prompts": [[1, 2, 3]] * 8, "max_tokens": _WARM_TOKENS, "temperature": 0.0, "seed": 0, "late": []}
    times = []
    for _ in range(3):  # the first one warms up
        started = time.process_time()
        _run(model, job)
        times.append(time.process_time() - started)
    return min(times[1:])


def main(config: dict[str, Any]) -> None:
    write = claim_stdout()
    models = {
        dtype: AutoModelForCausalLM.from_pretrained(config["model"], dtype=getattr(torch, dtype)).eval()
        for dtype in _DTYPES
    }
    dtype = min(_DTYPES, key=lambda name: _cost_s(models[name]))
    model = models[dtype]
    models.clear()
    write({"ready": {"dtype": dtype, "threads": torch.get_num_threads()}})
    for command in commands():
        write(_run(model, command["job"]))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
