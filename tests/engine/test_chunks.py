"""A long prompt beside streams that decode: how much of a step it may take, configured or measured."""

from __future__ import annotations

import pytest

from engine.native_kit import Heard, work
from engine.test_scheduler import ByteVocabulary, ScriptedRunner
from rungway.engine.blocks import BlockPool
from rungway.engine.chunks import CHUNK_FIRST, CHUNK_MIN, SLOWDOWN, Chunks
from rungway.engine.core import Core
from rungway.engine.rules import Rules
from rungway.engine.runner import Step
from rungway.engine.scheduler import Scheduler, Slice

FIXED, STEP_TOKENS, STREAMS, LONG = 40, 512, 8, 8192
FAR = 2048  # tokens of context that cost a prompt token as much again


class CostedRunner(ScriptedRunner):
    """A step costs what reading the weights once costs, and as much again for each FIXED tokens in it; with `far`, prefills
    also cost what attention does, for each token and for reading the context once (as much as `reading` tokens)."""

    def __init__(self, far: int | None = None, reading: float = 2.0) -> None:
        super().__init__()
        self.far, self.reading = far, reading
        self.now_ns = 0
        self.costs: list[int] = []

    def run(self, step: list[Slice]) -> Step:
        cost = FIXED + sum(size for _, size in step)
        if self.far is not None:
            cost += sum((size + self.reading) * seq.computed / self.far for seq, size in step if seq.wanted > 1)
        self.costs.append(round(1000 * cost))
        self.now_ns += self.costs[-1]
        return super().run(step)


def gaps(rules: Rules, runner: CostedRunner | None = None) -> tuple[list[int], list[int], int]:
    """(step costs of eight streams alone, with an 8K prompt that arrives among them, steps until its first token)."""
    runner = runner or CostedRunner()
    scheduler = Scheduler(
        BlockPool(2000, 16), max_num_seqs=16, max_num_batched_tokens=STEP_TOKENS, rules=rules, prefix_cache=False
    )
    core = Core(runner, ByteVocabulary(), scheduler, context=10_000, waiting_max=99, clock_ns=lambda: runner.now_ns)
    for at in range(STREAMS):
        core.add(work(f"talks{at}", [at], max_tokens=2000))
    for _ in range(60):
        core.step()
    before, mark, heard = runner.costs[10:], len(runner.costs), Heard()
    core.add(work("long", [1] * LONG, max_tokens=1))
    while not heard.deltas["long", 0]:
        heard.take([delta for delta in core.step() if delta.request_id == "long"])
    during = runner.costs[mark:]
    assert all(sum(name.startswith("talks") for name, _, _ in step) == STREAMS for step in runner.steps[mark:])
    return before, during, len(during)


def p99(costs: list[int]) -> int:
    return sorted(costs)[int(0.99 * (len(costs) - 1))]


def test_streams_slow_down_at_most_threefold_while_an_8k_prompt_is_read() -> None:
    before, during, steps = gaps(Rules())
    assert p99(during) <= 3 * p99(before) and max(during) <= 3 * max(before)
    assert steps <= 2 * LONG / ((SLOWDOWN - 1) * (FIXED + STREAMS)), "and the prompt gets what it may take"


@pytest.mark.parametrize("reading", [0.5, 2.0, 4.0])
def test_the_same_where_attention_over_a_long_context_costs_most(reading: float) -> None:
    before, during, steps = gaps(Rules(), CostedRunner(FAR, reading))
    assert p99(during) <= 3 * p99(before) and max(during) <= 3 * max(before)
    # what the rule allows, had it known the costs all along
    room, position, least = (SLOWDOWN - 1) * (FIXED + STREAMS), 0, 0
    while position < LONG:
        far = position / FAR
        position += max(CHUNK_MIN, int((room - reading * far) / (1 + far)))
        least += 1
    assert 0.97 * least <= steps <= 1.03 * least


