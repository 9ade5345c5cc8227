"""What every engine owes its callers, run over all of them. A new back end adds one Kit and changes nothing else."""

from __future__ import annotations

import asyncio
import codecs
import json
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Protocol

import jsonschema
import msgspec
import pytest

from engine.tiny_model import save_tiny_llama
from rungway.contracts import Version
from rungway.engine.constraint import INVALID
from rungway.engine.engine import NativeEngine
from rungway.engine.fake import FakeEngine
from rungway.engine.fake_script import TEXTS
from rungway.engine.fake_stream import FakeProfile
from rungway.engine.protocol import Constraint, Delta, Engine, EngineUsage, Sampling, Work
from rungway.engine.tokenizer import HfTokenizer
from rungway.replica.build import build_engine

WAIT_S = 60.0
BLOCK_TOKENS = 4


class Kit(Protocol):
    """How to make one kind of engine and read its tokens."""

    def engine(self, *, max_num_seqs: int, max_context: int, kv_blocks: int) -> Engine: ...

    def prompt(self, text: str) -> tuple[list[int], str]: ...

    def token_bytes(self, token: int) -> bytes: ...


class FakeKit:
    step_tokens: int | None = None

    def engine(self, *, max_num_seqs: int, max_context: int, kv_blocks: int) -> Engine:
        profile = FakeProfile(
            ttft_ms=1,
            tpot_ms=1,
            prefill_ms_per_1k=1,
            kv_blocks=kv_blocks,
            block_tokens=BLOCK_TOKENS,
            step_tokens=self.step_tokens,
        )
        return FakeEngine(profile, max_num_seqs=max_num_seqs, max_context=max_context)

    def prompt(self, text: str) -> tuple[list[int], str]:
        # Words with multi-byte characters, one byte a token; the text is long enough for every case below.
        return [], " ".join(text) + "[[emit=" + "a%C3%A9%E2%82%AC%F0%9F%98%80%20" * 40 + "]]"

    def token_bytes(self, token: int) -> bytes:
        return TEXTS[token]


class Run:
    """An engine and everything it ever said."""

    def __init__(self, kit: Kit, engine: Engine) -> None:
        self.kit = kit
        self.engine = engine
        self.deltas: list[Delta] = []
        self.steps = 0
        self._news = asyncio.Event()

    def take(self, deltas: list[Delta]) -> None:
        assert deltas, "a step that produced nothing is not a step to tell of"
        self.steps += 1
        self.deltas += deltas
        self._news.set()

    def work(
        self,
        request_id: str,
        text: str = "hello",
        *,
        n: int = 1,
        resume: list[list[int]] | None = None,
        priority: int = 0,
        **sampling: Any,
    ) -> Work:
        ids, prompt_text = self.kit.prompt(text)
        sampling = {"max_tokens": 12, "seed": 3, "ignore_eos": True} | sampling
        return Work(
            request_id=request_id,
            attempt=1,
            prompt_ids=ids,
            prompt_text=prompt_text,
            sampling=Sampling(**sampling),
            sequences=n,
            resume=resume or [],
            priority=priority,
        )

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not condition():
                self._news.clear()
                await self._news.wait()

    async def ask(self, request_id: str, text: str = "hello", **more: Any) -> list[Delta]:
        self.engine.submit(self.work(request_id, text, **more))
        await self.until(lambda: self.over(request_id))
        return self.of(request_id)

    def of(self, request_id: str) -> list[Delta]:
        return [delta for delta in self.deltas if delta.request_id == request_id]

    def over(self, request_id: str) -> bool:
        return any(delta.usage is not None for delta in self.of(request_id))

    def ids(self, request_id: str, index: int = 0) -> list[int]:
        return [token for delta in self.of(request_id) if delta.index == index for token in delta.token_ids]

    def text(self, request_id: str, index: int = 0) -> str:
        return "".join(delta.text for delta in self.of(request_id) if delta.index == index)

    def at_rest(self) -> None:
        stats = self.engine.stats()
        assert (stats.running, stats.waiting, stats.tokens_in_flight) == (0, 0, 0)
        assert stats.kv_blocks_free + stats.kv_blocks_cached == stats.kv_blocks_total
        assert self.engine.check() == []


