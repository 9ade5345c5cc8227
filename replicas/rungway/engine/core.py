"""The engine without threads: requests in, steps out. engine.py runs it in a worker thread.

A step: schedule -> run the model -> sample -> append, detokenize, end what is finished -> one delta per sequence.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable

from rungway.engine.detokenize import Detokenizer
from rungway.engine.grammar import Grammar
from rungway.engine.guide import Guide
from rungway.engine.meter import Meter
from rungway.engine.protocol import Delta, EngineStats, EngineUsage, TokenLogprob, Work
from rungway.engine.runner import Runner
from rungway.engine.sampler import Row, Sampled, sample
from rungway.engine.scheduler import Scheduler, Slice
from rungway.engine.sequence import Group, Sequence
from rungway.engine.tokenizer import Vocabulary
from rungway.engine.validate import SEQUENCES_MAX, problem

DEAD_END = "dead_end: no token may follow under the request's constraint"


class _Answer:
    """What one sequence has said so far, beyond its tokens; `guide` holds what it may say next, None = anything."""

    __slots__ = ("cum_logprob", "detokenizer", "guide")

    def __init__(self, detokenizer: Detokenizer, guide: Guide | None) -> None:
        self.detokenizer = detokenizer
        self.guide = guide
        self.cum_logprob = 0.0


class Core:
    """Single-threaded, except `check` and `stats`, which any thread may call."""

    def __init__(
        self,
        runner: Runner,
        vocabulary: Vocabulary,
        scheduler: Scheduler,
        *,
        context: int,
        waiting_max: int,
        clock_ns: Callable[[], int],
    ) -> None:
        """`context` = most tokens of a sequence; requests beyond `waiting_max` waiting sequences are refused."""
        self._runner = runner
        self._vocabulary = vocabulary
        self._scheduler = scheduler
        self._context = context
        self._waiting_max = waiting_max
        self._answers: dict[Sequence, _Answer] = {}
        self._seeds: dict[str, int] = {}
        self._meter = Meter(clock_ns)
        self._lock = threading.Lock()

    @property
    def busy(self) -> bool:
        return bool(self._scheduler.groups)

    def add(self, work: Work, grammar: Grammar | None = None) -> list[Delta]:
        """Takes a request, with its constraint compiled. Returns its end at once where it cannot run or was complete
        already."""
        why = self._refusal(work, grammar)
        if why is not None:
            return refused(work, why)
        group = Group(work)
        limit = min(len(work.prompt_ids) + work.sampling.max_tokens, self._context)
        self._seeds[work.request_id] = secrets.randbits(62) if work.sampling.seed is None else work.sampling.seed
        with self._lock:
            self._scheduler.add(group, limit)
            return [delta for seq in group.members if (delta := self._resume(seq, grammar)) is not None]

    def cancel(self, request_id: str) -> list[Delta]:
        """Ends all sequences of a request; nothing for an unknown one."""
        with self._lock:
            group = self._scheduler.groups.get(request_id)
            members = [seq for seq in group.members if seq in self._answers] if group else []
            return [self._end(seq, "cancelled") for seq in members]

    def end_all(self, error: str | None = None) -> list[Delta]:
        """Ends every request: cancelled, or with `error` where the engine itself has failed."""
        finish = "cancelled" if error is None else "error"
        with self._lock:
            return [self._end(seq, finish, error) for seq in list(self._answers)]

    def step(self) -> list[Delta]:
        """One step of the model; nothing where there is no work. A device failure ends the requests of that step with an error, and only those."""
        with self._lock:
            step = self._scheduler.schedule()
        if not step:
            return []
        self._meter.start()
        try:
            done = self._runner.run(step)
            sampled = sample(done.logits, [self._row(seq) for seq in done.sequences]) if done.sequences else []
        except RuntimeError as error:
            with self._lock:
                return [self._end(seq, "error", f"engine failure: {error}") for seq, _ in step if seq in self._answers]
        with self._lock:
            self._scheduler.commit(step)
            deltas = [self._advance(seq, got) for seq, got in zip(done.sequences, sampled, strict=True)]
        self._measure(step, len(sampled))
        return deltas

    def check(self) -> list[str]:
        with self._lock:
            problems = self._scheduler.check()
            live = sum(group.live for group in self._scheduler.groups.values())
            if live != len(self._answers):
                problems.append(f"{len(self._answers)} answers for {live} live sequences")
            if self._seeds.keys() != self._scheduler.groups.keys():
                problems.append("a seed is kept for a request that has ended, or missing")
        return problems

    def stats(self) -> EngineStats:
        with self._lock:
            pool = self._scheduler.pool
            meter = self._meter
            return EngineStats(
                running=len(self._scheduler.running),
                waiting=len(self._answers) - len(self._scheduler.running),
                tokens_in_flight=sum(len(seq.tokens) for seq in self._answers),
                kv_blocks_total=pool.total,
                kv_blocks_free=pool.free - pool.idle,
                kv_blocks_cached=pool.idle,
                step_ms=meter.step_ms,
                prefill_tokens_per_s=meter.prefill_tokens_per_s,
                decode_tokens_per_s=meter.decode_tokens_per_s,
            )

    def _refusal(self, work: Work, grammar: Grammar | None) -> str | None:
        if (work.sampling.constraint is None) != (grammar is None):
            return "the request's constraint was not compiled"
        if work.request_id in self._scheduler.groups:
            return f"request id {work.request_id} is in use"
        if len(self._answers) - len(self._scheduler.running) >= self._waiting_max:
            return "the engine's queue is full"
        return problem(work, vocab_size=self._vocabulary.vocab_size, context=self._context)

    def _resume(self, seq: Sequence, grammar: Grammar | None) -> Delta | None:
        """Prepares the text state; what earlier attempts emitted is fed in and dropped. May find the end already."""
        ask = seq.group.work.sampling
        guide = None if grammar is None else grammar.guide()
        answer = self._answers[seq] = _Answer(Detokenizer(self._vocabulary, ask.stop), guide)
        resumed = seq.tokens[len(seq.group.work.prompt_ids) :]
        for token in resumed:
            answer.detokenizer.push(token)
            if guide is not None and not guide.accept(token):
                return self._end(seq, "error", DEAD_END)
        finish = self._finish(seq, resumed[-1]) if resumed else None
        return None if finish is None else self._end(seq, finish)

    def _row(self, seq: Sequence) -> Row:
        work = seq.group.work
        prompt = len(work.prompt_ids)
        seed = self._seeds[work.request_id]
        guide = self._answers[seq].guide
        mask = None if guide is None else guide.mask()
        return Row(work.sampling, seq.tokens, prompt, seed, seq.index, len(seq.tokens) - prompt, mask)

    def _finish(self, seq: Sequence, token: int) -> str | None:
        ask, answer = seq.group.work.sampling, self._answers[seq]
        if answer.detokenizer.stopped or (token in self._vocabulary.eos_ids and not ask.ignore_eos):
            return "stop"
        if answer.guide is not None and answer.guide.complete:
            return "stop"
        return "length" if len(seq.tokens) >= seq.limit else None

    def _advance(self, seq: Sequence, got: Sampled) -> Delta:
        answer = self._answers[seq]
        if got.token is None:
            dead = answer.guide is not None and not answer.guide.mask().any()
            return self._end(seq, "error", DEAD_END if dead else "the model gave no finite distribution")
        if answer.guide is not None and not answer.guide.accept(got.token):
            return self._end(seq, "error", DEAD_END)
        seq.tokens.append(got.token)
        seq.group.sampled += 1
        answer.cum_logprob += got.logprob
        text = answer.detokenizer.push(got.token)
        logprobs = None if seq.group.work.sampling.logprobs is None else [self._logprob(got)]
        finish = self._finish(seq, got.token)
        if finish is not None:
            return self._end(seq, finish, text=text, token_ids=[got.token], logprobs=logprobs)
        work = seq.group.work
        return Delta(
            request_id=work.request_id,
            attempt=work.attempt,
            index=seq.index,
            text=text,
            token_ids=[got.token],
            logprobs=logprobs,
        )

    def _end(
        self,
        seq: Sequence,
        finish: str,
        error: str | None = None,
        *,
        text: str = "",
        token_ids: list[int] | None = None,
        logprobs: list[TokenLogprob] | None = None,
    ) -> Delta:
        """The last delta of a sequence; its blocks are free when this returns."""
        answer = self._answers.pop(seq)
        self._scheduler.end(seq)
        group, work = seq.group, seq.group.work
        usage = None
        if group.live == 0:
            del self._seeds[work.request_id]
            usage = EngineUsage(len(work.prompt_ids), group.cached or 0, group.sampled)
        return Delta(
            request_id=work.request_id,
            attempt=work.attempt,
            index=seq.index,
            text=text + answer.detokenizer.flush(),
            token_ids=token_ids or [],
            logprobs=logprobs,
            finish=finish,
            error=error,
            cum_logprob=answer.cum_logprob,
            usage=usage,
        )

    def _logprob(self, got: Sampled) -> TokenLogprob:
        assert got.token is not None
        data = self._vocabulary.token_name(got.token)
        top = [(name.decode("utf-8", "replace"), name, value) for name, value in self._named(got.top)]
        return TokenLogprob(data.decode("utf-8", "replace"), data, got.logprob, top)

    def _named(self, top: list[tuple[int, float]]) -> list[tuple[bytes, float]]:
        return [(self._vocabulary.token_name(token), value) for token, value in top]

    def _measure(self, step: list[Slice], sampled: int) -> None:
        computed = sum(item.size for item in step)
        decoded = sum(1 for item in step if item.size == 1)
        self._meter.stop(prefilled=computed - decoded, decoded=min(decoded, sampled))


def refused(work: Work, why: str | None) -> list[Delta]:
    """The end of a request that never ran, cancelled where there is no `why`; nothing was computed, so nothing is billed."""
    count = work.sequences if 1 <= work.sequences <= SEQUENCES_MAX else 1
    return [
        Delta(
            request_id=work.request_id,
            attempt=work.attempt,
            index=index,
            text="",
            token_ids=[],
            finish="cancelled" if why is None else "error",
            error=why,
            usage=EngineUsage(0, 0, 0) if index == count - 1 else None,
        )
        for index in range(count)
    ]
