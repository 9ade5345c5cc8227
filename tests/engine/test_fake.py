"""The fake engine's own promises: pace, script, text, blocks. Time is driven by hand, so nothing here sleeps."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rungway.engine.fake import FakeEngine, FakeFailure
from rungway.engine.fake_core import FakeCore
from rungway.engine.fake_script import TEXTS, WORD_COUNT, WORDS, ScriptError, read_script
from rungway.engine.fake_stream import FakeProfile
from rungway.engine.protocol import Delta, Sampling, Work

MS = 1_000_000


def work(text: str = "tell me", request_id: str = "r", *, priority: int = 0, **more: object) -> Work:
    resume = more.pop("resume", [])
    sequences = more.pop("sequences", 1)
    more.setdefault("max_tokens", 16)
    return Work(
        request_id=request_id,
        attempt=1,
        prompt_ids=[],
        prompt_text=text,
        sampling=Sampling(**more),  # type: ignore[arg-type]
        resume=resume,  # type: ignore[arg-type]
        sequences=sequences,  # type: ignore[arg-type]
        priority=priority,
    )


class Bench:
    """A core with a hand-driven clock; `run` steps from wake to wake."""

    def __init__(self, *, max_num_seqs: int = 8, max_context: int = 4096, **profile: object) -> None:
        self.core = FakeCore(
            FakeProfile(**profile),  # type: ignore[arg-type]
            max_num_seqs=max_num_seqs,
            max_context=max_context,
        )
        self.now = 10_000 * MS
        self.log: list[tuple[int, Delta]] = []

    def step(self, at: int | None = None) -> list[Delta]:
        self.now = self.now if at is None else at
        deltas = self.core.step(self.now)
        self.log += [(self.now, delta) for delta in deltas]
        assert self.core.check() == []
        return deltas

    def run(self, steps_max: int = 20_000) -> list[Delta]:
        for _ in range(steps_max):
            wake = self.core.wake_ns()
            if wake is None:
                return [delta for _, delta in self.log]
            self.step(max(self.now, wake))
        raise AssertionError("the core never came to rest")

    def ask(self, *works: Work) -> list[Delta]:
        for one in works:
            self.core.submit(one)
        return self.run()


def text_of(deltas: list[Delta], index: int = 0, request_id: str = "r") -> str:
    return "".join(d.text for d in deltas if d.index == index and d.request_id == request_id)


def ids_of(deltas: list[Delta], index: int = 0) -> list[int]:
    return [token for d in deltas if d.index == index for token in d.token_ids]


def test_times_are_those_of_the_profile() -> None:
    bench = Bench(ttft_ms=30, tpot_ms=10, prefill_ms_per_1k=1000)
    start = bench.now
    bench.ask(work("one two three four", max_tokens=101))
    at = [now for now, delta in bench.log for _ in delta.token_ids]
    assert 34 * MS <= at[0] - start <= 39 * MS  # 30 ms + 4 words of prefill, rounded up to the grid
    assert abs((at[-1] - at[0]) - 100 * 10 * MS) <= 10 * MS


@pytest.mark.parametrize("tokens", [20, 200])
def test_the_measured_rate_is_that_of_work_not_of_waiting_for_it(tokens: int) -> None:
    """A minute without work between answers, and answers that are shorter than the window of a measurement."""
    bench = Bench()
    for number in range(60):
        bench.ask(work("x [[ttft_ms=0]] [[tpot_ms=10]]", request_id=f"r{number}", max_tokens=tokens))
        bench.now += 60_000 * MS
    assert bench.core.stats().decode_tokens_per_s == pytest.approx(100, rel=0.2)


def test_everything_due_in_a_slot_comes_in_one_step() -> None:
    bench = Bench(max_num_seqs=600, kv_blocks=100_000)
    for number in range(600):
        bench.core.submit(work(f"prompt {number}", f"r{number}", max_tokens=40))
    bench.run()
    steps = {now for now, _ in bench.log}
    assert len(bench.log) == 600 * 40
    assert len(steps) <= 42


def test_a_late_step_catches_up() -> None:
    bench = Bench(ttft_ms=5, tpot_ms=5)
    bench.core.submit(work(max_tokens=100))
    bench.step()
    (delta,) = bench.step(bench.now + 200 * MS)
    assert 38 <= len(delta.token_ids) <= 41
    assert delta.text.split() == [TEXTS[token].decode().strip() for token in delta.token_ids]


@pytest.mark.parametrize("late_ms", [1, 7, 50, 5000])
def test_lateness_changes_no_text(late_ms: int) -> None:
    calm, late = Bench(), Bench()
    expected = text_of(calm.ask(work(max_tokens=60, stop=("zz",))))
    late.core.submit(work(max_tokens=60, stop=("zz",)))
    while late.core.wake_ns() is not None:
        late.step(late.now + late_ms * MS)
    assert text_of([delta for _, delta in late.log]) == expected


def test_tokens_made_past_a_stop_by_a_late_step_are_taken_back() -> None:
    plain = text_of(Bench().ask(work(max_tokens=60))).split()
    stop = " " + plain[7]
    calm = Bench().ask(work(max_tokens=60, stop=(stop,)))
    late = Bench()
    late.core.submit(work(max_tokens=60, stop=(stop,)))
    late.step()
    (delta,) = late.step(late.now + 5000 * MS)
    assert (delta.finish, delta.usage, delta.text) == ("stop", calm[-1].usage, text_of(calm))
    assert delta.usage is not None and delta.usage.output_tokens == len(delta.token_ids) == 8
    assert delta.cum_logprob == pytest.approx(calm[-1].cum_logprob)


def test_text_is_a_function_of_prompt_seed_and_index() -> None:
    same = [text_of(Bench().ask(work("a prompt", seed=7))) for _ in range(2)]
    other_prompt = text_of(Bench().ask(work("b prompt", seed=7)))
    other_seed = text_of(Bench().ask(work("a prompt", seed=8)))
    two = Bench().ask(work("a prompt", seed=7, sequences=2))
    assert same[0] == same[1] == text_of(two, 0)
    assert len({same[0], other_prompt, other_seed, text_of(two, 1)}) == 4
    assert len(same[0].split()) == 16  # one word a token, as the word tokenizer counts


@pytest.mark.parametrize(
    ("text", "max_tokens", "count", "finish"),
    [
        ("x [[tokens=5]]", 16, 5, "stop"),
        ("x [[tokens=16]]", 16, 16, "length"),
        ("x [[tokens=50]]", 16, 16, "length"),
        ("x [[tokens=0]]", 16, 0, "stop"),
        ("x [[tokens=9]] then [[tokens=3]]", 16, 3, "stop"),
        ("x [[eos_after=16]]", 16, 16, "stop"),
        ("x [[eos_after=17]]", 16, 16, "length"),
        ("x [[emit=abc]]", 16, 3, "stop"),
        ("x [[emit=abcdef]]", 4, 4, "length"),
        ("x [[fail_after=3]]", 16, 3, "error"),
        ("x [[fail_after=17]]", 16, 16, "length"),
        ("see [[wiki]] and [[Other=1]]", 16, 16, "length"),
        ("x", 0, 0, "length"),
    ],
)
def test_directives_set_length_and_end(text: str, max_tokens: int, count: int, finish: str) -> None:
    deltas = Bench().ask(work(text, max_tokens=max_tokens))
    last = deltas[-1]
    assert (len(ids_of(deltas)), last.finish) == (count, finish)
    assert last.usage is not None and last.usage.output_tokens == count
    assert (last.error is not None) == (finish == "error")


def test_ignore_eos_passes_the_scripted_eos() -> None:
    deltas = Bench().ask(work("x [[eos_after=3]]", ignore_eos=True))
    assert (len(ids_of(deltas)), deltas[-1].finish) == (16, "length")


def test_pace_directives() -> None:
    bench = Bench(prefill_ms_per_1k=0)
    start = bench.now
    bench.ask(work("x [[ttft_ms=300]] [[tpot_ms=100]]", max_tokens=11))
    at = [now for now, _ in bench.log]
    assert 300 * MS <= at[0] - start <= 305 * MS
    assert abs((at[-1] - at[0]) - 1000 * MS) <= 100 * MS


@pytest.mark.parametrize("bad", ["[[tokens=x]]", "[[tokens]]", "[[tpot_ms=-1]]", "[[ttft_ms=inf]]", "[[hang=q]]"])
def test_an_unreadable_directive_fails_its_request_alone(bad: str) -> None:
    with pytest.raises(ScriptError):
        read_script(bad)
    deltas = Bench().ask(work(bad, "bad"), work("fine", "good"))
    (failed,) = [d for d in deltas if d.request_id == "bad"]
    assert failed.finish == "error" and "directive" in (failed.error or "")
    assert len(text_of(deltas, 0, "good").split()) == 16


def test_hang_holds_its_blocks_until_cancelled() -> None:
    bench = Bench()
    bench.core.submit(work("x [[hang]]", "h"))
    bench.core.submit(work("x [[hang=3]]", "r"))
    bench.run()
    assert len(ids_of([d for _, d in bench.log])) == 3
    assert bench.core.stats().running == 2
    bench.core.cancel("h")
    bench.core.cancel("r")
    assert bench.core.stats().kv_blocks_free == 4096
    assert {d.finish for d in bench.step()} == {"cancelled"}


def test_fail_always_and_fail_at_start() -> None:
    (delta,) = Bench(fail="always").ask(work())
    assert (delta.finish, delta.token_ids) == ("error", [])
    with pytest.raises(ValueError, match="fail must be"):
        FakeProfile(fail="sometimes")
    with pytest.raises(ValueError, match="vocab"):
        FakeProfile(vocab="emoji")


async def test_fail_start_raises_at_start() -> None:
    engine = FakeEngine(FakeProfile(fail="start"), max_num_seqs=1, max_context=64)
    with pytest.raises(FakeFailure):
        await engine.start(lambda deltas: None)


def test_emit_never_splits_a_character_and_drops_a_partial_one() -> None:
    whole = Bench().ask(work("x [[emit=a%E2%82%AC%F0%9F%98%80z]]"))
    assert text_of(whole) == "a€😀z"
    assert [d.text for d in whole if d.text] == ["a", "€", "😀", "z"]
    cut = Bench().ask(work("x [[emit=a%E2%82%AC%F0%9F%98%80z]]", max_tokens=6))
    assert (text_of(cut), len(ids_of(cut)), cut[-1].finish) == ("a€", 6, "length")


def test_stop_is_cut_and_usage_counts_what_was_sampled() -> None:
    plain = text_of(Bench().ask(work())).split()
    stop = plain[4][1:] + " " + plain[5][:2]  # begins inside the fifth word, ends inside the sixth
    deltas = Bench().ask(work(stop=(stop,)))
    assert text_of(deltas) == " ".join(plain[:4]) + " " + plain[4][:1]
    assert deltas[-1].finish == "stop"
    assert deltas[-1].usage is not None and deltas[-1].usage.output_tokens == len(ids_of(deltas)) == 6


def test_text_held_for_a_stop_that_never_comes_is_sent_at_the_end() -> None:
    plain = text_of(Bench().ask(work()))
    deltas = Bench().ask(work(stop=(plain[-4:] + "!",)))
    assert text_of(deltas) == plain


def test_logprobs_are_fixed_and_sum_up() -> None:
    deltas = Bench().ask(work(logprobs=3))
    entries = [entry for d in deltas for entry in d.logprobs or []]
    assert len(entries) == 16
    assert all(entry.top[0][2] == entry.logprob < 0 and len(entry.top) == 3 for entry in entries)
    assert b"".join(entry.data for entry in entries).decode() == text_of(deltas)
    assert deltas[-1].cum_logprob == pytest.approx(sum(entry.logprob for entry in entries))
    assert [entry.top for d in Bench().ask(work(logprobs=0)) for entry in d.logprobs or []] == [[]] * 16


@given(st.integers(0, 30), st.booleans(), st.integers(0, 2**31))
def test_resume_continues_exactly(cut: int, emit: bool, seed: int) -> None:
    text = "x [[emit=%E2%82%AC%F0%9F%98%80caf%C3%A9%E2%82%AC%E2%82%ACababab%E2%82%AC%F0%9F%98%80]]" if emit else "x y"
    sampling = {"max_tokens": 30, "seed": seed, "stop": ("ababac", "zq")}
    whole = Bench().ask(work(text, **sampling))
    ids = ids_of(whole)
    cut = min(cut, len(ids) - 1)  # with the last token the end is out, too
    before, seen = "", 0
    for delta in whole:  # what a client had when the replica died after `cut` tokens (one a delta here)
        seen += len(delta.token_ids)
        if seen > cut:
            break
        before += delta.text
    rest = Bench().ask(work(text, resume=[ids[:cut]], **sampling))
    assert before + text_of(rest) == text_of(whole)
    assert ids[:cut] + ids_of(rest) == ids
    assert rest[-1].usage is not None and rest[-1].usage.output_tokens == len(ids) - cut


def test_blocks_follow_the_context() -> None:
    bench = Bench(block_tokens=4, kv_blocks=100)
    bench.core.submit(work("a b c", max_tokens=10))
    held = []
    while bench.core.wake_ns() is not None:
        bench.step(max(bench.now, bench.core.wake_ns() or 0))
        held.append(100 - bench.core.stats().kv_blocks_free)
    assert held == [*sorted(held[:-1]), 0]
    assert max(held) == 3  # 3 + 9 tokens before the last one ends it


def test_more_work_than_blocks_all_ends_and_the_urgent_end_first() -> None:
    bench = Bench(block_tokens=4, kv_blocks=12, max_num_seqs=6)
    asks = [work("a b c d", f"r{n}", priority=n % 3, max_tokens=30) for n in range(12)]
    deltas = bench.ask(*asks)
    ends = [d.request_id for d in deltas if d.usage]
    assert sorted(ends) == sorted(one.request_id for one in asks)
    assert all(d.usage.output_tokens == 30 for d in deltas if d.usage)
    assert [int(name[1:]) % 3 for name in ends] == sorted(int(name[1:]) % 3 for name in ends)
    assert bench.core.stats().kv_blocks_free == 12


def test_a_request_larger_than_the_cache_is_an_error() -> None:
    bench = Bench(block_tokens=4, kv_blocks=4, max_context=64)
    (delta,) = bench.ask(work(max_tokens=30))
    assert delta.finish == "error" and "KV cache" in (delta.error or "")


@pytest.mark.parametrize("seed", [20, 21])
def test_random_work_keeps_the_books(seed: int) -> None:
    rng = random.Random(seed)
    bench = Bench(block_tokens=4, kv_blocks=40, max_num_seqs=5, max_context=120)
    open_ids: set[str] = set()
    for number in range(300):
        name = f"r{number}"
        text = rng.choice(["w " * rng.randint(1, 30), "x [[hang=2]]", "x [[fail_after=4]]", "x [[emit=%E2%82%AC]]"])
        bench.core.submit(work(text, name, max_tokens=rng.randint(0, 40), sequences=rng.randint(1, 3)))
        open_ids.add(name)
        for _ in range(rng.randint(0, 6)):
            bench.step(max(bench.now, bench.core.wake_ns() or 0) + rng.choice([0, 0, 30 * MS]))
        if rng.random() < 0.3:
            bench.core.cancel(rng.choice(sorted(open_ids)))
            assert bench.core.check() == []
    for name in open_ids:
        bench.core.cancel(name)
    bench.run()
    ends = [d.request_id for _, d in bench.log if d.usage]
    assert sorted(ends) == sorted(open_ids)
    stats = bench.core.stats()
    assert (stats.kv_blocks_free, stats.running, stats.waiting, stats.tokens_in_flight) == (40, 0, 0, 0)


def test_word_ids_are_words() -> None:
    assert len(set(WORDS)) == WORD_COUNT
    assert all(len(word.split()) == 1 for word in WORDS)