Open = Callable[..., Any]


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("tiny-llama"))


class FakeStepsKit(FakeKit):
    step_tokens = 64


@pytest.fixture(params=["fake", "fake-steps", "native"])
def kit(request: pytest.FixtureRequest) -> Kit:
    if request.param == "fake-steps":
        return FakeStepsKit()
    if request.param == "fake":
        return FakeKit()
    return NativeKit(request.getfixturevalue("tiny_llama"))


class NativeKit:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._tokenizer = HfTokenizer(path)

    def engine(self, *, max_num_seqs: int, max_context: int, kv_blocks: int) -> Engine:
        return NativeEngine.from_dir(
            self._path,
            max_num_seqs=max_num_seqs,
            max_context=max_context,
            max_num_batched_tokens=32,
            kv_blocks=kv_blocks,
            block_tokens=BLOCK_TOKENS,
            dtype="float32",
            device="cpu",
        )

    def prompt(self, text: str) -> tuple[list[int], str]:
        return self._tokenizer.encode(text), text

    def token_bytes(self, token: int) -> bytes:
        return self._tokenizer.token_bytes(token)


@pytest.fixture
def opened(kit: Kit) -> Open:
    @asynccontextmanager
    async def opened(*, max_num_seqs: int = 4, max_context: int = 64, kv_blocks: int = 64) -> AsyncIterator[Run]:
        engine = kit.engine(max_num_seqs=max_num_seqs, max_context=max_context, kv_blocks=kv_blocks)
        run = Run(kit, engine)
        await engine.start(run.take)
        try:
            yield run
        finally:
            await engine.stop()

    return opened


async def test_a_request_streams_and_ends_with_exact_usage_once(opened: Open) -> None:
    async with opened() as run:
        deltas = await run.ask("r", "hello", max_tokens=12)
        assert len(deltas) > 1
        assert [delta.finish for delta in deltas] == [None] * (len(deltas) - 1) + ["length"]
        (usage,) = [delta.usage for delta in deltas if delta.usage]
        assert deltas[-1].usage is usage
        assert (usage.prompt_tokens, usage.output_tokens) == (5, 12)
        assert 0 <= usage.cached_tokens < usage.prompt_tokens
        assert len(run.ids("r")) == 12
        assert all((delta.attempt, delta.index, delta.error) == (1, 0, None) for delta in deltas)
        run.at_rest()


async def test_the_same_seed_says_the_same_in_any_company(opened: Open) -> None:
    async with opened() as run:
        await run.ask("alone", seed=5)
        for number in range(6):
            run.engine.submit(run.work(f"other{number}", f"other {number}", seed=number))
        await run.ask("crowded", seed=5)
        assert run.ids("crowded") == run.ids("alone")
        assert run.text("crowded") == run.text("alone")


async def test_sequences_are_numbered_and_share_one_usage(opened: Open) -> None:
    async with opened() as run:
        deltas = await run.ask("r", "hello", n=3, max_tokens=7)
        assert sum(delta.usage is not None for delta in deltas) == 1
        assert deltas[-1].usage is not None
        assert (deltas[-1].usage.prompt_tokens, deltas[-1].usage.output_tokens) == (5, 21)
        assert [len(run.ids("r", index)) for index in range(3)] == [7, 7, 7]
        assert sorted(delta.index for delta in deltas if delta.finish) == [0, 1, 2]
        assert all(delta.cum_logprob < 0 for delta in deltas if delta.finish)
        run.at_rest()


async def test_more_sequences_than_seats_still_end(opened: Open) -> None:
    async with opened(max_num_seqs=2) as run:
        deltas = await run.ask("r", n=5, max_tokens=4)
        assert deltas[-1].usage is not None and deltas[-1].usage.output_tokens == 20
        run.at_rest()


@pytest.mark.parametrize("n", [1, 2])
async def test_cancel_frees_the_blocks_and_still_reports(opened: Open, n: int) -> None:
    async with opened(max_context=256, kv_blocks=256) as run:
        run.engine.submit(run.work("r", max_tokens=200, n=n))
        await run.until(lambda: len(run.ids("r")) >= 2)
        run.engine.cancel("r")
        run.engine.cancel("r")
        await run.until(lambda: run.over("r"))
        deltas = run.of("r")
        assert sorted(delta.index for delta in deltas if delta.finish == "cancelled") == list(range(n))
        (usage,) = [delta.usage for delta in deltas if delta.usage]
        assert usage.output_tokens == sum(len(run.ids("r", index)) for index in range(n)) < 200 * n
        run.at_rest()
        await run.ask("next")
        assert run.of("r") == deltas


