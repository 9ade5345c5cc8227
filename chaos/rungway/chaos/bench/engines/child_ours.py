"""Our engine in a process of its own. The whole of it runs: protocol, scheduler, sampler, detokeniser, and the hand-over of
deltas from its thread to an event loop."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

from rungway.chaos.bench.engines.wire import Book, claim_stdout
from rungway.engine.assemble import Sizes, directory_parts, pick_device
from rungway.engine.engine import NativeEngine
from rungway.engine.protocol import Delta, Sampling, Work
from rungway.engine.roofline import read_bandwidth, weight_bytes


class _Run:
    """One job under way; `done` when all of it has ended."""

    def __init__(self, engine: NativeEngine, job: dict[str, Any], number: int) -> None:
        self._engine = engine
        self._name = f"job-{number}"
        self._open: set[int] = set()
        self.book = Book(job)
        self.errors: list[str] = []
        self.done = asyncio.get_running_loop().create_future()
        for stream, prompt in enumerate(job["prompts"]):
            self._submit(stream, prompt, job["max_tokens"])

    def _submit(self, stream: int, prompt: list[int], max_tokens: int) -> None:
        job = self.book.job
        ask = Sampling(
            max_tokens=max_tokens,
            temperature=job["temperature"],
            top_p=job["top_p"],
            seed=job["seed"] + stream,
            ignore_eos=True,
        )
        self._open.add(stream)
        self._engine.submit(
            Work(
                request_id=f"{self._name}-{stream}",
                attempt=1,
                prompt_ids=prompt,
                prompt_text="",
                sampling=ask,
                share=job["share"],
            )
        )

    def on_deltas(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            stream = int(delta.request_id.rpartition("-")[2])
            self.book.got(stream, len(delta.token_ids))
            if delta.error is not None:
                self.errors.append(delta.error)
            if delta.finish is not None:
                self._open.discard(stream)
        if self.book.over:
            for stream in self._open:
                self._engine.cancel(f"{self._name}-{stream}")
        elif self._open and self.book.late_due():
            self._submit(self.book.streams, self.book.job["late"], 1)
        if not self._open and not self.done.done():
            self.done.set_result(None)


async def serve(config: dict[str, Any]) -> None:
    write = claim_stdout()
    path = Path(config["model"])
    device = pick_device("cpu")
    wish = Sizes(config["max_num_seqs"], config["max_context"], config["max_num_batched_tokens"], 0, 16)
    runner, vocabulary, sizes = directory_parts(path, wish, config["dtype"], device)
    engine = NativeEngine(runner, vocabulary, sizes, prefix_cache=config["prefix_cache"])
    runs: list[_Run] = []
    await engine.start(lambda deltas: runs[-1].on_deltas(deltas))
    write(
        {
            "ready": {
                "dtype": runner.path,
                "threads": torch.get_num_threads(),
                "weight_bytes": weight_bytes(runner.model.arch, runner.model.precision),
                "context": sizes.context,
            }
        }
    )
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        command = json.loads(line)
        if "bandwidth" in command:
            size = int(command["bandwidth"])
            write({"bandwidth": [read_bandwidth(size), read_bandwidth(size, time.process_time)]})
            continue
        runs.append(_Run(engine, command["job"], len(runs)))
        await runs[-1].done
        write(runs[-1].book.answer(runs[-1].errors + engine.check()))
    await engine.stop()


if __name__ == "__main__":
    asyncio.run(serve(json.loads(sys.argv[1])))
