"""`python -m rungway.kernels.gpu_check [--search] [--json FILE] [--markdown FILE] [--tiles FILE]`: check and time every kernel
on this machine's CUDA device. Needs torch and Triton, nothing else.

Right: on the small cases, in float32, float16 and bfloat16, the error against the float32 reference is at most twice what
the reference itself loses by rounding its result to that type; sampled tokens are the same. Fast: on the large cases, in
bfloat16, the least memory traffic over time as a fraction of the bandwidth of a plain copy, or operations over time as a
fraction of the rate of a large product, both measured beside it. `--search` also tries tiles around those in use (tiles.py).

Each kernel runs in processes of its own (gpu_parts.py), checks several at once, the others one by one: whatever one does, the
others are reported. All ends after `--seconds`; what was not reached counts as failed. Prints one line a case and writes the
files anew after each process; exits 0 when all are right and every bar is reached, 1 when not, 2 without CUDA or Triton.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from rungway.kernels.gpu_parts import GAIN_MIN, TUNED, Record
from rungway.kernels.gpu_time import Rates, Timing
from rungway.kernels.registry import KERNELS
from rungway.kernels.tiles import Table, merged, table

SECONDS = 300
_PART_SECONDS = {"check": 150, "time": 150, "search": 400}  # of one kernel's process
_JOBS = 4  # checks at once: most of their time is compilation

Run = Callable[[str, str, float], list[Record]]


def run_part(part: str, kernel: str, seconds: float, *, dry: bool = False) -> list[Record]:
    """What one process said, and how it ended where that was not well."""
    command = [sys.executable, "-m", "rungway.kernels.gpu_parts", part, kernel, *(["--dry"] if dry else [])]
    environment = os.environ | ({"TRITON_INTERPRET": "1"} if dry else {})
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        out, err = process.communicate(timeout=seconds)
        why = None if process.returncode == 0 else f"ended with {process.returncode}: {' '.join(err.split())[-400:]}"
    except subprocess.TimeoutExpired:
        process.kill()
        out, _ = process.communicate()
        why = f"not done after {seconds:.0f} s"
    return [*records_in(out), *([] if why is None else [failed(kernel, part, why)])]


def records_in(text: str) -> list[Record]:
    """One a line; a line that was cut off is none."""
    found = []
    for line in text.splitlines():
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return [record for record in found if isinstance(record, dict) and "kind" in record]


def failed(kernel: str, case: str, why: str) -> Record:
    return {"kernel": kernel, "kind": "failed", "case": case, "why": why}


def all_parts(names: list[str], run: Run, seconds: float, *, tiles: bool) -> Iterator[list[Record]]:
    """What each process said, in order."""
    end = time.monotonic() + seconds

    def one(part: str, kernel: str) -> list[Record]:
        left = min(_PART_SECONDS[part], end - time.monotonic())
        return run(part, kernel, left) if left > 0 else [failed(kernel, part, "not run: out of time")]

    with ThreadPoolExecutor(_JOBS) as several:
        yield from several.map(lambda name: one("check", name), names)
    for name in names:
        yield one("time", name)
    for name in names if tiles else []:
        if name in TUNED:
            yield one("search", name)


def line_of(record: Record) -> str:
    """For people."""
    kernel, kind = record["kernel"], record["kind"]
    if kind == "check":
        verdict = "ok" if record["good"] else "WRONG"
        return f"{verdict:6} {kernel} {record['case']}: {record['worst']:.2e} of {record['allowed']:.2e}"
    if kind == "time":
        return f"{'time' if record['reached'] else 'SLOW':6} {timing_in(record)}"
    if kind == "rates":
        return f"{'rates':6} {kernel}: {rates_in(record)}"
    if kind == "tile":
        tried = f"{record['tried']} tried, {record['out']} not possible"
        return f"{'tile':6} {kernel} {record['key']}: {record['tile']}, {record['gain']:.0%} faster ({tried})"
    return f"{'FAILED':6} {kernel} {record['case']}: {record['why']}"


def timing_in(record: Record) -> Timing:
    return Timing(*(record[name] for name in Timing._fields))


def rates_in(record: Record) -> Rates:
    return Rates(*(record[name] for name in Rates._fields))


def measured_tiles(records: list[Record]) -> Table:
    """What `--search` found, as tiles.json has it."""
    found: Table = {}
    for record in records:
        if record["kind"] == "tile" and record["gain"] >= GAIN_MIN:
            found.setdefault(record["kernel"], {})[record["key"]] = record["tile"]
    return found


def markdown(records: list[Record]) -> str:
    """Rows for docs/benchmarks.md."""
    device = next((str(rates_in(record)) for record in records if record["kind"] == "rates"), "nothing was measured")
    lines = [device, "", "| kernel | case | us | of | fraction | bar |", "|---|---|---|---|---|---|"]
    for one in (timing_in(record) for record in records if record["kind"] == "time"):
        bar = "" if one.bar is None else f"{one.bar:.0%}"
        lines.append(
            f"| {one.kernel} | {one.case} | {one.seconds * 1e6:.0f} | {one.metric} | {one.fraction:.0%} | {bar} |"
        )
    return "\n".join(lines) + "\n"


def verdict(records: list[Record]) -> dict[str, int]:
    """How many cases are wrong, slow, failed."""
    return {
        "wrong": sum(record["kind"] == "check" and not record["good"] for record in records),
        "slow": sum(record["kind"] == "time" and not record["reached"] for record in records),
        "failed": sum(record["kind"] == "failed" for record in records),
    }


def write(asked: argparse.Namespace, records: list[Record]) -> None:
    if asked.json:
        _replace(asked.json, json.dumps(verdict(records) | {"records": records}, indent=1))
    if asked.markdown:
        _replace(asked.markdown, markdown(records))
    if asked.tiles:
        _replace(asked.tiles, json.dumps(merged(table(), measured_tiles(records)), indent=1) + "\n")


def _replace(path: Path, text: str) -> None:
    """Whole at any moment: a run that is killed while it writes leaves what it had written before."""
    written = path.with_name(f"{path.name}.new")
    written.write_text(text)
    written.replace(path)


def parsed(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="gpu_check")
    parser.add_argument("--only", nargs="+", choices=list(KERNELS), default=list(KERNELS), help="these kernels alone")
    parser.add_argument("--search", action="store_true", help="try other tiles as well")
    parser.add_argument("--seconds", type=float, default=SECONDS, help=f"end after so long (default {SECONDS})")
    parser.add_argument("--json", type=Path, help="write all records here")
    parser.add_argument("--markdown", type=Path, help="write rows for docs/benchmarks.md here")
    parser.add_argument("--tiles", type=Path, help="write a table of tiles here, to replace tiles.json")
    parser.add_argument("--dry", action="store_true", help="without a device, by Triton's interpreter, few small cases")
    return parser.parse_args(arguments)


def main(arguments: list[str], run: Run | None = None) -> int:
    asked = parsed(arguments)
    for missing, what in (
        (not asked.dry and not torch.cuda.is_available(), "there is no CUDA device here; the kernels were not run"),
        (importlib.util.find_spec("triton") is None, "the package triton is not installed"),
    ):
        if missing:
            print(f"gpu_check: {what}", file=sys.stderr)
            return 2
    records: list[Record] = []

    def plain(part: str, kernel: str, seconds: float) -> list[Record]:
        return run_part(part, kernel, seconds, dry=asked.dry)

    for some in all_parts(asked.only, run or plain, asked.seconds, tiles=asked.search):
        records += some
        for record in some:
            print(line_of(record), flush=True)
        write(asked, records)
    counts: dict[str, Any] = verdict(records)
    bad = sum(counts.values())
    print(
        "all right" if not bad else "{wrong} cases are wrong, {slow} below their bar, {failed} failed".format(**counts)
    )
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
