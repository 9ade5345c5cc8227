"""What each format of weights costs in quality and gains in memory and speed, on a real model: all formats that the engine knows,
each in a process of its own, beside float32."""

from __future__ import annotations

import json
import math
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rungway.chaos.bench.child import BenchError
from rungway.chaos.bench.engines import data
from rungway.chaos.bench.engines.lines import LineChild
from rungway.chaos.bench.engines.start import environment
from rungway.chaos.bench.engines.timeline import ratio
from rungway.chaos.bench.report import Report, Say, surroundings
from rungway.engine.formats import FORMATS
from rungway.engine.loader import fetch_model
from rungway.engine.tokenizer import HfTokenizer

REFERENCE = "float32"
WINDOW = 512
PROMPT_MAX = 320
FORMAT_S = 1800.0


@dataclass(frozen=True)
class Amount:
    """`windows` of WINDOW tokens from each text, `prompts` answered with up to `answer_tokens`."""

    windows: int
    prompts: int
    answer_tokens: int


FULL = Amount(windows=4, prompts=50, answer_tokens=32)
QUICK = Amount(windows=1, prompts=10, answer_tokens=16)


def bench_formats(*, source: str, models_dir: Path, threads: int, only: Sequence[str], quick: bool, say: Say) -> Report:
    """`only`: names of formats, empty = all, and `auto`. Raises BenchError where the texts or float32 cannot be had."""
    amount = QUICK if quick else FULL
    path = fetch_model(source, models_dir)
    report = Report("formats", notes=[surroundings(), f"{source}, {threads} thread(s), {amount}"])
    names = [REFERENCE, *(name for name in (*FORMATS, "auto") if name != REFERENCE and (not only or name in only))]
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="rungway-formats-") as folder:
        work = Path(folder)
        (work / "work.json").write_text(json.dumps(_work(HfTokenizer(path), amount)), encoding="utf-8")
        for name in names:
            facts = _measure(path, name, work, threads)
            if "not_here" in facts:
                report.notes.append(f"{name}: not here: {facts['not_here']}")
            elif name != "auto" and any(facts["precision"] == other["precision"] for other in found.values()):
                say(f"{name}: the same as one above")  # another name for it
            else:
                found[name] = facts
                report.control.append(row(name, facts, found[REFERENCE]))
                say(", ".join(f"{key} {value}" for key, value in report.control[-1].items()))
    return report


def _work(tokenizer: HfTokenizer, amount: Amount) -> dict[str, Any]:
    texts = {"mathematics": data.mathematics(), "code": data.code()}
    windows, prompts = {}, []
    for name, items in texts.items():
        ids = tokenizer.encode("".join(item.text for item in items[:200]))
        windows[name] = [ids[at : at + WINDOW] for at in range(0, WINDOW * amount.windows, WINDOW)]
        asked = [[{"role": "user", "content": item.question}] for item in items]
        rendered = [tokenizer.encode(tokenizer.render_chat(chat)) for chat in asked]
        prompts += [ids for ids in rendered if len(ids) <= PROMPT_MAX][: amount.prompts // len(texts)]
    return {"windows": windows, "prompts": prompts, "answer_tokens": amount.answer_tokens}


def _measure(model: Path, dtype: str, work: Path, threads: int) -> dict[str, Any]:
    config = {"model": str(model), "dtype": dtype, "work": str(work / "work.json")}
    command = [sys.executable, "-m", "rungway.chaos.bench.engines.child_formats", json.dumps(config)]
    try:
        child = LineChild(dtype, command, work / f"{dtype}.log", environment(threads), within_s=FORMAT_S)
    except BenchError as error:
        if dtype == REFERENCE:
            raise
        return {"not_here": str(error)}
    child.stop()
    return child.facts


def row(name: str, facts: dict[str, Any], reference: dict[str, Any]) -> dict[str, Any]:
    """One format beside float32."""
    made: dict[str, Any] = {"format": name, "path": facts["path"]}
    for text, nats in facts["nats"].items():
        made[f"perplexity, {text}"] = round(math.exp(nats), 3)
    exact, agreed = agreement(facts["answers"], reference["answers"])
    return made | {
        "answers equal": f"{exact} of {len(reference['answers'])}",
        "equal before the first difference": round(agreed, 3),
        "weights, MB": round(facts["weight_bytes"] / 1e6),
        "resident, MB": round(facts["resident_bytes"] / 1e6),
        "decode at 8 / float32": round(ratio(facts["decode_per_cpu_s"], reference["decode_per_cpu_s"]), 2),
    }


def agreement(answers: Sequence[Sequence[int]], reference: Sequence[Sequence[int]]) -> tuple[int, float]:
    """How many answers are equal, token for token; and the mean share of a reference's tokens before the first that differs."""
    shares = []
    for mine, theirs in zip(answers, reference, strict=True):
        same = next((at for at, pair in enumerate(zip(mine, theirs, strict=False)) if pair[0] != pair[1]), len(theirs))
        shares.append(min(same, len(mine)) / max(1, len(theirs)))
    equal = sum(list(mine) == list(theirs) for mine, theirs in zip(answers, reference, strict=True))
    return equal, sum(shares) / max(1, len(shares))
