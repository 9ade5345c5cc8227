"""A long prompt beside streams that decode: how much of a step it may take, configured or measured."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from engine.native_kit import Heard, work
from engine.test_scheduler import ByteVocabulary, ScriptedRunner
from rungway.engine.blocks import BlockPool
from rungway.engine.chunks import CHUNK_FIRST, LOOK_AFTER, SLOWDOWN, Chunks
from rungway.engine.core import Core
from rungway.engine.rules import Rules
from rungway.engine.runner import Step
from rungway.engine.scheduler import Scheduler, Slice
from rungway.engine.step_costs import PrefillCost

FIXED, STEP_TOKENS, STREAMS, LONG = 40, 512, 8, 8192
FAR = 2048  # tokens of context that cost a prompt token as much again
LEAST = Rules().long_prefill_tokens_min


class CostedRunner(ScriptedRunner):
    """A step costs what reading the weights once costs, and as much again for each FIXED tokens in it; with `far`, prefills
    also cost what attention does, for each pair of tokens and for reading the context once (as much as `reading` tokens); with
    `own`, decodes cost a token more for so many tokens that they have together. `alone` is what decodes alone would cost."""

    def __init__(self, far: int | None = None, reading: float = 2.0, own: int | None = None) -> None:
        super().__init__()
        self.far, self.reading, self.own = far, reading, own
        self.now_ns = 0
        self.costs: list[int] = []
        self.alone: list[int] = []

    def run(self, step: list[Slice]) -> Step:
        decodes = [seq for seq, _ in step if seq.wanted == 1]
        alone = FIXED + len(decodes) + sum(seq.computed for seq in decodes) / (self.own or math.inf)
        cost = alone
        for seq, size in step:
            if seq.wanted > 1:
                cost += size + ((size + self.reading) * seq.computed + size * size / 2) / (self.far or math.inf)
        self.alone.append(round(1000 * alone))
        self.costs.append(round(1000 * cost))
        self.now_ns += self.costs[-1]
        return super().run(step)


class Talk:
    """Eight streams on a costed engine, and what is asked beside them."""

    def __init__(self, rules: Rules, runner: CostedRunner, answer: int = 6000) -> None:
        self.runner = runner
        self.scheduler = Scheduler(
            BlockPool(8000, 16), max_num_seqs=32, max_num_batched_tokens=STEP_TOKENS, rules=rules, prefix_cache=False
        )
        vocabulary = ByteVocabulary()
        self.core = Core(
            runner, vocabulary, self.scheduler, context=10_000, waiting_max=99, clock_ns=lambda: runner.now_ns
        )
        self.join("talks", answer)

    def join(self, name: str, answer: int = 6000) -> None:
        for at in range(STREAMS):
            self.core.add(work(f"{name}{at}", [at], max_tokens=answer))

    def read(self, *names: str, each: Callable[[int], None] = lambda step: None) -> range:
        """The steps in which long prompts are read, the first to the one that ends the last."""
        mark, heard = len(self.runner.costs), Heard()
        for name in names:
            self.core.add(work(name, [1] * LONG, max_tokens=1))
        while not all(heard.deltas[name, 0] for name in names):
            each(len(self.runner.costs) - mark)
            heard.take([delta for delta in self.core.step() if delta.request_id in names])
        return range(mark, len(self.runner.costs))

    def slower(self, steps: range) -> list[float]:
        """How many times as long as the same decodes alone each step took."""
        return [self.runner.costs[at] / self.runner.alone[at] for at in steps]


def gaps(rules: Rules, runner: CostedRunner | None = None) -> tuple[list[int], list[int], int]:
    """(step costs of eight streams alone, with an 8K prompt that arrives among them, steps until its first token)."""
    talk = Talk(rules, runner or CostedRunner())
    for _ in range(60):
        talk.core.step()
    steps = talk.read("long")
    costs, named = talk.runner.costs, talk.runner.steps
    assert all(sum(name.startswith("talks") for name, _, _ in named[at]) == STREAMS for at in steps)
    return costs[10 : steps.start], costs[steps.start :], len(steps)


def allowed(runner: CostedRunner, read: int) -> float:
    """Steps that the rule needs for a long prompt, had it known the costs all along; streams have `read` tokens then."""
    position, steps = 0.0, 0
    far, own = runner.far or math.inf, runner.own or math.inf
    while position < LONG:
        room = (SLOWDOWN - 1) * (FIXED + STREAMS + (read + STREAMS * steps) / own) - runner.reading * position / far
        size = LEAST
        while size < STEP_TOKENS // 2 and size + 1 + (size + 1) * (position + (size + 1) / 2) / far <= room:
            size += 1
        position += size
        steps += 1
    return steps * (1 + 1 / LOOK_AFTER)


def p99(costs: list[int]) -> int:
    return sorted(costs)[int(0.99 * (len(costs) - 1))]


def test_streams_slow_down_at_most_threefold_while_an_8k_prompt_is_read() -> None:
    before, during, steps = gaps(Rules())
    assert p99(during) <= 3 * p99(before) and max(during) <= 3 * max(before)
    assert steps <= 1.03 * allowed(CostedRunner(), 0), "and the prompt gets what it may take"


@pytest.mark.parametrize("reading", [0.5, 2.0, 4.0])
def test_the_same_where_attention_over_a_long_context_costs_most(reading: float) -> None:
    before, during, steps = gaps(Rules(), runner := CostedRunner(FAR, reading))
    assert p99(during) <= 3 * p99(before) and max(during) <= 3 * max(before)
    assert 0.97 * allowed(runner, 0) <= steps <= 1.03 * allowed(runner, 0)


@pytest.mark.parametrize("own", [32, 200, 1024])
def test_growing_streams_are_compared_with_themselves_at_the_same_length(own: int) -> None:
    """What their own texts cost is not taken for the prompt's doing: it gets what it may take then, and no more."""
    talk = Talk(Rules(), CostedRunner(FAR, 2.0, own))
    for _ in range(40):
        talk.core.step()
    steps = talk.read("long")
    slower = talk.slower(steps)
    assert max(slower) <= 3.0 and SLOWDOWN - 0.4 <= sorted(slower)[len(slower) // 2] <= SLOWDOWN + 0.1
    assert talk.runner.alone[-1] > 1.8 * talk.runner.alone[steps.start] or own > 32, "they have grown"
    assert 0.94 <= len(steps) / allowed(talk.runner, 320) <= 1.25


def test_short_streams_that_follow_long_ones_are_not_slowed_to_the_pace_of_those() -> None:
    talk = Talk(Rules(), CostedRunner(FAR, 2.0, own=128), answer=1500)
    for _ in range(1490):
        talk.core.step()
    assert talk.runner.alone[-1] > 2.5 * talk.runner.alone[10]

    def follow(step: int) -> None:
        if step == 9:
            talk.join("next")

    steps = talk.read("long", each=follow)
    slower = talk.slower(steps)
    decoding = [sum(size == 1 for _, _, size in talk.runner.steps[at]) for at in steps]
    assert decoding[0] == decoding[-1] == STREAMS and talk.runner.alone[steps.start] > 2 * talk.runner.alone[steps[50]]
    assert sum(ratio > 3.0 for ratio in slower) <= 3, "the steps in which they begin"


def test_long_prompts_that_are_read_together_divide_what_one_may_take() -> None:
    talk = Talk(Rules(), CostedRunner(FAR, 1.0))
    for _ in range(40):
        talk.core.step()
    slower = talk.slower(talk.read("one", "two", "three"))
    assert sum(ratio > 3.0 for ratio in slower) <= 3, "but for the step that they arrive in"


@pytest.mark.parametrize("prefills", [[], [(1000, 20)]])
def test_a_step_that_took_long_for_other_reasons_changes_little(prefills: list[tuple[int, int]]) -> None:
    chunks = Chunks(None, STEP_TOKENS)
    for _ in range(30):
        chunks.learn(8, 400, [], 10_000)
        chunks.learn(8, 400, [(1000, 20)], 22_000)
    usual = chunks.cap(8, 400, 1000)
    chunks.learn(8, 400, prefills, 800_000)
    assert 15 <= usual <= 25 and 0.75 * usual <= chunks.cap(8, 400, 1000) <= 1.25 * usual


def test_a_share_that_shrank_grows_again_when_the_next_prompt_begins() -> None:
    """The costs of tokens and of context are told apart: at the end of a long prompt few tokens, then many."""
    chunks, sizes = Chunks(None, 512, LEAST), []
    for _ in range(3):
        context = 0
        while context < LONG:
            chunks.learn(8, 0, [], 8000)
            size = chunks.cap(8, 0, context)
            sizes.append((context, size))
            chunks.learn(8, 0, [(context, size)], 8000 + size * 600 + (size + 2) * context // 3)
            context += size
    starts = [size for context, size in sizes if context == 0]
    assert starts[0] == CHUNK_FIRST and all(9 <= size <= 16 for size in starts[1:]), "16 is what the costs allow"
    assert max(size for context, size in sizes if context > LONG - 64) <= LEAST


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
    chunks = Chunks(None, 1024, least=LEAST)
    assert (chunks.cap(0, 0, 0), chunks.cap(8, 0, 0)) == (512, CHUNK_FIRST), "nothing is known yet"
    chunks.learn(8, 0, [], 6000)
    chunks.learn(0, 0, [(0, 100)], 100 * 50)  # a step of a prompt alone has its fixed cost in it
    assert chunks.cap(8, 0, 0) == (SLOWDOWN - 1) * 6000 / 50
    for _ in range(30):
        chunks.learn(8, 0, [], 6000)
        chunks.learn(8, 0, [(0, 100)], 6000 + 100 * 30)
    assert chunks.cap(8, 0, 0) == pytest.approx((SLOWDOWN - 1) * 6000 / 30, rel=0.02)
    assert chunks.cap(0, 0, 0) == 512
    for _ in range(60):
        chunks.learn(8, 0, [(0, 100)], 6000 + 100 * 9000)
    assert chunks.cap(8, 0, 0) == LEAST
    for _ in range(99):
        chunks.learn(8, 0, [(0, 100)], 6000)
    assert chunks.cap(8, 0, 0) == 512, "tokens that cost nothing, as on a device with room, need no bound"


def test_decodes_alone_are_measured_now_and_then_and_first_of_all() -> None:
    chunks = Chunks(None, 512)
    assert not chunks.looks(8, 0)
    chunks.learn(8, 0, [(0, 16)], 900)
    assert chunks.looks(8, 0), "nobody knows what they cost without the prompt"
    chunks.learn(8, 0, [], 500)
    for _ in range(LOOK_AFTER):
        assert not chunks.looks(8, 0)
        chunks.learn(8, 0, [(0, 16)], 900)
    assert chunks.looks(8, 0) and not chunks.looks(0, 0)
    configured = Chunks(64, 512)
    for _ in range(2 * LOOK_AFTER):
        configured.learn(8, 0, [(0, 64)], 900)
    assert not configured.looks(8, 0)


@pytest.mark.parametrize("context", [0, 3000])
def test_a_part_that_fits_is_one_that_costs_the_room(context: int) -> None:
    """Large parts as well, in which tokens attend to each other."""
    cost = PrefillCost()

    def spent(at: int, size: int) -> float:
        return 1000 * size + 500 * ((size + 2) * at + size * size / 2) / 1024

    for turn in range(3000):
        at, size = 700 * (turn % 7), 32 << turn % 4
        cost.learn([(at, size)], 9000 + spent(at, size), 9000)
    size = round(cost.fits(1_000_000, context))
    assert spent(context, size) == pytest.approx(1_000_000, rel=0.01) and cost.fits(1, 9000) == 0.0


@pytest.mark.parametrize(("least", "size"), [(1, 1), (4, 4), (32, 32), (999, 256)])
def test_the_least_part_is_what_is_configured(least: int, size: int) -> None:
    chunks = Chunks(None, 512, least)
    chunks.learn(1, 0, [], 100)
    chunks.learn(1, 0, [(0, 10)], 100 + 10 * 100_000)
    assert chunks.cap(1, 0, 0) == size


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