async def test_cancel_of_a_waiting_request(opened: Open) -> None:
    async with opened(max_num_seqs=1, max_context=256, kv_blocks=256) as run:
        run.engine.submit(run.work("first", max_tokens=200))
        run.engine.submit(run.work("second"))
        await run.until(lambda: run.ids("first"))
        assert run.engine.stats().waiting == 1
        run.engine.cancel("second")
        await run.until(lambda: run.over("second"))
        assert (run.ids("second"), run.of("second")[-1].finish) == ([], "cancelled")
        run.engine.cancel("first")
        await run.until(lambda: run.over("first"))
        run.at_rest()


async def test_cancel_of_the_unknown_and_of_the_ended_does_nothing(opened: Open) -> None:
    async with opened() as run:
        run.engine.cancel("never")
        await run.ask("r")
        before = list(run.deltas)
        run.engine.cancel("r")
        await run.ask("s")
        assert run.of("r") == before
        run.at_rest()


async def test_a_prompt_that_is_too_long_fails_alone(opened: Open) -> None:
    async with opened() as run:
        run.engine.submit(run.work("good"))
        run.engine.submit(run.work("bad", "x" * 64))
        await run.until(lambda: run.over("good") and run.over("bad"))
        bad = run.of("bad")[-1]
        assert (bad.finish, run.ids("bad")) == ("error", [])
        assert bad.error
        assert bad.usage is not None and bad.usage.output_tokens == 0
        assert len(run.ids("good")) == 12
        run.at_rest()


async def test_output_ends_where_the_context_does(opened: Open) -> None:
    async with opened(max_context=20) as run:
        deltas = await run.ask("r", "hello", max_tokens=100)
        assert (len(run.ids("r")), deltas[-1].finish) == (15, "length")
        run.at_rest()


@pytest.mark.parametrize("max_tokens", [1, 2, 9])
async def test_max_tokens_is_exact(opened: Open, max_tokens: int) -> None:
    async with opened() as run:
        deltas = await run.ask("r", max_tokens=max_tokens)
        assert (len(run.ids("r")), deltas[-1].finish) == (max_tokens, "length")


