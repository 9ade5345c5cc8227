"""Where the time of an engine's step goes, part by part, against what this machine's memory and products allow.

The parts are timed through the seams of the model (stopwatch.py), in a second copy of it that takes its operations one by
one. `as served` is a whole step of the engine as it runs, which may compute in one call what the parts show apart.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rungway.chaos.bench.engines.prompts import text_ids
from rungway.chaos.bench.report import Report, Say, surroundings
from rungway.engine.assemble import Sizes, directory_parts, pick_device
from rungway.engine.blocks import BlockPool
from rungway.engine.checkpoint import open_weights
from rungway.engine.core import Core
from rungway.engine.loader import fetch_model
from rungway.engine.model import Decoder
from rungway.engine.ops import pick_ops
from rungway.engine.precision import Maker, Precision, Role
from rungway.engine.protocol import Sampling, Work
from rungway.engine.roofline import (
    Clock,
    Part,
    StepShape,
    against_limits,
    best_s,
    read_bandwidth,
    step_work,
    weight_bytes,
)
from rungway.engine.runner import Step, TorchRunner
from rungway.engine.sampler import Row, sample
from rungway.engine.scheduler import Scheduler, Slice
from rungway.engine.stopwatch import Stopwatch, TimedMaker, TimedOps
from rungway.engine.tokenizer import HfTokenizer
from rungway.engine.weights import read_config

BLOCK = 16
PREFILL_TOKENS = 512
SHAPES = {
    "decode, 1 stream": StepShape(rows=1, context=256),
    "decode, 8 streams": StepShape(rows=8, context=256),
    "prefill, 512 tokens": StepShape(rows=1, context=0, tokens=PREFILL_TOKENS),
}
_ROWS_MAX = 8
_PEAK_SIDE = 2048


class _Timed:
    """A runner that knows how long it ran; keeps the last logits."""

    def __init__(self, inner: TorchRunner, clock: Clock) -> None:
        self.vocab_size = inner.vocab_size
        self._inner = inner
        self._clock = clock
        self.spent_s = 0.0
        self.logits = torch.empty(0)

    def run(self, step: list[Slice]) -> Step:
        started = self._clock()
        done = self._inner.run(step)
        self.spent_s += self._clock() - started
        self.logits = done.logits
        return done


@dataclass(frozen=True)
class _Spent:
    """Of one step on average, seconds: all of it, the model, the sampler."""

    step_s: float
    model_s: float
    sampling_s: float


class _Driver:
    """Steps an engine's core over one shape."""

    def __init__(self, runner: TorchRunner, tokenizer: HfTokenizer, context: int, clock: Clock) -> None:
        self._runner = _Timed(runner, clock)
        self._tokenizer = tokenizer
        self._context = context
        self._clock = clock
        self._seed = 0

    def measure(self, shape: StepShape, steps: int, begin: Callable[[], None]) -> _Spent:
        """`begin` is called when the steps that count begin."""
        if shape.tokens > 1:
            return self._prefills(shape, steps, begin)
        core = self._core(shape, steps + 4)
        for _ in range(3):  # the prompts, and two steps to warm up
            core.step()
        return self._timed(core, steps, begin)

    def _prefills(self, shape: StepShape, steps: int, begin: Callable[[], None]) -> _Spent:
        self._core(shape, 1).step()
        cores = [self._core(shape, 1) for _ in range(steps)]
        self._runner.spent_s, started = 0.0, self._clock()
        begin()
        for core in cores:
            core.step()
        return self._split(self._clock() - started, steps)

    def _timed(self, core: Core, steps: int, begin: Callable[[], None]) -> _Spent:
        self._runner.spent_s, started = 0.0, self._clock()
        begin()
        for _ in range(steps):
            core.step()
        return self._split(self._clock() - started, steps)

    def _split(self, whole_s: float, steps: int) -> _Spent:
        logits = self._runner.logits
        ask = Sampling(max_tokens=1, temperature=0.0)
        rows = [Row(ask, [1], 1, 0, 0, 0) for _ in range(logits.shape[0])]
        return _Spent(whole_s / steps, self._runner.spent_s / steps, best_s(lambda: sample(logits, rows), self._clock))

    def _core(self, shape: StepShape, new_tokens: int) -> Core:
        pool = BlockPool(self._context * _ROWS_MAX // BLOCK, BLOCK)
        budget = max(PREFILL_TOKENS, shape.rows * shape.context)
        scheduler = Scheduler(pool, max_num_seqs=_ROWS_MAX, max_num_batched_tokens=budget, prefix_cache=False)
        core = Core(
            self._runner,
            self._tokenizer,
            scheduler,
            context=self._context,
            waiting_max=_ROWS_MAX,
            clock_ns=time.perf_counter_ns,
        )
        prompt = shape.context if shape.tokens == 1 else shape.tokens
        for row in range(shape.rows):
            self._seed += 1
            ask = Sampling(max_tokens=new_tokens, temperature=0.0, ignore_eos=True)
            ids = text_ids(self._tokenizer, prompt, self._seed)
            core.add(Work(request_id=str(row), attempt=1, prompt_ids=ids, prompt_text="", sampling=ask))
        return core


def bench_roofline(*, source: str, models_dir: Path, threads: int, dtype: str, steps: int, by: str, say: Say) -> Report:
    """`steps`: that count, of each shape. `by`: clock | cpu. No verdicts: it shows where to look."""
    torch.set_num_threads(threads)
    clock = time.perf_counter if by == "clock" else time.process_time
    path, device = fetch_model(source, models_dir), pick_device("cpu")
    tokenizer, context = HfTokenizer(path), PREFILL_TOKENS + 2 * BLOCK
    wish = Sizes(_ROWS_MAX, context, _ROWS_MAX * context, 0, BLOCK)
    served, _, sizes = directory_parts(path, wish, dtype, device)
    arch, precision = served.model.arch, served.model.precision
    say(f"{source}: {served.path}, {threads} thread(s)")
    watch = Stopwatch(clock)
    with torch.inference_mode():
        ops, make = TimedOps(pick_ops(device), watch), TimedMaker(precision, watch)
        model = Decoder(arch, open_weights(path, read_config(path)), precision, device, ops, make)
        apart = TorchRunner(
            model, rows=_ROWS_MAX, blocks=sizes.kv_blocks, block_tokens=BLOCK, blocks_per_row=-(-context // BLOCK)
        )
    bandwidth = read_bandwidth(int(weight_bytes(arch, precision)), clock)
    products = _peak(precision, clock)
    report = Report("roofline", notes=[surroundings()])
    report.notes.append(
        f"{source}, {served.path}, {threads} thread(s), by {by}: reads {bandwidth / 1e9:.1f} GB/s, "
        f"multiplies {products / 1e9:.0f} G operations/s; a step reads {weight_bytes(arch, precision) / 1e6:.0f} MB of weights"
    )
    whole, parts = (_Driver(runner, tokenizer, context, clock) for runner in (served, apart))
    for name, shape in SHAPES.items():
        say(name)
        count = steps if shape.tokens == 1 else max(1, steps // 4)
        as_served = whole.measure(shape, count, lambda: None)
        spent = parts.measure(shape, count, watch.reset)
        found = _parts(watch, spent, count)
        rows = against_limits(found, step_work(arch, precision, shape), bandwidth, products)
        limit_s = sum(row.limit_s for row in rows)
        report.control += [_row(name, row.part.value, row.spent_s, row.limit_s, row.bound) for row in rows]
        report.control.append(_row(name, "all parts", spent.step_s, limit_s, ""))
        report.control.append(_row(name, "as served", as_served.step_s, limit_s, ""))
    return report


def _parts(watch: Stopwatch, spent: _Spent, steps: int) -> dict[Part, float]:
    """Seconds of a step; what no part accounts for is the model's assembly or the scheduler's."""
    found = {part: seconds / steps for part, seconds in watch.spent.items()}
    found[Part.ASSEMBLY] = max(0.0, spent.model_s - sum(found.values()))
    found[Part.SAMPLING] = spent.sampling_s
    found[Part.SCHEDULER] = max(0.0, spent.step_s - spent.model_s - spent.sampling_s)
    return found


def _row(step: str, part: str, spent_s: float, limit_s: float, bound: str) -> dict[str, Any]:
    return {
        "step": step,
        "part": part,
        "ms": round(1e3 * spent_s, 3),
        "limit_ms": round(1e3 * limit_s, 3),
        "of_limit": round(limit_s / spent_s, 3) if spent_s > 0 else 0.0,
        "bound": bound,
    }


@torch.inference_mode()
def _peak(precision: Precision, clock: Clock) -> float:
    """Operations a second of the better of a square layer in the model's numbers and a plain product, at 512 tokens."""
    weight = torch.ones(_PEAK_SIDE, _PEAK_SIDE, dtype=precision.cache)
    layer = Maker(precision)(Role.GATE_UP, weight)
    x, plain = torch.ones(512, _PEAK_SIDE, dtype=precision.hidden), torch.ones(512, _PEAK_SIDE, dtype=precision.cache)
    spent_s = min(best_s(lambda: layer(x), clock), best_s(lambda: plain @ weight, clock))
    return 2 * 512 * _PEAK_SIDE**2 / spent_s
