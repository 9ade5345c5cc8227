"""The scheduler and the block pool with a scripted runner: no torch model, thousands of random steps."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from itertools import pairwise

import pytest
import torch

from engine.native_kit import VOCAB, ByteVocabulary, Heard, work
from engine.spec_kit import ScriptedDrafter, eager
from rungway.engine.blocks import BlockPool
from rungway.engine.core import Core
from rungway.engine.drafts import Speculation
from rungway.engine.protocol import Work
from rungway.engine.rules import DEFAULT_RULES, Rules
from rungway.engine.runner import Step
from rungway.engine.scheduler import Scheduler, Slice
from rungway.engine.sequence import Sequence


class ScriptedRunner:
    """Checks each step and 'predicts' that a sequence goes on with (last token + 1)."""

    vocab_size = VOCAB

    def __init__(self) -> None:
        self.steps: list[list[tuple[str, int, int]]] = []
        self.fail_next = False
        self.nan_for: str | None = None

    def run(self, step: list[Slice]) -> Step:
        assert step, "an empty step while there is work"
        assert len({id(seq) for seq, _ in step}) == len(step)
        self.steps.append([(seq.group.work.request_id, seq.index, size) for seq, size in step])
        if self.fail_next:
            self.fail_next = False
            raise RuntimeError("device lost")
        ready = [seq for seq, size in step if seq.wanted + len(seq.drafts) == size]
        places = [(seq, token) for seq in ready for token in (seq.tokens[-1], *seq.drafts)]
        logits = torch.zeros(len(places), VOCAB)
        for at, (seq, token) in enumerate(places):
            logits[at, (token + 1) % 250] = 50.0
            if seq.group.work.request_id == self.nan_for:
                logits[at, 3] = float("nan")
        return Step(ready, logits)


def rig(
    *,
    blocks: int,
    seqs: int = 4,
    batched: int = 16,
    block_tokens: int = 4,
    context: int = 64,
    speculation: Speculation | None = None,
    rules: Rules = DEFAULT_RULES,
) -> tuple[Core, Scheduler, ScriptedRunner]:
    runner = ScriptedRunner()
    scheduler = Scheduler(
        BlockPool(blocks, block_tokens, soft_quota=rules.kv_soft_quota),
        max_num_seqs=seqs,
        max_num_batched_tokens=batched,
        rules=rules,
    )
    core = Core(
        runner,
        ByteVocabulary(),
        scheduler,
        context=min(context, blocks * block_tokens),
        waiting_max=10_000,
        clock_ns=lambda: 0,
        speculation=speculation,
    )
    return core, scheduler, runner


def random_work(rng: random.Random, name: str) -> Work:
    shared = list(range(rng.choice([0, 100]), 250))[: rng.choice([0, 8, 17, 24])]  # two texts that many begin with
    prompt = shared + [rng.randrange(250) for _ in range(rng.randint(1, 40 - len(shared)))]
    return work(
        name,
        prompt,
        sequences=rng.choice([1, 1, 1, 2, 5]),
        max_tokens=rng.randint(1, 30),
        share=rng.choice("abc"),
        priority=rng.randrange(3),
        weight=rng.choice([1.0, 3.0]),
    )


def half_right(seq: Sequence, count: int) -> list[int]:
    """Goes on as the scripted runner does, up to a place that depends on the text, and from there on wrongly."""
    right = (7 * len(seq.tokens) + seq.tokens[-1]) % (count + 2)
    return [(seq.tokens[-1] + at + (1 if at <= right else 9)) % 250 for at in range(count)]


@pytest.mark.parametrize("drafts", [0, 5])
@pytest.mark.parametrize("seed", range(6))
def test_random_load_with_random_aborts_leaks_and_stalls_never(seed: int, drafts: int) -> None:
    rng = random.Random(seed)
    speculation = eager(ScriptedDrafter(half_right), drafts) if drafts else None
    core, scheduler, runner = rig(blocks=rng.choice([16, 20, 40]), speculation=speculation)
    heard = Heard()
    works: dict[str, Work] = {}
    cancelled: set[str] = set()
    for tick in range(400):
        if rng.random() < 0.4 and len(works) < 150:
            item = random_work(rng, f"r{tick}")
            works[item.request_id] = item
            heard.take(core.add(item))
        if works and rng.random() < 0.15:
            victim = rng.choice(list(works))
            got = core.cancel(victim)
            cancelled |= {victim} if got else set()
            heard.take(got)
        if core.busy:
            heard.take(core.step())
        assert core.check() == []
    for _ in range(20_000):
        if not core.busy:
            break
        heard.take(core.step())
        assert core.check() == []
    assert not core.busy and scheduler.pool.free == scheduler.pool.total and not len(scheduler.waiting)
    assert scheduler.preemptions > 0, "the pool was meant to be too small"
    assert speculation is None or 0 < speculation.accepted < speculation.drafted
    ends = [delta.usage for heard_of in heard.deltas.values() for delta in heard_of if delta.usage is not None]
    assert any(usage.cached_tokens for usage in ends), "beginnings were meant to be found again"
    assert all(sum(size for _, _, size in step) <= 16 and len(step) <= 4 for step in runner.steps)
    for name, item in works.items():
        usages = [d.usage for i in range(item.sequences) for d in heard.deltas[name, i] if d.usage is not None]
        assert len(usages) == 1
        assert usages[0].output_tokens == sum(len(heard.tokens(name, i)) for i in range(item.sequences))
        for index in range(item.sequences if name not in cancelled else 0):
            tokens = heard.tokens(name, index)
            limit = min(item.sampling.max_tokens, min(64, scheduler.pool.total * 4) - len(item.prompt_ids))
            assert len(tokens) == limit and heard.last(name, index).finish == "length"
            assert all(after == (before + 1) % 250 for before, after in pairwise([item.prompt_ids[-1], *tokens]))


def test_a_long_prompt_never_holds_up_decoding() -> None:
    core, _, runner = rig(blocks=200, batched=8, context=400)
    core.add(work("talks", [1], max_tokens=60))
    core.step()
    core.add(work("long", [1] * 300, max_tokens=1))
    for _ in range(40):
        core.step()
    assert all(("talks", 0, 1) in step for step in runner.steps)


def test_a_short_prompt_is_not_stuck_behind_a_long_one() -> None:
    core, _, runner = rig(blocks=200, batched=16, context=400)
    core.add(work("long", [1] * 350, max_tokens=1))
    core.step()
    core.add(work("short", [1] * 4, max_tokens=1))
    core.step()
    assert ("short", 0, 4) in runner.steps[-1] and sum(size for _, _, size in runner.steps[-1]) == 16


def test_alone_a_long_prompt_gets_the_whole_budget() -> None:
    core, _, runner = rig(blocks=200, batched=16, context=400)
    core.add(work("long", [1] * 64, max_tokens=1))
    core.step()
    assert runner.steps == [[("long", 0, 16)]]


def test_urgent_bands_go_first_and_age_decides_inside_a_share() -> None:
    core, _, runner = rig(blocks=100, seqs=1)
    for name, priority in (("a", 1), ("b", 1), ("urgent", 0), ("c", 1)):
        core.add(work(name, [1] * 4, max_tokens=1, priority=priority))
    while core.busy:
        core.step()
    assert [step[0][0] for step in runner.steps] == ["urgent", "a", "b", "c"]


@pytest.mark.parametrize(("weight", "ratio"), [(1.0, 1.0), (3.0, 3.0)])
def test_backlogged_shares_get_tokens_by_weight(weight: float, ratio: float) -> None:
    """One share sends ten times more requests; what both get differs by little more than one request."""
    core, _, runner = rig(blocks=100, seqs=2)
    for at in range(200):
        core.add(work(f"greedy{at}", [1] * 8, max_tokens=8, share="greedy"))
    for at in range(60):
        core.add(work(f"fair{at}", [1] * 8, max_tokens=8, share="fair", weight=weight))
    for _ in range(300):
        core.step()
    served: Counter[str] = Counter()
    for name, _, size in (item for step in runner.steps for item in step):
        served["fair" if name.startswith("fair") else "greedy"] += size
    assert served["fair"] == pytest.approx(ratio * served["greedy"], rel=0.15)


def test_idling_earns_no_credit() -> None:
    core, _, runner = rig(blocks=100, seqs=1)
    core.add(work("early", [1] * 4, max_tokens=2, share="idle"))
    for at in range(40):
        core.add(work(f"busy{at}", [1] * 4, max_tokens=4, share="busy"))
    for _ in range(100):
        core.step()
    for at in range(20):
        core.add(work(f"idle{at}", [1] * 4, max_tokens=4, share="idle"))
    mark = len(runner.steps)
    for _ in range(40):
        core.step()
    counts: dict[str, int] = defaultdict(int)
    for step in runner.steps[mark:]:
        counts[step[0][0].rstrip("0123456789")] += 1
    assert counts["busy"] >= 16 and counts["idle"] >= 16


def test_the_newest_of_the_least_urgent_is_preempted() -> None:
    core, scheduler, _ = rig(blocks=8, seqs=3, context=32)
    for name, priority in (("low-old", 2), ("high", 0), ("low-new", 2)):
        core.add(work(name, [1] * 4, max_tokens=24, priority=priority))
    while scheduler.preemptions == 0:
        core.step()
    assert [seq.group.work.request_id for seq in scheduler.waiting] == ["low-new"]


def test_a_device_failure_ends_only_the_requests_of_its_step() -> None:
    core, scheduler, runner = rig(blocks=100, seqs=2)
    heard = Heard()
    for name in ("one", "two", "later"):
        heard.take(core.add(work(name, [1] * 4, max_tokens=3)))
    runner.fail_next = True
    heard.take(core.step())
    assert {name for name, _ in heard.deltas} == {"one", "two"}
    assert all("device lost" in (heard.last(name).error or "") for name in ("one", "two"))
    while core.busy:
        heard.take(core.step())
    assert heard.tokens("later") == [2, 3, 4] and scheduler.pool.free == 100 and core.check() == []


def test_logits_that_are_not_finite_end_one_request() -> None:
    core, _, runner = rig(blocks=100)
    runner.nan_for = "sick"
    heard = Heard()
    for name in ("sick", "well"):
        heard.take(core.add(work(name, [1] * 4, max_tokens=3)))
    while core.busy:
        heard.take(core.step())
    assert heard.last("sick").finish == "error" and heard.tokens("well") == [2, 3, 4]


def test_the_queue_is_bounded() -> None:
    core = Core(
        ScriptedRunner(),
        ByteVocabulary(),
        Scheduler(BlockPool(10, 4), max_num_seqs=1, max_num_batched_tokens=4),
        context=40,
        waiting_max=2,
        clock_ns=lambda: 0,
    )
    ends = [core.add(work(str(at), [1], max_tokens=1)) for at in range(3)]
    assert [len(end) for end in ends] == [0, 0, 1] and "full" in (ends[2][0].error or "")


def test_the_self_check_sees_what_is_wrong() -> None:
    pool = BlockPool(4, 4)
    table = pool.take(2)
    assert table is not None and pool.check([table]) == []
    assert pool.check([]) and pool.check([table, table])
    pool.release(table[:1])
    assert pool.check([table])
    assert pool.take(4) is None and pool.free == 3
