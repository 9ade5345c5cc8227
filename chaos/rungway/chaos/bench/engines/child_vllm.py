"""vLLM in a process and an environment of its own: its engine is stepped here, in this process, and every step's deltas are
taken. That spares it the process boundary and the HTTP server that its API server has: the kindest way to measure it."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

import torch
from vllm import LLM, SamplingParams
from vllm.inputs import TokensPrompt
from vllm.sampling_params import RequestOutputKind

from rungway.chaos.bench.engines.wire import Book, claim_stdout, commands


def _run(engine: Any, job: dict[str, Any], number: int) -> dict[str, Any]:
    def submit(stream: int, prompt: list[int], max_tokens: int) -> None:
        asked = SamplingParams(
            max_tokens=max_tokens,
            temperature=job["temperature"],
            top_p=job["top_p"],
            seed=job["seed"] + stream if job["temperature"] else None,
            ignore_eos=True,
            output_kind=RequestOutputKind.DELTA,
        )
        engine.add_request(f"{number}-{stream}", TokensPrompt(prompt_token_ids=prompt), asked)

    book = Book(job)
    for stream, prompt in enumerate(job["prompts"]):
        submit(stream, prompt, job["max_tokens"])
    while engine.has_unfinished_requests():
        for output in engine.step():
            # the engine may add to a request's id, never in front
            book.got(int(output.request_id.split("-")[1]), len(output.outputs[0].token_ids))
        if book.over:
            engine.abort_request([f"{number}-{stream}" for stream in range(book.streams)])
        elif book.late_due():
            submit(book.streams, job["late"], 1)
    return book.answer([])


def main(config: dict[str, Any]) -> None:
    write = claim_stdout()
    llm = LLM(
        model=config["model"],
        dtype="bfloat16",
        enforce_eager=config["eager"],
        max_model_len=config["max_context"],
        max_num_seqs=config["max_num_seqs"],
        disable_log_stats=True,
    )
    write({"ready": {"dtype": "bfloat16", "threads": torch.get_num_threads()}})
    for number, command in enumerate(commands()):
        write(_run(llm.llm_engine, command["job"], number))
    os._exit(0)  # nobody listens any more, and its own way down has been seen to hang


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