def test_a_share_that_shrank_grows_again_when_the_next_prompt_begins() -> None:
    """The costs of tokens and of context are told apart: at the end of a long prompt few tokens, then many."""
    chunks, sizes = Chunks(None, 512), []
    for _ in range(3):
        context = 0
        while context < LONG:
            chunks.learn(8, [], 8000)
            size = chunks.cap(8, context)
            sizes.append((context, size))
            chunks.learn(8, [(context, size)], 8000 + size * 600 + (size + 2) * context // 3)
            context += size
    starts = [size for context, size in sizes if context == 0]
    assert starts[0] == CHUNK_FIRST and all(12 <= size <= 20 for size in starts[1:]), "20 is what the costs allow"
    assert max(size for context, size in sizes if context > LONG - 64) <= CHUNK_MIN


def test_without_that_part_they_would_slow_down_beyond_it() -> None:
    before, during, steps = gaps(Rules(long_prefill_tokens=STEP_TOKENS))
    assert p99(during) > 8 * p99(before) and steps <= LONG // (STEP_TOKENS - STREAMS) + 2


def test_a_configured_part_is_kept_to_beside_others_and_not_alone() -> None:
    _, _, steps = gaps(Rules(long_prefill_tokens=64))
    assert steps == LONG // 64
    runner = CostedRunner()
    scheduler = Scheduler(
        BlockPool(100, 16), max_num_seqs=4, max_num_batched_tokens=256, rules=Rules(long_prefill_tokens=64)
    )
    core = Core(runner, ByteVocabulary(), scheduler, context=1600, waiting_max=9, clock_ns=lambda: 0)
    core.add(work("alone", [1] * 600, max_tokens=1))
    core.step()
    core.add(work("later", [2] * 600, max_tokens=1))
    core.step()
    assert runner.steps[0] == [("alone", 0, 256)]
    assert sum(size for _, _, size in runner.steps[1]) == 256, "nobody decodes, so nothing is left unused"
    assert ("later", 0, 64) in runner.steps[1]


def test_the_part_follows_what_was_measured() -> None:
    chunks = Chunks(None, 1024)
    assert (chunks.cap(0, 0), chunks.cap(8, 0)) == (512, CHUNK_FIRST), "nothing is known yet"
    chunks.learn(8, [], 6000)
    chunks.learn(0, [(0, 100)], 100 * 50)  # a step of a prompt alone has its fixed cost in it
    assert chunks.cap(8, 0) == (SLOWDOWN - 1) * 6000 / 50
    for _ in range(30):
        chunks.learn(8, [], 6000)
        chunks.learn(8, [(0, 100)], 6000 + 100 * 30)
    assert chunks.cap(8, 0) == pytest.approx((SLOWDOWN - 1) * 6000 / 30, abs=1)
    assert chunks.cap(0, 0) == 512
    for _ in range(60):
        chunks.learn(8, [(0, 100)], 6000 + 100 * 9000)
    assert chunks.cap(8, 0) == CHUNK_MIN
    for _ in range(99):
        chunks.learn(8, [(0, 100)], 6000)
    assert chunks.cap(8, 0) == 512, "tokens that cost nothing, as on a device with room, need no bound"


def test_an_admission_leaves_the_watermark_free_while_others_run() -> None:
    for watermark, admitted in ((0.0, 2), (0.5, 1)):
        scheduler = Scheduler(
            BlockPool(20, 4), max_num_seqs=4, max_num_batched_tokens=64, rules=Rules(kv_watermark=watermark)
        )
        core = Core(ScriptedRunner(), ByteVocabulary(), scheduler, context=80, waiting_max=9, clock_ns=lambda: 0)
        core.add(work("first", [1] * 24, max_tokens=4))
        core.add(work("second", [2] * 24, max_tokens=4))
        core.step()
        assert len(scheduler.running) == admitted
        while core.busy:
            core.step()
        assert scheduler.pool.free == 20
