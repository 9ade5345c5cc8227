"""Starts each engine for one benchmark: same weights, same threads, same number of streams."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import rungway.chaos
from rungway.chaos.bench.engines.gguf_q8 import q8_file
from rungway.chaos.bench.engines.install import LLAMA, VLLM, llama_server, vllm_python
from rungway.chaos.bench.engines.lines import LineChild
from rungway.chaos.bench.engines.llama import LlamaServer
from rungway.chaos.bench.engines.timeline import Job, Timeline

STREAMS_MAX = 16
BATCHED_TOKENS = 512  # of ours: the platform file's default
STREAM_CONTEXT = 1536  # of each of llama.cpp's slots, which divide one cache


class Running(Protocol):
    """A started engine. `facts`: at least its `dtype` and `threads`. `cpu_before_s`: when its last job began."""

    facts: dict[str, Any]
    cpu_before_s: float

    def run(self, job: Job) -> Timeline: ...

    def stop(self) -> None: ...


@dataclass(frozen=True)
class Setting:
    """`model`: its directory; `source`: its name in a platform file; `context`: most tokens of one sequence."""

    model: Path
    source: str
    threads: int
    context: int
    work: Path
    dtype: str = "auto"


def environment(threads: int) -> dict[str, str]:
    return {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "PASSIVE",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def start_ours(setting: Setting, *, prefix_cache: bool = True) -> LineChild:
    config = {
        "model": str(setting.model),
        "dtype": setting.dtype,
        "max_num_seqs": STREAMS_MAX,
        "max_context": setting.context,
        "max_num_batched_tokens": BATCHED_TOKENS,
        "prefix_cache": prefix_cache,
    }
    name = "ours" if prefix_cache else "ours-uncached"
    return _module(name, "child_ours", config, setting)


def start_generate(setting: Setting) -> LineChild:
    return _module("transformers", "child_generate", {"model": str(setting.model)}, setting)


def _module(name: str, module: str, config: dict[str, Any], setting: Setting) -> LineChild:
    command = [sys.executable, "-m", f"rungway.chaos.bench.engines.{module}", json.dumps(config)]
    return LineChild(name, command, setting.work / f"{name}.log", environment(setting.threads))


def start_vllm(setting: Setting) -> LineChild:
    """Its threads are not bound to cores: neither are those of the others."""
    config = {
        "model": str(setting.model),
        "max_num_seqs": STREAMS_MAX,
        "max_context": setting.context,
        "eager": True,
    }
    roots = {"PYTHONPATH": str(Path(next(iter(rungway.chaos.__path__))).parents[1])}
    own = {
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
    }
    command = [str(vllm_python()), "-m", "rungway.chaos.bench.engines.child_vllm", json.dumps(config)]
    env = environment(setting.threads) | own | roots
    return LineChild("vllm", command, setting.work / "vllm.log", env, drop=("PYTHONPATH", "VIRTUAL_ENV"))


def start_llama(setting: Setting) -> LlamaServer:
    context = min(STREAM_CONTEXT, setting.context)
    log = setting.work / "llama.log"
    program, weights = llama_server(), q8_file(setting.source)
    return LlamaServer(program, weights, slots=STREAMS_MAX, context=context, threads=setting.threads, log=log)


@dataclass(frozen=True)
class EngineSide:
    start: Callable[[Setting], Running]
    about: str


ENGINE_SIDES: dict[str, EngineSide] = {
    "ours": EngineSide(start_ours, "the whole engine through its protocol, with an event loop taking deltas"),
    "vllm": EngineSide(start_vllm, f"{VLLM}, bfloat16, eager, stepped in its own process, no HTTP"),
    "llama": EngineSide(start_llama, f"llama.cpp's server ({LLAMA}), Q8_0, streams over HTTP"),
    "transformers": EngineSide(start_generate, "generate, the faster of bfloat16 and float32, batch 8 only"),
}


def default_threads() -> int:
    """As `rungway serve` shares the cores out between the quickstart's two engines."""
    return int(os.environ.get("OMP_NUM_THREADS") or max(1, (os.cpu_count() or 2) // 2))