async def test_stop_strings_are_cut_and_never_shown(opened: Open) -> None:
    async with opened() as run:
        await run.ask("plain", max_tokens=40)
        plain = run.text("plain")
        stop = plain[len(plain) // 2 : len(plain) // 2 + 3]
        deltas = await run.ask("r", max_tokens=40, stop=("never to be seen", stop))
        assert run.text("r") == plain[: plain.index(stop)]
        assert deltas[-1].finish == "stop"
        assert deltas[-1].usage is not None and deltas[-1].usage.output_tokens == len(run.ids("r"))
        await run.ask("held", max_tokens=40, stop=(plain[-2:] + "!",))
        assert run.text("held") == plain
        run.at_rest()


async def test_no_delta_splits_a_character(opened: Open) -> None:
    async with opened() as run:
        for number in range(4):
            await run.ask(f"r{number}", max_tokens=20 + number, seed=number)
            data = b"".join(run.kit.token_bytes(token) for token in run.ids(f"r{number}"))
            whole = codecs.getincrementaldecoder("utf-8")("replace").decode(data)
            assert run.text(f"r{number}") == whole
            assert all(delta.text.encode() for delta in run.of(f"r{number}") if delta.text)


@pytest.mark.parametrize("cut", [1, 5, 11])
async def test_a_resumed_request_goes_on_exactly(opened: Open, cut: int) -> None:
    async with opened() as run:
        whole = await run.ask("whole", n=2, max_tokens=12)
        kept: list[list[int]] = [[], []]
        shown = ["", ""]
        for delta in whole:  # what a client has when the replica dies: whole deltas, at least `cut` tokens where it can
            if len(kept[delta.index]) < cut and delta.finish is None:
                kept[delta.index] += delta.token_ids
                shown[delta.index] += delta.text
        rest = await run.ask("rest", n=2, max_tokens=12, resume=kept)
        for index in range(2):
            assert kept[index] + run.ids("rest", index) == run.ids("whole", index)
            assert shown[index] + run.text("rest", index) == run.text("whole", index)
        assert rest[-1].usage is not None
        assert (rest[-1].usage.prompt_tokens, rest[-1].usage.output_tokens) == (5, 24 - len(kept[0]) - len(kept[1]))
        run.at_rest()


async def test_logprobs_come_one_a_token(opened: Open) -> None:
    async with opened() as run:
        deltas = await run.ask("r", logprobs=2)
        entries = [entry for delta in deltas for entry in delta.logprobs or []]
        assert len(entries) == 12
        assert all(entry.logprob <= 0 and len(entry.top) == 2 for entry in entries)
        assert [entry.data for entry in entries] == [run.kit.token_bytes(token) for token in run.ids("r")]
        assert deltas[-1].cum_logprob == pytest.approx(sum(entry.logprob for entry in entries), rel=1e-4)
        plain = await run.ask("plain")
        assert all(delta.logprobs is None for delta in plain)


@pytest.mark.parametrize("n", [1, 3])
async def test_the_prompts_logprobs_come_once_and_first(opened: Open, n: int) -> None:
    async with opened() as run:
        want = run.work("x", "hello there", n=n)
        deltas = await run.ask("r", "hello there", n=n, prompt_logprobs=2, max_tokens=5)
        assert [delta.prompt_logprobs is not None for delta in deltas] == [True] + [False] * (len(deltas) - 1)
        tokens = deltas[0].prompt_logprobs
        (usage,) = [delta.usage for delta in deltas if delta.usage]
        assert len(tokens) == usage.prompt_tokens and usage.output_tokens == 5 * n
        assert b"".join(token.data for token in tokens).decode() == want.prompt_text
        assert (tokens[0].logprob, tokens[0].rank, tokens[0].top) == (None, 0, [])
        for token in tokens[1:]:
            best = [value for _, _, value in token.top]
            assert len(best) == 2 and best == sorted(best, reverse=True)
            assert token.logprob <= 0 and (token.rank > 2 or best[token.rank - 1] == token.logprob)
        run.engine.submit(run.work("only", "hello there", n=n, prompt_logprobs=2, max_tokens=0))
        await run.until(lambda: run.over("only"))
        only = run.of("only")
        assert only[0].prompt_logprobs == tokens and [delta.finish for delta in only] == ["length"] * n
        assert only[-1].usage == EngineUsage(len(tokens), 0, 0), "nothing was found, nothing was said"
        run.at_rest()


async def test_stats_are_sane_while_running(opened: Open) -> None:
    async with opened(max_num_seqs=2, max_context=256, kv_blocks=256) as run:
        assert run.engine.max_num_seqs == 2
        assert run.engine.kv_tokens == 256 * BLOCK_TOKENS
        for number in range(3):
            run.engine.submit(run.work(f"r{number}", max_tokens=200))
        await run.until(lambda: run.ids("r0") and run.ids("r1"))
        stats = run.engine.stats()
        assert (stats.running, stats.waiting, stats.kv_blocks_total) == (2, 1, 256)
        assert 0 < stats.kv_blocks_free < 256
        assert stats.tokens_in_flight >= 2 * 5
        assert stats.kv_blocks_cached >= 0
        assert run.engine.check() == []


async def test_the_urgent_band_goes_first(opened: Open) -> None:
    async with opened(max_num_seqs=1) as run:
        run.engine.submit(run.work("running", max_tokens=30))
        await run.until(lambda: run.ids("running"))
        run.engine.submit(run.work("later", priority=2, max_tokens=2))
        run.engine.submit(run.work("sooner", priority=1, max_tokens=2))
        await run.until(lambda: run.over("later") and run.over("sooner"))
        ends = [delta.request_id for delta in run.deltas if delta.usage]
        assert ends.index("sooner") < ends.index("later")


async def test_too_few_blocks_delay_but_never_deadlock(opened: Open) -> None:
    async with opened(kv_blocks=12, max_context=48) as run:
        for number in range(8):
            run.engine.submit(run.work(f"r{number}", "hello" * 2, max_tokens=25, seed=number))
        await run.until(lambda: all(run.over(f"r{number}") for number in range(8)))
        assert [len(run.ids(f"r{number}")) for number in range(8)] == [25] * 8
        run.at_rest()
        await run.ask("alone", "hello" * 2, max_tokens=25, seed=3)
        assert run.ids("alone") == run.ids("r3")  # giving way and coming back changed nothing


async def test_random_work_with_random_cancels_ends_with_all_blocks_free(opened: Open) -> None:
    rng = random.Random(11)
    async with opened(max_num_seqs=5, kv_blocks=40, max_context=60) as run:
        names = [f"r{number}" for number in range(50)]
        for number, name in enumerate(names):
            text = "x" * rng.choice([1, 3, 17, 40, 70])
            run.engine.submit(run.work(name, text, n=rng.choice([1, 1, 2]), max_tokens=rng.randint(1, 18), seed=number))
            if rng.random() < 0.4:
                await asyncio.sleep(0.003)
            if rng.random() < 0.3:
                run.engine.cancel(rng.choice(names[: number + 1]))
            assert run.engine.check() == []
        await run.until(lambda: all(run.over(name) for name in names))
        for name in names:
            (usage,) = [delta.usage for delta in run.of(name) if delta.usage]
            assert usage.output_tokens == sum(len(delta.token_ids) for delta in run.of(name))
            finishes = [delta.finish for delta in run.of(name) if delta.finish]
            assert set(finishes) <= {"length", "cancelled", "error"}
        run.at_rest()


async def test_a_constrained_request_fits_and_a_bad_constraint_ends_alone(opened: Open) -> None:
    shape = {"type": "array", "items": {"enum": ["a", 1]}, "minItems": 3, "maxItems": 4}
    good, bad = (Constraint("json_schema", json.dumps(schema)) for schema in (shape, {"not": shape}))
    async with opened(max_context=256, kv_blocks=256) as run:

        def submit(name: str, constraint: Constraint | None, **more: Any) -> None:
            work = run.work(name, max_tokens=60, ignore_eos=False, constraint=constraint, **more)
            run.engine.submit(msgspec.structs.replace(work, prompt_text="hello"))

        for name, constraint in (("good", good), ("bad", bad), ("free", None)):
            submit(name, constraint)
        await run.until(lambda: all(run.over(name) for name in ("good", "bad", "free")))
        jsonschema.validate(json.loads(run.text("good")), shape)
        assert run.of("good")[-1].finish == "stop"
        (end,) = run.of("bad")
        assert end.finish == "error" and (end.error or "").startswith(INVALID) and end.usage == EngineUsage(0, 0, 0)
        submit("again", good, resume=[run.ids("good")[:4]])
        await run.until(lambda: run.over("again"))
        assert run.ids("good")[:4] + run.ids("again") == run.ids("good")
        run.at_rest()


async def test_stop_ends_everything(opened: Open) -> None:
    async with opened(max_num_seqs=1, max_context=256, kv_blocks=256) as run:
        run.engine.submit(run.work("running", max_tokens=200))
        run.engine.submit(run.work("waiting"))
        await run.until(lambda: run.ids("running"))
        await run.engine.stop()
        assert [run.of(name)[-1].finish for name in ("running", "waiting")] == ["cancelled"] * 2
        assert run.over("running") and run.over("waiting")
        run.at_rest()
        count = len(run.deltas)
        await asyncio.sleep(0.02)
        assert len(run.deltas) == count
        await run.engine.stop()


def test_a_version_with_a_model_directory_builds_the_native_engine(tiny_llama: Path) -> None:
    version = Version(
        name="tiny",
        tier="small",
        model=f"path:{tiny_llama}",
        backend="native",
        replicas_min=1,
        replicas_max=1,
        replica_cost_nusd_per_hour=0,
        max_num_seqs=2,
        max_context=64,
        kv_blocks=8,
    )
    engine = build_engine(version, tiny_llama)
    assert isinstance(engine, NativeEngine)
    assert (engine.max_num_seqs, engine.kv_tokens) == (2, 8 * 16)
