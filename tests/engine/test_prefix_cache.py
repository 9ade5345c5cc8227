"""Finding what was computed before: never a wrong answer, never another tenant's, never a lost block."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from engine.native_kit import Heard, drain, generate, make_core, random_model, random_prompts, run_all, work
from rungway.engine.blocks import BlockPool
from rungway.engine.core import Core
from rungway.engine.scheduler import Scheduler

BLOCK = 4
NEW = 12
SYSTEM = random_prompts(1, longest=60, seed=3)[0][:1] + list(range(40, 79))  # 40 tokens, ten blocks


@pytest.fixture(scope="module")
def model() -> Any:
    return random_model("llama")


def asked(core: Core, name: str, prompt: list[int], **more: Any) -> tuple[list[int], int]:
    """Tokens and cached tokens of one request alone."""
    heard = run_all(core, [work(name, prompt, max_tokens=NEW, **more)])
    return heard.tokens(name), heard.usage(name).cached_tokens


def test_cache_on_off_cold_and_warm_give_the_same_answer(model: Any) -> None:
    core, scheduler = make_core(model)
    off, off_scheduler = make_core(model, prefix_cache=False)
    for at, tail in enumerate(random_prompts(6, longest=9)):
        prompt = SYSTEM + tail
        cold, _ = asked(core, f"cold{at}", prompt)
        warm, cached = asked(core, f"warm{at}", prompt)
        assert cold == warm == asked(off, f"off{at}", prompt)[0] == generate(model, prompt, NEW)
        assert cached == (len(prompt) - 1) // BLOCK * BLOCK
    assert asked(off, "again", SYSTEM)[1] == 0 and off_scheduler.pool.idle == 0
    assert scheduler.pool.idle > 0 and core.stats().kv_blocks_cached == scheduler.pool.idle
    stats = core.stats()
    assert stats.kv_blocks_free + stats.kv_blocks_cached == stats.kv_blocks_total


@pytest.mark.parametrize("blocks", [1, 2, 5])
@pytest.mark.parametrize("beside", [-1, 0, 1])
def test_a_whole_prefix_hit_still_computes_a_token(model: Any, blocks: int, beside: int) -> None:
    core, _ = make_core(model)
    prompt = SYSTEM[: blocks * BLOCK + beside]
    expected = generate(model, prompt, NEW)
    for turn in range(3):
        tokens, cached = asked(core, f"r{turn}", prompt)
        assert tokens == expected and cached < len(prompt)
        assert cached == (0 if turn == 0 else (len(prompt) - 1) // BLOCK * BLOCK)


def test_another_tenant_finds_nothing(model: Any) -> None:
    core, _ = make_core(model)
    assert [asked(core, name, SYSTEM, share=name[0])[1] for name in ("a1", "b1", "a2", "b2")] == [0, 0, 36, 36]


def test_colliding_keys_cost_hits_and_never_answers(model: Any) -> None:
    core, scheduler = make_core(model, hasher=lambda _parent, _tokens: b"same")
    for at, prompt in enumerate([SYSTEM, SYSTEM[4:], SYSTEM[:8] + SYSTEM[20:], SYSTEM]):
        for share in ("a", "b"):
            assert asked(core, f"{share}{at}", prompt, share=share)[0] == generate(model, prompt, NEW)
    assert len(scheduler.pool.known) <= 1 and core.check() == []


def test_a_next_turn_finds_the_answer_of_the_last(model: Any) -> None:
    core, _ = make_core(model)
    tokens, _ = asked(core, "first", SYSTEM)
    _, cached = asked(core, "second", [*SYSTEM, *tokens, 7, 8, 9])
    assert cached == (len(SYSTEM) + NEW - 1) // BLOCK * BLOCK  # the last token was never computed


def test_cached_tokens_are_counted_once_for_all_samples_and_not_after_preemption(model: Any) -> None:
    core, scheduler = make_core(model, batched=16)
    asked(core, "warm", SYSTEM)
    core.add(work("n", SYSTEM, sequences=4, max_tokens=NEW))
    heard = Heard()
    for _ in range(3):
        heard.take(core.step())
    for seq in list(scheduler.running):
        scheduler.preempt(seq)
    drain(core, heard)
    usage = heard.usage("n")
    assert (usage.prompt_tokens, usage.cached_tokens, usage.output_tokens) == (40, 36, 4 * NEW)
    assert [heard.tokens("n", index) for index in range(4)] == [generate(model, SYSTEM, NEW)] * 4


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_preemption_at_every_step_loses_repeats_and_changes_nothing(
    model: Any, prefix_cache: bool, temperature: float
) -> None:
    """Recomputation and hits on one's own blocks; the randomness does not start again."""
    works = [
        work(str(at), SYSTEM[: 9 + at], max_tokens=NEW, seed=at, temperature=temperature, sequences=1 + at % 2)
        for at in range(4)
    ]
    expected = run_all(make_core(model, prefix_cache=False)[0], works)
    core, scheduler = make_core(model, prefix_cache=prefix_cache)
    heard = Heard()
    for item in works:
        heard.take(core.add(item))
    turn = 0
    while core.busy:
        heard.take(core.step())
        turn += 1
        for seq in list(scheduler.running)[turn % 2 :: 2]:
            scheduler.preempt(seq)
        assert core.check() == [] and turn < 500
    for at in range(4):
        assert [heard.tokens(str(at), i) for i in range(1 + at % 2)] == [
            expected.tokens(str(at), i) for i in range(1 + at % 2)
        ]


def test_shared_beginnings_in_a_pool_that_is_too_small(model: Any) -> None:
    prompts = [SYSTEM[:20] + tail for tail in random_prompts(14, longest=12)]
    core, scheduler = make_core(model, seqs=6, batched=16, blocks=20, context=64)
    heard = run_all(core, [work(str(at), prompt, max_tokens=NEW) for at, prompt in enumerate(prompts)])
    assert [heard.tokens(str(at)) for at in range(14)] == [generate(model, prompt, NEW) for prompt in prompts]
    assert scheduler.preemptions > 0 and any(heard.usage(str(at)).cached_tokens for at in range(14))
    assert scheduler.pool.free == scheduler.pool.total


def test_what_was_found_is_not_charged(model: Any) -> None:
    def spent(prefix_cache: bool) -> float:
        core, scheduler = make_core(model, prefix_cache=prefix_cache)
        asked(core, "filler", [1, 2], share="other")
        before = scheduler.waiting.got("a")
        for name in ("one", "two"):
            core.add(work(name, SYSTEM, max_tokens=1, share="a"))
            core.add(work(f"{name}-o", [5], max_tokens=40, share="other"))
            for _ in range(3):
                core.step()
        return scheduler.waiting.got("a") - before

    assert spent(prefix_cache=False) - spent(prefix_cache=True) == pytest.approx(36.0)


def fill(pool: BlockPool, share: str, tokens: list[int]) -> list[int]:
    """A finished text of whole blocks, known and idle. Returns its blocks."""
    keys: list[bytes] = []
    table = pool.known.match(share, tokens, keys, len(tokens) // BLOCK)
    pool.share(table)
    table += pool.take(len(tokens) // BLOCK - len(table), share) or []
    for at in range(len(table)):
        pool.known.learn(share, tokens, keys, table, at)
    pool.release(table)
    return table


def test_the_longest_unused_goes_first_and_leaves_before_their_parents() -> None:
    pool = BlockPool(8, BLOCK)
    old, new = list(range(12)), list(range(100, 112))
    fill(pool, "a", old)
    fill(pool, "a", new)
    fill(pool, "a", old[:4])  # its beginning is used again
    assert pool.idle == 6 and pool.check([]) == []

    def found(tokens: list[int]) -> int:
        return len(pool.known.match("a", tokens, [], 3))

    lengths = []
    taken: list[int] = []
    while pool.free:
        taken += pool.take(1) or []
        lengths.append((found(old), found(new)))
        assert pool.check([taken]) == []
    assert lengths[:2] == [(3, 3), (3, 3)], "blocks that hold nothing go first"
    assert lengths[2:] == [(2, 3), (1, 3), (1, 2), (1, 1), (1, 0), (0, 0)]
    assert all(before >= after for pair in pairwise(lengths) for before, after in zip(*pair, strict=True))


def test_a_held_block_is_never_given_away() -> None:
    pool = BlockPool(4, BLOCK)
    fill(pool, "a", list(range(12)))
    held = pool.known.match("a", list(range(12)), [], 2)
    pool.share(held)
    assert pool.take(3) is None and pool.take(2) is not None
    assert pool.free == 0 and pool.known.match("a", list(range(12)), [], 3) == held
    pool.release(held)
    assert pool.idle == 2


def test_the_self_check_sees_a_broken_index() -> None:
    pool = BlockPool(4, BLOCK)
    table = fill(pool, "a", list(range(8)))
    assert pool.check([]) == []
    pool.known._children.clear()
    assert pool.check([])
    pool = BlockPool(4, BLOCK)
    table = fill(pool, "a", list(range(8)))
    pool.share(table[1:])  # a child without its parent
    assert pool.check([table[1:]])


def test_the_scheduler_can_do_without() -> None:
    scheduler = Scheduler(BlockPool(4, BLOCK), max_num_seqs=1, max_num_batched_tokens=4, prefix_cache=False)
    assert scheduler.check() == [] and len(scheduler.pool.known) == 0
